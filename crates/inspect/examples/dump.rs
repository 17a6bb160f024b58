//! Prints what a guest's frames are: `dump [cr3=HEX] SEGMENT...`
//!
//! A SEGMENT is `PATH`, the RAM from guest-physical address 0 on, or `PATH,OFFSET,BYTES,GPA`
//! (decimal or 0x), a part of it. PATH is a VMM's memfd (`/proc/PID/fd/N`) or a copy of it. All of
//! it is first read into memory, so pause the guest for exact figures. It needs as much memory as
//! the guest has.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::time::Instant;

use ebb_inspect::{BuddyBlock, End, Guest, Request, Snapshot};
use ebb_units::{FRAME_BYTES, Gpa};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let (mut mem, mut roots) = (Snapshot::new(), Vec::new());
    for arg in std::env::args().skip(1) {
        match arg.strip_prefix("cr3=") {
            Some(hex) => roots.push(u64::from_str_radix(hex, 16)?),
            None => add(&mut mem, &arg)?,
        }
    }
    let start = Instant::now();
    let guest = Guest::inspect(&mem, &roots)?;
    println!("kernel {} inspect_us {}", guest.release(), start.elapsed().as_micros());
    println!("runs {} frames {}", guest.memmap().runs().len(), guest.memmap().frames());
    println!("free_bytes {}", guest.free_bytes(&mem).unwrap_or(0));
    println!("{:#?}", guest.counts(&mem));
    lists(&guest, &mem);
    heads(&guest, &mem);
    victims(&guest, &mem);
    speed(&guest, &mem);
    Ok(())
}

/// Copies a segment's bytes into memory.
fn add(mem: &mut Snapshot, segment: &str) -> Result<(), Error> {
    let parts: Vec<&str> = segment.split(',').collect();
    let mut file = File::open(parts[0])?;
    let (offset, bytes, gpa) = match parts[1..] {
        [] => (0, file.metadata()?.len(), 0),
        [offset, bytes, gpa] => (number(offset)?, number(bytes)?, number(gpa)?),
        _ => return Err(format!("{segment}: a segment is PATH or PATH,OFFSET,BYTES,GPA").into()),
    };
    file.seek(SeekFrom::Start(offset))?;
    mem.add(Gpa(gpa), words(&mut file, bytes)?);
    Ok(())
}

fn number(text: &str) -> Result<u64, std::num::ParseIntError> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    }
}

fn words(file: &mut File, bytes: u64) -> Result<Vec<u64>, std::io::Error> {
    let mut words = Vec::with_capacity((bytes / 8) as usize);
    let mut block = vec![0; FRAME_BYTES as usize * 256];
    while words.len() as u64 * 8 < bytes {
        let want = block.len().min(bytes as usize - words.len() * 8);
        file.read_exact(&mut block[..want])?;
        words.extend(block[..want].as_chunks().0.iter().map(|&word| u64::from_le_bytes(word)));
    }
    Ok(words)
}

/// Prints the free lists, zone by zone, as `/proc/buddyinfo` shows them, from both ends.
fn lists(guest: &Guest, mem: &Snapshot) {
    for zone in guest.zones().iter() {
        for end in [End::Head, End::Tail] {
            print!("zone {} {:?} {end:?}", zone.node, zone.kind);
            for order in 0..=guest.layout().max_order() {
                print!(" {}", blocks(guest, mem, zone, order, end));
            }
            println!();
        }
    }
}

/// Counts the blocks of `order` in a zone, over its migrate types.
fn blocks(guest: &Guest, mem: &Snapshot, zone: &ebb_inspect::Zone, order: u8, end: End) -> usize {
    let zones = guest.zones();
    let count = |kind| {
        let mut list = zones.free_list(guest.sight(mem), zone, order, kind, end);
        let blocks = list.by_ref().count();
        if let Some(fault) = list.fault() {
            println!("(order {order} type {kind}: {fault})");
        }
        blocks
    };
    (0..zones.migrate_types()).map(count).sum()
}

/// Checks that every free block found by address is also one by a fresh look.
fn heads(guest: &Guest, mem: &Snapshot) {
    let (start, mut blocks) = (Instant::now(), Vec::new());
    guest.memmap().free_blocks(mem, guest.layout(), 9, |head, order| {
        blocks.push(BuddyBlock { head, order });
    });
    println!("heads {} us {}", blocks.len(), start.elapsed().as_micros());
    let start = Instant::now();
    let agreed = blocks.iter().filter(|block| {
        guest.look(mem).head(block.head).is_some_and(|head| head.order == block.order)
    });
    println!("look agreed {} us {}", agreed.count(), start.elapsed().as_micros());
}

fn victims(guest: &Guest, mem: &Snapshot) {
    let request = Request { min_order: 9, reserve_bytes: 64 << 20, want_bytes: u64::MAX };
    let (start, mut blocks) = (Instant::now(), Vec::new());
    let taken = guest.victims(mem, request, &mut blocks);
    println!("victims {} {taken:?} us {}", blocks.len(), start.elapsed().as_micros());
}

/// Prints each scan's time per GiB of guest, best of ten: with its data in the caches, and after
/// other data went through them.
fn speed(guest: &Guest, mem: &Snapshot) {
    let mut sweep = vec![1u8; 256 << 20];
    let gib = guest.memmap().frames() as f64 / (1 << 18) as f64;
    let mut time = |what: &str, scan: &dyn Fn() -> u64| {
        let mut best = [f64::MAX; 2];
        for (cold, best) in best.iter_mut().enumerate() {
            for _ in 0..10 {
                if cold == 1 {
                    sweep.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(1));
                }
                let start = Instant::now();
                std::hint::black_box(scan());
                *best = best.min(start.elapsed().as_secs_f64() * 1e6 / gib);
            }
        }
        println!("speed {what}: warm {:.1} us/GiB, cold {:.1} us/GiB", best[0], best[1]);
    };
    time("full classification", &|| guest.counts(mem).frames());
    for order in [9, 0] {
        time(&format!("free blocks of order {order} and more"), &|| {
            let mut frames = 0;
            let layout = guest.layout();
            guest.memmap().free_blocks(mem, layout, order, |_, order| frames += 1u64 << order);
            frames
        });
    }
}
