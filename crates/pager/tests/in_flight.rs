//! Frames that a request of the VMM may still be writing to. This process is the guest.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, Threads, available, page_of, serve, watching};
use ebb_pager::{Judge, NothingKnown, Pager};
use ebb_store::Page;
use ebb_units::{FrameRange, Gfn};
use testkit::{require, until};

struct Daemon {
    machine: Machine,
    pager: Arc<Pager>,
    _threads: Threads,
}

fn daemon() -> Daemon {
    let machine = Machine::small();
    let pager = watching(machine.parts());
    let _threads = serve(&pager, 1);
    Daemon { machine, pager, _threads }
}

/// A device that asks for frames while an eviction has locked them.
struct Asks<'a> {
    pager: &'a Pager,
    kinds: RefCell<Vec<std::io::ErrorKind>>,
}

impl Judge for Asks<'_> {
    fn is_dead(&self, _gfn: Gfn) -> bool {
        false
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        for &gfn in frames {
            let refused = self.pager.devices().pin_soon(FrameRange::new(gfn, 1), gfn.0 == 3);
            self.kinds.borrow_mut().push(refused.unwrap_err().kind());
        }
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![false; frames.len()]
    }
}

#[test]
fn a_device_that_asks_for_locked_frames_has_to_ask_again() {
    require!(available());
    let daemon = daemon();
    let (pager, guest) = (&*daemon.pager, daemon.machine.guest());
    let frames = [2, 3].map(Gfn);
    frames.iter().for_each(|&gfn| guest.write(gfn, &page_of(gfn.0)));
    let judge = Asks { pager, kinds: RefCell::default() };
    // What was refused is not pinned, so both are evicted.
    assert_eq!(pager.evictor().evict(&frames, &judge).unwrap().frames(), 2);
    assert_eq!(judge.kinds.into_inner(), [std::io::ErrorKind::TimedOut; 2]);
    frames
        .iter()
        .for_each(|&gfn| pager.devices().pin_soon(FrameRange::new(gfn, 1), false).unwrap());
    assert_eq!(pager.evictor().evict(&frames, &NothingKnown).unwrap().frames(), 0);
    assert_eq!(
        frames.map(|gfn| daemon.machine.ram.is_hole(FrameRange::new(gfn, 1)).unwrap()),
        [false; 2]
    );
    frames.iter().for_each(|&gfn| pager.devices().unpin(FrameRange::new(gfn, 1)));
    assert_eq!(frames.map(|gfn| guest.read(gfn)), frames.map(|gfn| page_of(gfn.0)));
}

/// Some frames of a run are in memory, one is evicted, and the VMM has punched two, as a balloon
/// does.
#[test]
fn all_of_a_run_is_in_memory_once_it_is_pinned() {
    require!(available());
    let daemon = daemon();
    let (pager, guest) = (&*daemon.pager, daemon.machine.guest());
    let (run, evicted, punched) = (FrameRange::new(Gfn(5), 6), Gfn(8), FrameRange::new(Gfn(9), 2));
    run.frames().for_each(|gfn| guest.write(gfn, &page_of(gfn.0)));
    let evict = |gfn| pager.evictor().evict(&[gfn], &NothingKnown).unwrap().frames();
    assert_eq!(evict(evicted), 1);
    guest.punch(punched).unwrap();
    let holes = || {
        let is_hole = |gfn: &Gfn| pager.ram().is_hole(FrameRange::new(*gfn, 1)).unwrap();
        run.frames().filter(is_hole).count()
    };
    assert_eq!(holes(), 3);
    pager.devices().pin_soon(run, false).unwrap();
    assert_eq!((holes(), run.frames().map(evict).sum::<u64>()), (0, 0));
    pager.devices().unpin(run);
    let there = |gfn: Gfn| if punched.contains(gfn) { page_of(0) } else { page_of(gfn.0) };
    assert!(run.frames().all(|gfn| guest.read(gfn) == there(gfn)));
    assert_eq!(evict(evicted), 1);
}

/// A device that writes past the protection: its requests for odd frames end just when the pager
/// asks for them, those for even frames have not ended yet.
struct Device<'a> {
    pager: &'a Pager,
    asked: RefCell<Vec<Gfn>>,
}

impl Judge for Device<'_> {
    fn is_dead(&self, _gfn: Gfn) -> bool {
        false
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        self.asked.borrow_mut().extend(frames);
        let ends = frames.iter().map(|gfn| gfn.0 % 2 == 1);
        frames.iter().zip(ends).for_each(|(gfn, ends)| {
            let word = &self.pager.ram().words(gfn.gpa(), 1).expect("in memory")[0];
            if ends {
                word.store(gfn.0, Relaxed);
            }
        });
        frames.iter().map(|gfn| gfn.0 % 2 == 1).collect()
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![false; frames.len()]
    }
}

#[test]
fn what_is_in_flight_stays_and_what_has_just_ended_is_saved() {
    require!(available());
    let daemon = daemon();
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    let frames: Vec<Gfn> = (0..8).map(Gfn).collect();
    frames.iter().for_each(|&gfn| guest.write(gfn, &page_of(gfn.0 + 20)));
    let device = Device { pager, asked: RefCell::default() };
    let evicted = pager.evictor().evict(&frames, &device).unwrap();
    assert_eq!((evicted.saved, evicted.in_flight), (4, 4), "{evicted:?}");
    assert_eq!(*device.asked.borrow(), frames);
    for &gfn in &frames {
        let (one, odd) = (FrameRange::new(gfn, 1), gfn.0 % 2 == 1);
        assert_eq!(pager.ram().is_hole(one).unwrap(), odd);
        assert_eq!(pager.ledger().content(gfn) == Content::Resident, !odd);
    }
    // A refilled frame brings others along.
    for gfn in frames {
        let mut expected = page_of(gfn.0 + 20);
        if gfn.0 % 2 == 1 {
            expected[..8].copy_from_slice(&gfn.0.to_ne_bytes());
        }
        assert_eq!(guest.read(gfn), expected, "{gfn:?}");
        guest.write(gfn, &page_of(3));
    }
}

/// A frame that keeps a slot is plain memory, which a request may have pinned since the frame came
/// back.
#[test]
fn a_frame_that_keeps_its_slot_may_be_in_flight() {
    require!(available());
    let daemon = daemon();
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    let frames = [2, 3].map(Gfn);
    frames.iter().for_each(|&gfn| guest.write(gfn, &page_of(gfn.0 + 20)));
    assert_eq!(pager.evictor().evict(&frames, &NothingKnown).unwrap().saved, 2);
    frames.iter().for_each(|&gfn| assert_eq!(guest.read(gfn), page_of(gfn.0 + 20)));
    until("both to be back", || (pager.counters().clean_frames.load(Relaxed) == 2).then_some(()));
    // One frame stays; the other was written past the protection, before it was read to be saved.
    let device = Device { pager, asked: RefCell::default() };
    let evicted = pager.evictor().evict(&frames, &device).unwrap();
    assert_eq!((evicted.in_flight, evicted.saved, evicted.clean), (1, 1, 0));
    let mut expected = page_of(23);
    expected[..8].copy_from_slice(&3u64.to_ne_bytes());
    assert_eq!(guest.read(Gfn(3)), expected);
    assert_eq!(pager.evictor().evict(&[Gfn(2)], &NothingKnown).unwrap().clean, 1);
    assert_eq!(guest.read(Gfn(2)), page_of(22));
}

/// A guest that writes a frame that is protected, and whose entry in the page table was removed.
struct Forgets<'a> {
    daemon: &'a Daemon,
    page: Page,
    writer: RefCell<Option<JoinHandle<()>>>,
}

impl Judge for Forgets<'_> {
    fn is_dead(&self, _gfn: Gfn) -> bool {
        false
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        let (guest, gfn, page) = (self.daemon.machine.guest(), frames[0], self.page);
        let noticed = &self.daemon.pager.counters().metadata;
        let before = noticed.load(Relaxed);
        guest.forget();
        *self.writer.borrow_mut() = Some(thread::spawn(move || guest.write(gfn, &page)));
        until("the write to be noticed", || (noticed.load(Relaxed) > before).then_some(()));
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![false; frames.len()]
    }
}

/// A limit empties the VMM's page table, to see which frames are used.
#[test]
fn a_protection_outlives_its_page_table() {
    require!(available());
    let daemon = daemon();
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    guest.write(Gfn(3), &page_of(30));
    for seed in [31, 32] {
        let (page, writer) = (page_of(seed), RefCell::default());
        let judge = Forgets { daemon: &daemon, page, writer };
        pager.evictor().evict(&[Gfn(3)], &judge).unwrap();
        judge.writer.take().unwrap().join().unwrap();
        assert_eq!(guest.read(Gfn(3)), page);
        assert_eq!(pager.evictor().evict(&[Gfn(3)], &NothingKnown).unwrap().saved, 1);
        assert_eq!(guest.read(Gfn(3)), page);
    }
}
