//! A guest that allocates by LLFree, in C and in Rust. Threads of the VMM run it: their touches of
//! missing memory are served like a vCPU's. It fills every block that it gets, and checks that the
//! block is unchanged before it puts it back.

use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::thread::{self, JoinHandle};

use ebb_llfree::{Error, Kind, Touch};
use ebb_pager::SoftIommu;
use ebb_sys::mapping::Mapping;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use llfree_tests::{Allocator, Region};

use crate::machine::Machine;

const RAM_BYTES: u64 = 64 << 20;
/// Bytes for each zone's state, behind what the machine itself needs.
const STATE_BYTES: u64 = 64 << 10;
const STATES: Gpa = Gpa(2 << 20);
/// First frame and number of frames of each zone, and number of cores that have slots. In the first
/// zone, all threads share the slots. Neither zone ends with a whole huge frame.
const ZONES: [(u64, u64, u32); 2] = [(1024, 7 * 1024, 1), (8192, 15 * 512 + 100, 4)];
const FRAME_WORDS: usize = (FRAME_BYTES / 8) as usize;
/// Most blocks that a thread has at a time.
const BLOCKS_MAX: usize = 24;

/// Language of the allocator that a guest's thread uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Language {
    /// As in a kernel.
    C,
    /// As in the host.
    Rust,
}

/// A machine whose guest has two zones.
pub struct Sharing {
    /// The machine.
    pub machine: Machine,
    zones: Arc<Vec<(u64, Region)>>,
    owners: Arc<[AtomicU32]>,
    leave: Arc<AtomicBool>,
    running: Vec<JoinHandle<Turns>>,
}

/// What a thread of the guest did.
#[derive(Clone, Copy, Default, Debug)]
pub struct Turns {
    /// Blocks that were got, filled, found unchanged and put back.
    pub blocks: u64,
    /// Gets that found nothing free.
    pub refused: u64,
}

impl Sharing {
    /// Makes a machine with everything free and nothing touched.
    pub fn new() -> Sharing {
        let machine = Machine::new(RAM_BYTES);
        let region = |(index, &(base, frames, cores)): (usize, &(u64, u64, u32))| {
            let at = STATES.0 + index as u64 * STATE_BYTES;
            let region = Region::within(machine.file(), at, base, frames, cores).expect("a zone");
            assert!(region.layout().total_bytes <= STATE_BYTES);
            (base, region)
        };
        let zones = Arc::new(ZONES.iter().enumerate().map(region).collect());
        let owners = (0..machine.ram().end().0).map(|_| AtomicU32::new(0)).collect();
        Sharing { machine, zones, owners, leave: Arc::default(), running: Vec::new() }
    }

    /// Returns the addresses of the zones' headers.
    pub fn headers(&self) -> Vec<Gpa> {
        (0..ZONES.len() as u64).map(|index| Gpa(STATES.0 + index * STATE_BYTES)).collect()
    }

    /// Returns each zone's first frame and its state.
    pub fn zones(&self) -> &[(u64, Region)] {
        &self.zones
    }

    /// Returns how many whole huge frames the zones have.
    pub fn huge_frames(&self) -> u64 {
        ZONES.iter().map(|(_, frames, _)| frames / 512).sum()
    }

    /// Starts a thread of the guest. With `iommu`, a device uses each frame that it gets.
    pub fn start(&mut self, language: Language, iommu: Option<Arc<SoftIommu>>) {
        let owner = self.running.len() as u32 + 1;
        let worker = Worker {
            memory: Arc::clone(self.machine.guest()),
            zones: Arc::clone(&self.zones),
            owners: Arc::clone(&self.owners),
            leave: Arc::clone(&self.leave),
            iommu,
            owner,
        };
        let thread = thread::Builder::new().name(format!("guest{owner}"));
        let running = thread.spawn(move || worker.run(language));
        self.running.push(running.expect("a thread"));
    }

    /// Makes all threads put back what they have, and end. Returns what they did together.
    ///
    /// # Panics
    /// A thread found something wrong.
    pub fn finish(&mut self) -> Turns {
        self.leave.store(true, Relaxed);
        let mut all = Turns::default();
        for running in self.running.drain(..) {
            let turns = running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            all.blocks += turns.blocks;
            all.refused += turns.refused;
        }
        self.leave.store(false, Relaxed);
        all
    }

    /// Drains the slots, compares all words of the zones, and returns how many frames are free. No
    /// thread may run.
    ///
    /// # Panics
    /// Words disagree.
    pub fn verify(&self) -> u64 {
        let each = self.zones.iter().map(|(_, region)| {
            let zone = region.zone(());
            zone.drain();
            zone.verify().expect("all words agree")
        });
        each.sum()
    }
}

impl Default for Sharing {
    fn default() -> Sharing {
        Sharing::new()
    }
}

/// A small random number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

struct Block {
    zone: usize,
    frames: FrameRange,
    order: u8,
    turn: u64,
}

struct Worker {
    memory: Arc<Mapping>,
    zones: Arc<Vec<(u64, Region)>>,
    owners: Arc<[AtomicU32]>,
    leave: Arc<AtomicBool>,
    iommu: Option<Arc<SoftIommu>>,
    owner: u32,
}

/// A write to the frame that changes nothing.
struct TouchIn<'a> {
    memory: &'a Mapping,
    base: u64,
}

impl Touch for TouchIn<'_> {
    fn touch(&self, frame: u64) {
        let word = &words(self.memory, Gfn(self.base + frame))[0];
        let seen = word.load(Relaxed);
        // Compilers make a load of `fetch_or(0)`, so this is a compare-exchange. Whoever changes
        // the word meanwhile has written it.
        let _ = word.compare_exchange(seen, seen, AcqRel, Relaxed);
    }
}

fn words(memory: &Mapping, gfn: Gfn) -> &[AtomicU64] {
    memory.words(gfn.gpa().0, FRAME_WORDS).expect("in RAM")
}

impl Worker {
    fn run(&self, language: Language) -> Turns {
        let zones: Vec<Box<dyn Allocator + '_>> = self
            .zones
            .iter()
            .map(|(base, region)| -> Box<dyn Allocator + '_> {
                let touch = TouchIn { memory: &self.memory, base: *base };
                match language {
                    Language::C => Box::new(region.c_zone(touch)),
                    Language::Rust => Box::new(region.zone(touch)),
                }
            })
            .collect();
        let mut random = Random(u64::from(self.owner) << 32 | 0x9e37_79b9);
        let (mut turns, mut blocks) = (Turns::default(), Vec::new());
        while !self.leave.load(Relaxed) {
            let full = blocks.len() >= BLOCKS_MAX;
            if !full && random.below(3) > 0 {
                match self.get(&zones, &mut random, turns.blocks) {
                    Ok(block) => blocks.push(block),
                    Err(Error::Memory) => turns.refused += 1,
                    Err(error) => panic!("{error}"),
                }
            } else if !blocks.is_empty() {
                let block = blocks.swap_remove(random.below(blocks.len() as u64) as usize);
                self.put(&zones, block);
                turns.blocks += 1;
            }
        }
        turns.blocks += blocks.len() as u64;
        blocks.into_iter().for_each(|block| self.put(&zones, block));
        turns
    }

    fn get(
        &self,
        zones: &[Box<dyn Allocator + '_>],
        random: &mut Random,
        turn: u64,
    ) -> Result<Block, Error> {
        // Most blocks are small, but some are a huge frame or a pair.
        let order = [0, 0, 0, 0, 1, 2, 3, 4, 6, 8, 9, 10][random.below(12) as usize];
        let kind = if random.below(4) == 0 { Kind::Unmovable } else { Kind::Movable };
        let zone = random.below(zones.len() as u64) as usize;
        let frame = zones[zone].get(order, kind, self.owner)?;
        let frames = FrameRange::new(Gfn(self.zones[zone].0 + frame), 1 << order);
        let block = Block { zone, frames, order, turn };
        self.fill(&block);
        Ok(block)
    }

    fn value(&self, block: &Block, gfn: Gfn, word: usize) -> u64 {
        (u64::from(self.owner) << 56) ^ (block.turn << 40) ^ (gfn.0 << 9) ^ word as u64
    }

    fn fill(&self, block: &Block) {
        if let Some(iommu) = &self.iommu {
            // A driver would have a device write to the block at once.
            let pinned = iommu.pin(block.frames);
            assert_eq!(pinned, Ok(()), "a device meets what is not there");
        }
        for gfn in block.frames.frames() {
            let before = self.owners[gfn.0 as usize].swap(self.owner, AcqRel);
            assert_eq!(before, 0, "{gfn:?} is {before}'s");
            for (index, word) in words(&self.memory, gfn).iter().enumerate() {
                word.store(self.value(block, gfn, index), Relaxed);
            }
        }
        if let Some(iommu) = &self.iommu {
            iommu.unpin(block.frames);
        }
    }

    fn put(&self, zones: &[Box<dyn Allocator + '_>], block: Block) {
        for gfn in block.frames.frames() {
            for (index, word) in words(&self.memory, gfn).iter().enumerate() {
                let (found, wrote) = (word.load(Relaxed), self.value(&block, gfn, index));
                assert_eq!(found, wrote, "word {index} of {gfn:?} was lost");
            }
            let before = self.owners[gfn.0 as usize].swap(0, AcqRel);
            assert_eq!(before, self.owner, "{gfn:?} was given to another one");
        }
        let frame = block.frames.start.0 - self.zones[block.zone].0;
        zones[block.zone].put(frame, block.order).expect("it was got");
    }
}

/// Returns how many hard-reclaimed huge frames the header of a zone tells.
pub fn hard_in_header(region: &Region) -> u64 {
    region.header()[ebb_llfree::layout::HEADER_HARD].load(Acquire)
}
