//! A guest that takes, fills and frees blocks, while the host reclaims its free blocks. The guest
//! checks that each block has what was left there, or the fill.

use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::{Claim, Committed, Grain, Pager};
use ebb_sys::kvm_vm::Registers;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};

use crate::daemon::Daemon;
use crate::machine::Machine;
use crate::program::Program;
use crate::vcpu::Running;
use crate::wait::until;

const RAM_BYTES: u64 = 32 << 20;
/// First of the metadata frames, one for each block.
const METADATA: Gfn = Gfn(0x200);
const BLOCKS: Gfn = Gfn(0x1000);
const BLOCKS_BYTES: u64 = 16 << 20;
/// Most blocks. They are few, so that the guest often takes one that is being reclaimed.
const MAX_BLOCKS: u64 = 16;
/// Blocks to empty together, so that neighbours go in one call.
const BATCH: usize = 8;

/// How blocks are reclaimed.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Grain in which missing memory is given.
    pub grain: Grain,
    /// Order of the blocks: each has `1 << order` frames.
    pub order: u8,
    /// Whether first touches reach the pager, not only writes to protected memory.
    pub missing: bool,
    /// Byte that the ledger records for reclaimed blocks. `None` means that the ledger does not
    /// know them.
    pub fill: Option<u8>,
    /// Whether reclaimed blocks are watched until the guest takes them.
    pub keep: bool,
}

/// Blocks come back when the guest writes their metadata.
pub const STRICT: Settings =
    Settings { grain: Grain::Frame, order: 4, missing: true, fill: Some(0), keep: true };
/// Frames come back one by one, at a touch.
pub const TOUCHED: Settings = Settings { keep: false, ..STRICT };
/// The ledger forgets blocks once they are empty.
pub const FORGOTTEN: Settings = Settings { fill: None, ..TOUCHED };
/// The ledger forgets empty blocks, and the kernel gives them memory.
pub const RELEASED: Settings = Settings { missing: false, ..FORGOTTEN };

/// A machine with such a guest, and its daemon.
pub struct Blocks {
    settings: Settings,
    daemon: Option<Daemon>,
    machine: Machine,
}

impl Blocks {
    /// Makes the machine. No vCPU runs yet, and no block has memory.
    pub fn new(settings: Settings) -> Blocks {
        let machine = Machine::new(RAM_BYTES);
        let mut daemon = Daemon::take(&machine, settings.grain);
        match settings.missing {
            true => daemon.pager.frames().watch_all().expect("the pager"),
            false => daemon.pager.frames().watch_all_writes().expect("the pager"),
        }
        daemon.serve();
        let blocks = Blocks { settings, daemon: Some(daemon), machine };
        let metadata = FrameRange::new(METADATA, blocks.count());
        blocks.machine.ram().populate(metadata).expect("the pager");
        blocks
    }

    /// Returns the pager of the current daemon.
    pub fn pager(&self) -> &Pager {
        &self.daemon.as_ref().expect("attached").pager
    }

    /// Replaces the daemon: it dies as by `kill -9`, `between` runs, and another one recovers the
    /// VM.
    pub fn replace_daemon(&mut self, between: impl FnOnce(&Machine)) {
        self.daemon = None;
        between(&self.machine);
        let mut daemon = Daemon::recover(&self.machine, self.settings.grain);
        if self.settings.fill.is_none() {
            daemon.pager.returner().end_watches().expect("the pager");
        }
        daemon.serve();
        self.daemon = Some(daemon);
    }

    /// Stops serving faults once at least `claimable` blocks can be claimed. They stay claimable,
    /// except for those that vCPUs are about to take.
    pub fn stop_serving(&mut self, claimable: u64) {
        let known = |block| self.pager().ledger().content(self.metadata(block));
        let can_be =
            |block: &u64| self.looks_worth_it(*block) && known(*block) == Content::Resident;
        until("blocks to claim", || {
            let blocks = (0..self.count()).filter(can_be).count() as u64;
            (blocks >= claimable).then_some(())
        });
        self.daemon.as_mut().expect("attached").stop_serving();
    }

    /// Returns the number of blocks.
    pub fn count(&self) -> u64 {
        MAX_BLOCKS.min((BLOCKS_BYTES / FRAME_BYTES) >> self.settings.order)
    }

    /// Returns the number of frames in all blocks.
    pub fn frames_in_all(&self) -> u64 {
        self.count() << self.settings.order
    }

    fn fill(&self) -> u8 {
        self.settings.fill.unwrap_or(0)
    }

    fn metadata(&self, block: u64) -> Gfn {
        Gfn(METADATA.0 + block)
    }

    fn frames(&self, block: u64) -> FrameRange {
        FrameRange::block(Gfn(BLOCKS.0 + (block << self.settings.order)), self.settings.order)
    }

    fn word(&self, block: u64, index: u64) -> Gpa {
        Gpa(self.metadata(block).gpa().0 + index * 8)
    }

    /// Starts `vcpus` vCPUs.
    pub fn start(&self, vcpus: u64) -> Vec<Running> {
        self.machine.tell_to_leave(false);
        let arguments = |vcpu| Registers {
            rdi: METADATA.gpa().0,
            rsi: BLOCKS.gpa().0,
            rdx: self.count() - 1,
            rcx: u64::from(self.settings.order) + FRAME_BYTES.ilog2() as u64,
            r9: vcpu,
            ..Registers::default()
        };
        (0..vcpus).map(|vcpu| self.machine.start(Program::Churn, arguments(vcpu))).collect()
    }

    /// Makes all programs leave. Returns how many blocks they took.
    ///
    /// # Panics
    /// A program found a wrong word.
    pub fn finish(&self, running: Vec<Running>) -> u64 {
        self.machine.tell_to_leave(true);
        let left: Vec<Registers> = running.into_iter().map(Running::leave).collect();
        let wrong: u64 = left.iter().map(|registers| registers.r10).sum();
        assert_eq!(wrong, 0, "words were wrong");
        left.iter().map(|registers| registers.r8).sum()
    }

    /// Whether the block is free and was filled since it was reclaimed.
    fn looks_worth_it(&self, block: u64) -> bool {
        self.machine.get(self.word(block, 0)) == 0 && self.machine.get(self.word(block, 2)) == 1
    }

    /// Protects a block's metadata, if the block is free at both looks.
    pub fn claim(&self, block: u64) -> Option<Claim<'_>> {
        if !self.looks_worth_it(block) {
            return None;
        }
        let head = self.frames(block).start;
        let claim = self
            .pager()
            .blocks()
            .claim(self.metadata(block), head, self.settings.order)
            .expect("the pager")?;
        match self.looks_worth_it(block) {
            true => Some(claim),
            false => {
                claim.abandon();
                None
            }
        }
    }

    /// Commits a claim in the chosen way.
    pub fn commit<'a>(&self, claim: Claim<'a>) -> Option<Committed<'a>> {
        claim.commit(self.settings.fill.is_some(), self.fill())
    }

    fn committed(&self, block: u64) -> Option<Committed<'_>> {
        let claim = self.commit(self.claim(block)?)?;
        // The guest cannot take the block before it is empty, so it reads this afterwards.
        self.machine.set(self.word(block, 1), u64::from_ne_bytes([self.fill(); 8]));
        self.machine.set(self.word(block, 2), 0);
        Some(claim)
    }

    /// Empties the free blocks. Returns how many.
    pub fn reclaim_free(&self) -> u64 {
        let mut done = 0;
        let all: Vec<u64> = (0..self.count()).collect();
        for batch in all.chunks(BATCH) {
            let mut claims: Vec<_> =
                batch.iter().filter_map(|&block| self.committed(block)).collect();
            done += claims.len() as u64;
            let frames: u64 = claims.iter().map(|claim| claim.block().count).sum();
            let reclaimed =
                self.pager().blocks().empty(&mut claims, self.settings.keep).expect("the pager");
            assert_eq!(reclaimed, frames);
        }
        done
    }

    /// Returns how many frames are empty by the ledger, after checking that the counters agree.
    pub fn recorded_frames(&self) -> u64 {
        let empty = Content::Empty { fill: self.fill(), hard: false };
        let runs = self.pager().ledger().runs().filter(|(_, content)| *content == empty);
        let frames = runs.map(|(frames, _)| frames.count).sum();
        assert_eq!(self.pager().counters().empty_frames.load(Relaxed), frames);
        frames
    }

    /// Waits until every block has memory.
    pub fn wait_until_all_are_filled(&self) {
        until("all blocks to be filled", || (self.holes() == 0).then_some(()));
    }

    /// Returns how many blocks have no memory.
    pub fn holes(&self) -> u64 {
        let hole =
            |block: &u64| self.machine.ram().is_hole(self.frames(*block)).expect("the pager");
        (0..self.count()).filter(hole).count() as u64
    }
}
