//! Frames that a request of the VMM may still be writing to. The guest is this very process.

#[allow(dead_code)]
#[path = "consistency/machine.rs"]
mod machine;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_ledger::Content;
use ebb_pager::{Judge, NothingKnown, Pager};
use ebb_store::Page;
use ebb_units::{FrameRange, Gfn};
use vmtest::require;

use machine::{Machine, Threads, available, page_of, serve, watching};

struct Daemon {
    machine: Machine,
    pager: Arc<Pager>,
    _threads: Threads,
}

fn daemon() -> Daemon {
    let machine = Machine::new();
    let pager = watching(machine.parts());
    let _threads = serve(&pager, 1);
    Daemon { machine, pager, _threads }
}

impl Daemon {
    /// Writes a clean frame, and waits until the pager has it on record: the fault thread lets
    /// the guest go on a moment before that.
    fn write_clean(&self, gfn: Gfn, page: &Page) {
        self.machine.guest().write(gfn, page);
        let end = Instant::now() + Duration::from_secs(20);
        while self.pager.ledger().content(gfn) != Content::Resident {
            assert!(Instant::now() < end, "a write to {gfn:?} went unnoticed");
            std::thread::yield_now();
        }
    }
}

/// A device that asks for frames while an eviction holds them.
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
            let refused = self.pager.pin_soon(FrameRange::new(gfn, 1), gfn.0 == 3);
            self.kinds.borrow_mut().push(refused.unwrap_err().kind());
        }
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![false; frames.len()]
    }
}

#[test]
fn a_device_that_asks_for_held_frames_is_told_to_ask_again() {
    require!(available());
    let daemon = daemon();
    let (pager, guest) = (&*daemon.pager, daemon.machine.guest());
    let frames = [2, 3].map(Gfn);
    frames.iter().for_each(|&gfn| guest.write(gfn, &page_of(gfn.0)));
    let judge = Asks { pager, kinds: RefCell::default() };
    // What was refused is not pinned: both go.
    assert_eq!(pager.evict(&frames, &judge).unwrap().frames(), 2);
    assert_eq!(judge.kinds.into_inner(), [std::io::ErrorKind::TimedOut; 2]);
    frames.iter().for_each(|&gfn| pager.pin_soon(FrameRange::new(gfn, 1), false).unwrap());
    assert_eq!(pager.evict(&frames, &NothingKnown).unwrap().frames(), 0);
    assert_eq!(
        frames.map(|gfn| daemon.machine.ram.is_hole(FrameRange::new(gfn, 1)).unwrap()),
        [false; 2]
    );
    frames.iter().for_each(|&gfn| pager.unpin(FrameRange::new(gfn, 1)));
    assert_eq!(frames.map(|gfn| guest.read(gfn)), frames.map(|gfn| page_of(gfn.0)));
}

/// A device that writes past the protection: its requests for odd frames end just when they
/// are asked for, those for even ones have not ended yet.
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
    let evicted = pager.evict(&frames, &device).unwrap();
    assert_eq!((evicted.saved, evicted.in_flight), (4, 4), "{evicted:?}");
    assert_eq!(*device.asked.borrow(), frames);
    for &gfn in &frames {
        let (one, odd) = (FrameRange::new(gfn, 1), gfn.0 % 2 == 1);
        assert_eq!(pager.ram().is_hole(one).unwrap(), odd);
        assert_eq!(pager.ledger().content(gfn) == Content::Resident, !odd);
    }
    // What is read brings others along.
    for gfn in frames {
        let mut expected = page_of(gfn.0 + 20);
        if gfn.0 % 2 == 1 {
            expected[..8].copy_from_slice(&gfn.0.to_ne_bytes());
        }
        assert_eq!(guest.read(gfn), expected, "{gfn:?}");
        guest.write(gfn, &page_of(3));
    }
}

/// What came back protected has met every write since.
#[test]
fn a_clean_frame_is_not_in_flight() {
    require!(available());
    let daemon = daemon();
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    guest.write(Gfn(3), &page_of(30));
    let device = Device { pager, asked: RefCell::default() };
    assert_eq!(pager.evict(&[Gfn(3)], &device).unwrap().saved, 1);
    let mut expected = page_of(30);
    expected[..8].copy_from_slice(&3u64.to_ne_bytes());
    assert_eq!(guest.read(Gfn(3)), expected);
    assert!(matches!(pager.ledger().content(Gfn(3)), Content::Clean { .. }));
    struct AllInFlight;
    impl Judge for AllInFlight {
        fn is_dead(&self, _gfn: Gfn) -> bool {
            false
        }
        fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
            vec![false; frames.len()]
        }
        fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
            vec![false; frames.len()]
        }
    }
    assert_eq!(pager.evict(&[Gfn(3)], &AllInFlight).unwrap().clean, 1);
    assert_eq!(guest.read(Gfn(3)), expected);
    daemon.write_clean(Gfn(3), &page_of(31));
    assert_eq!(pager.evict(&[Gfn(3)], &AllInFlight).unwrap().in_flight, 1);
    assert_eq!(guest.read(Gfn(3)), page_of(31));
}

/// A limit empties the VMM's page table, to see which frames are used. The first write to a clean
/// frame is noticed for all that.
#[test]
fn a_protection_outlives_its_page_table() {
    require!(available());
    let daemon = daemon();
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    guest.write(Gfn(3), &page_of(30));
    assert_eq!(pager.evict(&[Gfn(3)], &NothingKnown).unwrap().saved, 1);
    for touch in [Touch::None, Touch::Read] {
        assert_eq!(guest.read(Gfn(3)), page_of(30));
        assert!(matches!(pager.ledger().content(Gfn(3)), Content::Clean { .. }));
        guest.forget();
        if touch == Touch::Read {
            assert_eq!(guest.read(Gfn(3)), page_of(30));
        }
        assert_eq!(pager.evict(&[Gfn(3)], &NothingKnown).unwrap().clean, 1, "{touch:?}");
        assert_eq!(guest.read(Gfn(3)), page_of(30));
        guest.forget();
        daemon.write_clean(Gfn(3), &page_of(31));
        assert_eq!(pager.evict(&[Gfn(3)], &NothingKnown).unwrap().saved, 1);
        assert_eq!(guest.read(Gfn(3)), page_of(31), "{touch:?}");
        daemon.write_clean(Gfn(3), &page_of(30));
        assert_eq!(pager.evict(&[Gfn(3)], &NothingKnown).unwrap().saved, 1);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Touch {
    None,
    Read,
}
