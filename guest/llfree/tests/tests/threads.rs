//! Many threads on one region at once: guests in C and in Rust, and a host in
//! Rust that sees the region through a mapping of its own.
//!
//! Each frame has an owner's word and a word of content outside of the
//! allocator. Who gets a frame finds it without an owner, writes its content,
//! and finds that unchanged before it puts the frame back: so a frame got twice
//! shows, and so does memory taken while it was in use.

use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};
use std::thread;

use ebb_llfree::layout::TREE_RESERVED;
use ebb_llfree::{Error, Host, Kind};
use llfree_tests::{Allocator, Region};

const AREAS: usize = 20;
const FRAMES: u64 = AREAS as u64 * 512 + 77;
const ROUNDS: u32 = 100_000;

/// A small generator of numbers, one a thread.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// What is behind the zone's frames.
struct Memory {
    owners: Vec<AtomicU32>,
    content: Vec<AtomicU64>,
    /// As the VMM's page tables have an area: what a touch finds.
    mapped: Vec<AtomicU8>,
    reclaimed: Vec<Mutex<Reclaimed>>,
    installs: AtomicU64,
}

/// R: the host's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reclaimed {
    Installed,
    Soft,
    Hard,
}

const MAPPED: u8 = 0;
const EMPTY: u8 = 1;

impl Memory {
    fn new() -> Memory {
        let areas = AREAS + 1;
        Memory {
            owners: (0..FRAMES).map(|_| AtomicU32::new(0)).collect(),
            content: (0..FRAMES).map(|_| AtomicU64::new(0)).collect(),
            mapped: (0..areas).map(|_| AtomicU8::new(MAPPED)).collect(),
            reclaimed: (0..areas).map(|_| Mutex::new(Reclaimed::Installed)).collect(),
            installs: AtomicU64::new(0),
        }
    }

    fn take(&self, frame: u64, order: u8, owner: u32) {
        let mapped = self.mapped[(frame / 512) as usize].load(Acquire);
        assert_ne!(mapped, EMPTY, "frame {frame} has no memory");
        for frame in frame..frame + (1 << order) {
            let before = self.owners[frame as usize].swap(owner, AcqRel);
            assert_eq!(before, 0, "frame {frame} is {before}'s");
            self.content[frame as usize].store(u64::from(owner) << 32 | frame, Relaxed);
        }
    }

    fn give(&self, frame: u64, order: u8, owner: u32) {
        for frame in frame..frame + (1 << order) {
            let content = self.content[frame as usize].load(Relaxed);
            assert_eq!(content, u64::from(owner) << 32 | frame, "frame {frame} lost its content");
            assert_eq!(self.owners[frame as usize].swap(0, AcqRel), owner);
        }
    }

    /// The VMM's memory goes, and what was in it.
    fn empty(&self, area: usize) {
        self.mapped[area].store(EMPTY, Release);
        let end = FRAMES.min((area as u64 + 1) * 512);
        (area as u64 * 512..end).for_each(|frame| self.content[frame as usize].store(0, Relaxed));
    }

    /// What the fault does in the host's stead.
    fn touch(&self, host: &Host<'_>, frame: u64) {
        let area = (frame / 512) as usize;
        if self.mapped[area].fetch_or(0, AcqRel) == MAPPED {
            return;
        }
        let mut reclaimed = self.reclaimed[area].lock().unwrap();
        assert_ne!(*reclaimed, Reclaimed::Hard, "area {area} is the host's");
        if *reclaimed == Reclaimed::Soft {
            // Memory first: who sees no flag does not touch.
            self.mapped[area].store(MAPPED, Release);
            host.install(area);
            *reclaimed = Reclaimed::Installed;
            self.installs.fetch_add(1, Relaxed);
        }
    }

    /// One transition of Fig. 2, or none.
    fn reclaim(&self, host: &Host<'_>, area: usize, soft: bool) {
        let mut reclaimed = self.reclaimed[area].lock().unwrap();
        if *reclaimed != Reclaimed::Hard {
            if host.hard_reclaim(area).is_err() {
                return;
            }
            self.empty(area);
            *reclaimed = Reclaimed::Hard;
            if !soft {
                return;
            }
        }
        host.return_area(area).unwrap();
        *reclaimed = Reclaimed::Soft;
    }

    /// Everything is given back to the guest.
    fn restore(&self, host: &Host<'_>) {
        for (area, reclaimed) in self.reclaimed.iter().enumerate() {
            if *reclaimed.lock().unwrap() == Reclaimed::Hard {
                host.return_area(area).unwrap();
            }
            host.install(area);
        }
    }
}

/// Gets and puts at random, and holds up to a share of the zone.
fn guest(zone: &dyn Allocator, memory: &Memory, owner: u32) {
    let (mut random, mut held) = (Random(u64::from(owner) * 0x9e37_79b9), Vec::new());
    let orders = [0, 0, 0, 0, 1, 2, 3, 6, 7, 8, 9, 9, 10];
    let mut frames = 0;
    for _ in 0..ROUNDS {
        let order = orders[random.below(orders.len() as u64) as usize];
        let block = match random.below(16) {
            0..8 if frames < FRAMES / 3 => {
                let kind = if random.below(3) == 0 { Kind::Unmovable } else { Kind::Movable };
                zone.get(order, kind, owner)
            }
            8 => {
                let frame = random.below(FRAMES) >> order << order;
                zone.get_at(frame, order).map(|()| frame)
            }
            9 if random.below(64) == 0 => {
                zone.drain();
                continue;
            }
            _ => {
                frames -= put_one(zone, memory, owner, &mut held, &mut random);
                continue;
            }
        };
        match block {
            Ok(frame) => {
                memory.take(frame, order, owner);
                held.push((frame, order));
                frames += 1 << order;
            }
            Err(Error::Memory | Error::Taken | Error::Frame) => {}
            Err(error) => panic!("{error}"),
        }
    }
    for (frame, order) in held {
        memory.give(frame, order, owner);
        zone.put(frame, order).unwrap();
    }
}

/// Whole, or one half, the other half being put later. How many frames.
fn put_one(
    zone: &dyn Allocator,
    memory: &Memory,
    owner: u32,
    held: &mut Vec<(u64, u8)>,
    random: &mut Random,
) -> u64 {
    if held.is_empty() {
        return 0;
    }
    let index = random.below(held.len() as u64) as usize;
    let (mut frame, mut order) = held.swap_remove(index);
    if order > 0 && random.below(4) == 0 {
        order -= 1;
        held.push((frame, order));
        frame += 1 << order;
    }
    memory.give(frame, order, owner);
    zone.put(frame, order).unwrap();
    1 << order
}

/// Guests of these languages, with a host beside them or without. One core: they share the slots.
fn run(rust: u32, c: u32, cores: u32, with_host: bool) {
    let region = Region::new(FRAMES, cores).unwrap();
    let other = region.again().unwrap();
    let (memory, host, done) = (Memory::new(), other.host(), AtomicBool::new(false));
    let touch = |frame| memory.touch(&host, frame);
    let (in_rust, in_c) = (region.zone(touch), region.c_zone(touch));
    thread::scope(|scope| {
        let mut guests = Vec::new();
        for owner in 1..=rust + c {
            let zone: &dyn Allocator = if owner <= rust { &in_rust } else { &in_c };
            let memory = &memory;
            guests.push(scope.spawn(move || guest(zone, memory, owner)));
        }
        scope.spawn(|| {
            let mut random = Random(99);
            while with_host && !done.load(Acquire) {
                let area = random.below(AREAS as u64 + 1) as usize;
                memory.reclaim(&host, area, random.below(2) == 0);
            }
        });
        let failed = guests.into_iter().map(|guest| guest.join()).filter(Result::is_err).count();
        done.store(true, Release);
        assert_eq!(failed, 0, "see above");
    });
    memory.restore(&host);
    in_rust.drain();
    let is_reserved = |tree: &AtomicU32| tree.load(Acquire) & TREE_RESERVED != 0;
    assert!(!region.parts().trees.iter().any(is_reserved), "a tree of no slot is reserved");
    assert_eq!(in_rust.verify(), Ok(FRAMES));
    assert_eq!(in_c.verify(), Ok(FRAMES));
    assert_eq!(memory.installs.load(Relaxed) > 0, with_host);
}

#[test]
fn guests_in_rust() {
    run(3, 0, 3, false);
}

#[test]
fn guests_in_c() {
    run(0, 3, 3, false);
}

#[test]
fn guests_in_both() {
    run(2, 2, 4, false);
}

#[test]
fn a_guest_in_c_and_a_host_in_rust() {
    run(0, 2, 2, true);
}

#[test]
fn guests_in_both_and_a_host() {
    run(1, 1, 2, true);
}

#[test]
fn guests_share_their_slots() {
    run(2, 2, 1, false);
}

#[test]
fn guests_share_their_slots_and_a_host_is_there() {
    run(1, 2, 1, true);
}

/// Of two that put the same block at once, exactly one gets the answer that it is not
/// allocated, whatever its order.
#[test]
fn a_block_is_put_once() {
    let region = Region::new(FRAMES, 2).unwrap();
    let (rust, c) = (region.zone(()), region.c_zone(()));
    let turn = std::sync::Barrier::new(2);
    for order in 0..=10u8 {
        let blocks: Vec<u64> = (0..FRAMES >> order).map(|block| block << order).collect();
        blocks.iter().for_each(|&frame| c.get_at(frame, order).unwrap());
        let put_all = |zone: &dyn Allocator| {
            turn.wait();
            blocks.iter().map(|&frame| zone.put(frame, order).is_ok()).collect::<Vec<_>>()
        };
        let put = thread::scope(|scope| {
            let other = scope.spawn(|| put_all(&rust));
            let mine = put_all(&c);
            mine.into_iter().zip(other.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(put.iter().all(|(mine, other)| mine != other), "order {order}");
        assert_eq!(c.verify(), Ok(FRAMES));
    }
}
