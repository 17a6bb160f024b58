//! Random calls, one after the other, against a plain list of what each frame
//! is: every answer is foretold. Both languages; the host's side in between.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Mutex;

use ebb_llfree::{Error, Host, HostError, Kind};
use llfree_tests::{Allocator, Region};
use proptest::prelude::*;

/// Two trees and a part of a third, the last area not whole.
const FRAMES: u64 = 2 * 4096 + 2 * 512 + 131;
const AREAS: usize = FRAMES.div_ceil(512) as usize;
/// All threads share the slots, or each core has its own.
const CORES: RangeInclusive<u32> = 1..=2;

#[derive(Clone, Debug)]
enum Step {
    Get {
        order: u8,
        movable: bool,
        core: u32,
    },
    /// As many as there are, or so many.
    GetMany {
        order: u8,
        count: u64,
    },
    GetAt {
        frame: u64,
        order: u8,
    },
    /// One that was got, by its number.
    Put {
        index: usize,
    },
    /// A part of it.
    PutPart {
        index: usize,
        order: u8,
        part: u64,
    },
    /// Whatever is there.
    PutAny {
        frame: u64,
        order: u8,
    },
    Drain,
    Hard {
        area: usize,
    },
    Return {
        area: usize,
    },
    Soft {
        area: usize,
    },
    Install {
        area: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let frame = 0..FRAMES + 64;
    let area = 0..AREAS + 1;
    // More often those orders that make for mixed areas.
    let order = prop_oneof![2 => Just(0u8), 1 => Just(9u8), 3 => 0..=11u8];
    prop_oneof![
        6 => (order.clone(), any::<bool>(), 0..4_u32)
            .prop_map(|(order, movable, core)| Step::Get { order, movable, core }),
        1 => (0..=10u8, prop_oneof![Just(u64::MAX), 1..300u64])
            .prop_map(|(order, count)| Step::GetMany { order, count }),
        3 => (frame.clone(), order.clone(), any::<bool>()).prop_map(|(frame, order, aligned)| {
            let size = 1 << order.min(10);
            Step::GetAt { frame: if aligned { frame / size * size } else { frame }, order }
        }),
        5 => any::<usize>().prop_map(|index| Step::Put { index }),
        3 => (any::<usize>(), 0..=9u8, any::<u64>())
            .prop_map(|(index, order, part)| Step::PutPart { index, order, part }),
        2 => (frame, order).prop_map(|(frame, order)| {
            let size = 1 << order.min(10);
            Step::PutAny { frame: frame / size * size, order }
        }),
        1 => Just(Step::Drain),
        2 => area.clone().prop_map(|area| Step::Hard { area }),
        2 => area.clone().prop_map(|area| Step::Return { area }),
        2 => area.clone().prop_map(|area| Step::Soft { area }),
        1 => area.prop_map(|area| Step::Install { area }),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Frame {
    Free,
    Used,
    Hosts,
}

struct Model<'a, A> {
    zone: &'a A,
    host: Host<'a>,
    frames: Vec<Frame>,
    /// Blocks as they were got, as far as nothing of them was put.
    blocks: RefCell<Vec<(u64, u8)>>,
    evicted: BTreeSet<usize>,
    touched: &'a Mutex<Vec<u64>>,
}

impl<A: Allocator> Model<'_, A> {
    fn all(&self, frame: u64, order: u8, what: Frame) -> bool {
        let range = frame as usize..(frame + (1 << order)) as usize;
        self.frames.get(range).is_some_and(|frames| frames.iter().all(|&frame| frame == what))
    }

    fn set(&mut self, frame: u64, order: u8, what: Frame) {
        self.frames[frame as usize..][..1 << order].fill(what);
    }

    fn has(&self, order: u8) -> bool {
        (0..FRAMES).step_by(1 << order).any(|frame| self.all(frame, order, Frame::Free))
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Get { order, movable, core } => {
                let kind = if movable { Kind::Movable } else { Kind::Unmovable };
                self.get(order, kind, core);
            }
            Step::GetMany { order, count } => {
                (0..count).take_while(|_| self.get(order, Kind::Movable, 0)).count();
            }
            Step::GetAt { frame, order } => self.get_at(frame, order),
            Step::Put { index } => {
                if let Some((frame, order)) = self.block(index) {
                    self.put(frame, order);
                }
            }
            Step::PutPart { index, order, part } => {
                if let Some((frame, whole)) = self.block(index) {
                    let order = order.min(whole);
                    let part = part % (1 << (whole - order));
                    self.put(frame + (part << order), order);
                }
            }
            Step::PutAny { frame, order } => self.put(frame, order),
            Step::Drain => self.zone.drain(),
            Step::Hard { area } => self.hard(area),
            Step::Return { area } => self.give_area(area),
            Step::Soft { area } => self.soft(area),
            // The host does not install what the guest may not have.
            Step::Install { area } if !self.all(area as u64 * 512, 9, Frame::Hosts) => {
                self.host.install(area);
                self.evicted.remove(&area);
            }
            Step::Install { .. } => {}
        }
        assert_eq!(self.zone.is_free(0, 0), self.frames[0] == Frame::Free);
    }

    fn block(&self, index: usize) -> Option<(u64, u8)> {
        let blocks = self.blocks.borrow();
        (!blocks.is_empty()).then(|| blocks[index % blocks.len()])
    }

    /// Whether there was one.
    fn get(&mut self, order: u8, kind: Kind, core: u32) -> bool {
        match self.zone.get(order, kind, core) {
            Ok(frame) => {
                assert!(frame.is_multiple_of(1 << order));
                assert!(self.all(frame, order, Frame::Free), "{frame} was not free");
                self.took(frame, order);
                true
            }
            Err(Error::Order) => {
                assert!(order > 10);
                false
            }
            Err(error) => {
                assert_eq!(error, Error::Memory);
                assert!(!self.has(order), "there is a block of order {order}");
                false
            }
        }
    }

    fn get_at(&mut self, frame: u64, order: u8) {
        match self.zone.get_at(frame, order) {
            Ok(()) => {
                assert!(self.all(frame, order, Frame::Free));
                self.took(frame, order);
            }
            Err(error) => assert_eq!(error, self.refusal(frame, order, Frame::Free, Error::Taken)),
        }
    }

    fn refusal(&self, frame: u64, order: u8, wanted: Frame, otherwise: Error) -> Error {
        if order > 10 {
            return Error::Order;
        }
        let size = 1u64 << order;
        if !frame.is_multiple_of(size) || frame + size > FRAMES {
            return Error::Frame;
        }
        assert!(!self.all(frame, order, wanted), "{frame}, order {order} was refused");
        otherwise
    }

    /// What is behind a block was there before it was handed out.
    fn took(&mut self, frame: u64, order: u8) {
        self.set(frame, order, Frame::Used);
        self.blocks.borrow_mut().push((frame, order));
        let touched: BTreeSet<usize> =
            self.touched.lock().unwrap().drain(..).map(|frame| (frame / 512) as usize).collect();
        let areas = (frame / 512) as usize..=((frame + (1 << order) - 1) / 512) as usize;
        for area in areas {
            if self.evicted.remove(&area) {
                assert!(touched.contains(&area), "area {area} has no memory");
            }
            // Those that slots claimed before were evicted at that time.
            self.host.install(area);
        }
    }

    fn put(&mut self, frame: u64, order: u8) {
        match self.zone.put(frame, order) {
            Ok(()) => {
                assert!(self.all(frame, order, Frame::Used));
                self.set(frame, order, Frame::Free);
                let end = frame + (1 << order);
                self.blocks
                    .borrow_mut()
                    .retain(|&(first, of)| first >= end || first + (1 << of) <= frame);
            }
            Err(error) => {
                assert_eq!(error, self.refusal(frame, order, Frame::Used, Error::NotAllocated));
            }
        }
    }

    /// A slot's claims may be in the way; nothing else may.
    fn take_area(&self, area: usize, take: impl Fn() -> Result<(), HostError>) -> bool {
        let free = self.all(area as u64 * 512, 9, Frame::Free);
        match take() {
            Ok(()) => assert!(free),
            Err(HostError::Outside) => assert!(area >= AREAS),
            Err(error) => {
                assert_eq!(error, HostError::InUse);
                if free {
                    self.zone.drain();
                    assert_eq!(take(), Ok(()));
                }
            }
        }
        free
    }

    fn hard(&mut self, area: usize) {
        if self.take_area(area, || self.host.hard_reclaim(area)) {
            self.set(area as u64 * 512, 9, Frame::Hosts);
            self.evicted.insert(area);
        }
    }

    fn give_area(&mut self, area: usize) {
        let hosts = self.all(area as u64 * 512, 9, Frame::Hosts) && self.evicted.contains(&area);
        let returned = self.host.return_area(area);
        match returned {
            Ok(()) => {
                assert!(hosts);
                self.set(area as u64 * 512, 9, Frame::Free);
            }
            Err(HostError::Outside) => assert!(area >= AREAS),
            Err(error) => {
                assert_eq!(error, HostError::NotTaken);
                assert!(!hosts);
            }
        }
    }

    fn soft(&mut self, area: usize) {
        if self.take_area(area, || self.host.soft_reclaim(area)) {
            self.evicted.insert(area);
        }
    }

    fn end(&self) {
        let free = self.frames.iter().filter(|&&frame| frame == Frame::Free).count() as u64;
        assert_eq!(self.zone.verify(), Ok(free));
        self.zone.drain();
        assert_eq!(self.zone.verify(), Ok(free));
        let areas = (0..FRAMES / 512).filter(|area| self.all(area * 512, 9, Frame::Free));
        let areas: Vec<u64> = areas.collect();
        assert_eq!(self.zone.free_areas(), areas.len());
        let mask = self.host.free_areas(0);
        assert_eq!(mask, areas.iter().fold(0, |mask, area| mask | 1 << area));
        assert_eq!(self.host.free_areas(1), 0);
    }
}

fn check<A: Allocator>(region: &Region, zone: &A, touched: &Mutex<Vec<u64>>, steps: &[Step]) {
    let mut model = Model {
        zone,
        host: region.host(),
        frames: vec![Frame::Free; FRAMES as usize],
        blocks: RefCell::default(),
        evicted: BTreeSet::new(),
        touched,
    };
    steps.iter().for_each(|step| model.run(step));
    model.end();
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..300)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn rust_does_as_the_model(steps in steps(), cores in CORES) {
        let region = Region::new(FRAMES, cores).unwrap();
        let touched = Mutex::new(Vec::new());
        let zone = region.zone(|frame| touched.lock().unwrap().push(frame));
        check(&region, &zone, &touched, &steps);
    }

    #[test]
    fn c_does_as_the_model(steps in steps(), cores in CORES) {
        let region = Region::new(FRAMES, cores).unwrap();
        let touched = Mutex::new(Vec::new());
        let zone = region.c_zone(|frame| touched.lock().unwrap().push(frame));
        check(&region, &zone, &touched, &steps);
    }

    /// Not only each does as it should: both do the same.
    #[test]
    fn both_choose_the_same_frames(steps in steps(), cores in CORES) {
        let regions = [(); 2].map(|()| Region::new(FRAMES, cores).unwrap());
        let (rust, c) = (regions[0].zone(()), regions[1].c_zone(()));
        for step in &steps {
            match *step {
                Step::Get { order, core, .. } => {
                    let get = |zone: &dyn Allocator| zone.get(order, Kind::Movable, core);
                    prop_assert_eq!(get(&rust), get(&c));
                }
                Step::GetMany { order, count } => for _ in 0..count.min(300) {
                    let get = |zone: &dyn Allocator| zone.get(order, Kind::Unmovable, 1);
                    prop_assert_eq!(get(&rust), get(&c));
                },
                Step::GetAt { frame, order } => {
                    prop_assert_eq!(rust.get_at(frame, order), c.get_at(frame, order));
                }
                Step::PutAny { frame, order } => {
                    prop_assert_eq!(rust.put(frame, order), c.put(frame, order));
                }
                Step::Drain => regions.iter().zip([&rust as &dyn Allocator, &c]).for_each(|(_, zone)| zone.drain()),
                Step::Hard { area } => {
                    let taken = regions.each_ref().map(|region| region.host().hard_reclaim(area));
                    prop_assert_eq!(taken[0], taken[1]);
                }
                _ => {}
            }
        }
        let words = |region: &Region| -> Vec<u64> {
            let words = (region.layout().total_bytes / 8) as usize;
            let first = region.words(0, words);
            first.iter().map(|word| word.load(std::sync::atomic::Ordering::Acquire)).collect()
        };
        prop_assert!(words(&regions[0]) == words(&regions[1]), "the same words");
    }
}
