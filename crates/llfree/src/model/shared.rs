//! What the threads share: a zone, the memory of its whole area, and the host's record of it.

use std::vec::Vec;

use loom::sync::Mutex;
use loom::sync::atomic::Ordering::{AcqRel, Acquire};

use super::words::Words;
use crate::atomic::AtomicU64;
use crate::layout::AREA_FRAMES;
use crate::{Error, Fill, Host, Kind, Touch, Zone};

const AREAS: usize = 2;
const FRAMES: u64 = AREAS as u64 * AREA_FRAMES;
/// Index of the whole area, and its first frame.
const WHOLE: usize = 1;
pub(super) const WHOLE_FRAME: u64 = AREA_FRAMES;

/// Blocks of the first area that are allocated from the beginning: first frame and order.
const HELD: [(u64, u8); 3] = [(0, 0), (64, 3), (128, 7)];

/// The host's record of the whole area (R).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reclaimed {
    Installed,
    Soft,
    Hard,
}

/// Initial state of the whole area.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Start {
    Free,
    Taken,
    Soft,
    Hard,
    /// Free, and a slot has claims on its frames.
    Claimed,
    /// Free, and the slot has used up its claims on the first area.
    Spent,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Get(u8),
    GetAt(u64, u8),
    Put(u64, u8),
    Drain,
    HardReclaim,
    SoftReclaim,
    /// What a restarted host does with an area that has no memory.
    Recover,
    Return,
}

/// A block that was got or put.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Done {
    Got(u64, u8),
    Put(u64, u8),
    Nothing,
}

/// State of the whole area's memory. The host serves a touch of memory that is not mapped.
const MAPPED: u64 = 0;
const EMPTY: u64 = 1;

pub(super) struct Shared {
    words: Words,
    memory: AtomicU64,
    /// The host's record of the whole area, under its lock.
    reclaimed: Mutex<Reclaimed>,
}

impl Shared {
    pub(super) fn new() -> Shared {
        Shared {
            words: Words::new(FRAMES),
            memory: AtomicU64::new(MAPPED),
            reclaimed: Mutex::new(Reclaimed::Installed),
        }
    }

    pub(super) fn zone(&self) -> Zone<'_, &Shared> {
        self.words.zone(self)
    }

    fn host(&self) -> Host<'_> {
        self.words.host()
    }

    pub(super) fn start(&self, start: Start) {
        let zone = self.zone();
        zone.format(Fill::Free);
        HELD.iter().for_each(|&(frame, order)| zone.get_at(frame, order).unwrap());
        match start {
            Start::Free | Start::Spent => {
                // The slot has claims in the first area.
                let frame = zone.get(0, Kind::Movable, 0).unwrap();
                zone.put(frame, 0).unwrap();
                if start == Start::Spent {
                    zone.get_at(0, 9).unwrap_err();
                }
            }
            Start::Taken => zone.get_at(WHOLE_FRAME, 9).unwrap(),
            Start::Soft => self.soft_reclaim(),
            Start::Hard => self.hard_reclaim(),
            Start::Claimed => {
                zone.get_at(256, 8).unwrap();
                zone.get_at(0, 9).unwrap_err();
                let rest: Vec<u64> =
                    (0..256).filter(|&frame| zone.get_at(frame, 0).is_ok()).collect();
                let frame = zone.get(0, Kind::Movable, 0).unwrap();
                assert!(frame >= WHOLE_FRAME);
                rest.into_iter().chain([frame]).for_each(|frame| zone.put(frame, 0).unwrap());
                zone.put(256, 8).unwrap();
            }
        }
    }

    pub(super) fn run(&self, step: Step) -> Done {
        let done = self.do_step(step);
        if let Done::Got(WHOLE_FRAME.., _) = done {
            assert_ne!(self.memory.fetch_or(0, AcqRel), EMPTY, "got a frame without memory");
        }
        done
    }

    fn do_step(&self, step: Step) -> Done {
        let zone = self.zone();
        let got = |frame, order, done: Result<(), Error>| match done {
            Ok(()) => Done::Got(frame, order),
            Err(error) => {
                assert_eq!(error, Error::Taken);
                Done::Nothing
            }
        };
        match step {
            Step::Get(order) => match zone.get(order, Kind::Movable, 0) {
                Ok(frame) => Done::Got(frame, order),
                Err(error) => {
                    assert_eq!(error, Error::Memory);
                    Done::Nothing
                }
            },
            Step::GetAt(frame, order) => got(frame, order, zone.get_at(frame, order)),
            Step::Put(frame, order) => match zone.put(frame, order) {
                Ok(()) => Done::Put(frame, order),
                Err(error) => {
                    assert_eq!(error, Error::NotAllocated);
                    Done::Nothing
                }
            },
            Step::Drain => {
                zone.drain();
                Done::Nothing
            }
            Step::HardReclaim => {
                self.hard_reclaim();
                Done::Nothing
            }
            Step::SoftReclaim => {
                self.soft_reclaim();
                Done::Nothing
            }
            Step::Recover => {
                self.recover();
                Done::Nothing
            }
            Step::Return => {
                let mut reclaimed = self.reclaimed.lock().unwrap();
                if *reclaimed == Reclaimed::Hard {
                    self.host().return_area(WHOLE).unwrap();
                    *reclaimed = Reclaimed::Soft;
                }
                Done::Nothing
            }
        }
    }

    fn hard_reclaim(&self) {
        let mut reclaimed = self.reclaimed.lock().unwrap();
        if self.host().hard_reclaim(WHOLE).is_ok() {
            self.memory.swap(EMPTY, AcqRel);
            *reclaimed = Reclaimed::Hard;
        }
    }

    /// Takes, punches and returns (`docs/decisions/0018-*`).
    fn soft_reclaim(&self) {
        let mut reclaimed = self.reclaimed.lock().unwrap();
        if *reclaimed == Reclaimed::Installed && self.host().hard_reclaim(WHOLE).is_ok() {
            self.memory.swap(EMPTY, AcqRel);
            self.host().return_area(WHOLE).unwrap();
            *reclaimed = Reclaimed::Soft;
        }
    }

    /// Sets E if the area is free, else gives it memory.
    fn recover(&self) {
        let mut reclaimed = self.reclaimed.lock().unwrap();
        if *reclaimed == Reclaimed::Soft && self.host().soft_reclaim(WHOLE).is_err() {
            self.memory.swap(MAPPED, AcqRel);
            self.host().install(WHOLE);
            *reclaimed = Reclaimed::Installed;
        }
    }

    /// Checks, after all threads, who owns each frame.
    pub(super) fn check(&self, done: &[Done], start: Start) {
        let reclaimed = *self.reclaimed.lock().unwrap();
        let mut owned = std::vec![0i8; FRAMES as usize];
        let mut count = |frame: u64, order: u8, by: i8| {
            owned[frame as usize..][..1 << order].iter_mut().for_each(|owned| *owned += by);
        };
        HELD.iter().for_each(|&(frame, order)| count(frame, order, 1));
        if start == Start::Taken {
            count(WHOLE_FRAME, 9, 1);
        }
        for done in done {
            match *done {
                Done::Got(frame, order) => count(frame, order, 1),
                Done::Put(frame, order) => count(frame, order, -1),
                Done::Nothing => {}
            }
        }
        assert!(owned.iter().all(|owned| (0..=1).contains(owned)), "owned twice, or put twice");
        let used = owned[WHOLE_FRAME as usize..].contains(&1);
        assert!(!used || reclaimed == Reclaimed::Installed, "memory of frames in use was taken");
        assert_eq!(reclaimed == Reclaimed::Installed, self.memory.load(Acquire) == MAPPED);
        let zone = self.zone();
        zone.verify().unwrap();
        self.words.check_reserved();
        zone.drain();
        self.words.check_reserved();
        let hosts = if reclaimed == Reclaimed::Hard { AREA_FRAMES } else { 0 };
        let held = owned.iter().filter(|&&owned| owned == 1).count() as u64;
        assert_eq!(zone.verify(), Ok(FRAMES - held - hosts));
        // Their number is right, so these are all the frames that are not free.
        for &done in done {
            if let Done::Got(frame, order) = done
                && owned[frame as usize] == 1
            {
                let last = frame + (1 << order) - 1;
                assert_eq!([frame, last].map(|frame| zone.is_free(frame, 0)), [Ok(false); 2]);
            }
        }
    }
}

/// The fault of a frame without memory: the host serves it once its current operation is done.
impl Touch for &Shared {
    fn touch(&self, frame: u64) {
        if frame < WHOLE_FRAME || self.memory.fetch_or(0, AcqRel) == MAPPED {
            return;
        }
        let mut reclaimed = self.reclaimed.lock().unwrap();
        assert_ne!(*reclaimed, Reclaimed::Hard, "got what the host has taken");
        if *reclaimed == Reclaimed::Soft {
            // Memory comes before the flag, because a guest that sees no flag does not touch.
            self.memory.swap(MAPPED, AcqRel);
            self.host().install(WHOLE);
            *reclaimed = Reclaimed::Installed;
        }
    }
}
