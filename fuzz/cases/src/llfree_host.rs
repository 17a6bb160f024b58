//! A shared allocator's areas and trees, written by a hostile guest between the host's steps and,
//! if the first byte is odd, at the same time. The input is `step, index, value` of 1, 1 and 4
//! bytes. Each step of the host ends, and none panics.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32};
use std::thread;

use ebb_llfree::Host;

const AREAS: usize = 128;
const TREES: usize = 16;

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some((first, steps)) = data.split_first() else { return };
    let areas: Vec<AtomicU16> = (0..AREAS).map(|_| AtomicU16::new(0)).collect();
    let trees: Vec<AtomicU32> = (0..TREES).map(|_| AtomicU32::new(0)).collect();
    let host = Host::new(&areas, &trees, AREAS as u64 * 512).expect("arrays of this size");
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        if first & 1 == 1 {
            scope.spawn(|| scribble(&areas, &trees, steps, &over));
        }
        for step in steps.as_chunks::<6>().0 {
            act(&host, &areas, &trees, step);
        }
        over.store(true, Relaxed);
    });
}

/// The guest's other processor, which writes all the time.
fn scribble(areas: &[AtomicU16], trees: &[AtomicU32], steps: &[u8], over: &AtomicBool) {
    while !over.load(Relaxed) && !steps.is_empty() {
        for (index, byte) in steps.iter().enumerate() {
            areas[index % areas.len()].fetch_xor(u16::from(*byte) << (index % 9), Relaxed);
            trees[index % trees.len()].fetch_add(u32::from(*byte), Relaxed);
        }
    }
}

fn act(host: &Host<'_>, areas: &[AtomicU16], trees: &[AtomicU32], step: &[u8; 6]) {
    let [kind, index, value @ ..] = *step;
    let (index, value) = (usize::from(index), u32::from_le_bytes(value));
    match kind % 8 {
        0 => areas[index % areas.len()].store(value as u16, Relaxed),
        1 => trees[index % trees.len()].store(value, Relaxed),
        2 => drop(host.hard_reclaim(index)),
        3 => drop(host.return_area(index)),
        4 | 5 => drop(host.soft_reclaim(index)),
        6 => host.install(index),
        _ => drop(host.free_areas(index)),
    }
}
