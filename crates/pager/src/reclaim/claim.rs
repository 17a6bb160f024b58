//! Reclaiming blocks of free frames: the second half of journey 1.
//!
//! A [`Claim`] is a block whose metadata frame is locked and write-protected. A [`Committed`] block
//! is on record as about to be reclaimed. Only committed blocks are punched: never on a verdict
//! that the guest could have changed since.

use std::io;
use std::sync::Arc;

use ebb_ledger::{Content, Locked, LockedFrame};
use ebb_units::{FrameRange, Gfn};

use crate::frames::Frames;
use crate::residency::Residency;
use crate::support::counters::{add, subtract};

/// Linux's largest buddy order on x86-64; a block of this order spans two huge frames.
const MAX_ORDER: u8 = 10;
const MAX_PARTS: usize = 2;

/// A block that the guest cannot allocate without our knowledge.
#[must_use]
pub struct Claim<'p> {
    blocks: &'p Blocks,
    metadata: Gfn,
    watch: LockedFrame<'p>,
    head: Gfn,
    order: u8,
}

/// A claimed block that is on record; it waits to be punched.
#[must_use]
pub struct Committed<'p> {
    claim: Claim<'p>,
    /// The block's words, if the ledger records its frames.
    parts: Vec<Part<'p>>,
    fill: u8,
}

/// A committed block's own words in one huge frame, locked until it is empty.
struct Part<'p> {
    words: Locked<'p>,
    /// What the words said before, one by one.
    before: Vec<Content>,
    /// Number of the frames that were resident.
    resident: u64,
}

type Words<'p> = [Option<Locked<'p>>; MAX_PARTS];

impl<'p> Claim<'p> {
    /// The block's frames.
    pub fn block(&self) -> FrameRange {
        FrameRange::block(self.head, self.order)
    }

    /// The frame that holds the metadata of the block's head.
    pub fn metadata(&self) -> Gfn {
        self.metadata
    }

    /// The block's order: it has `1 << order` frames.
    pub fn order(&self) -> u8 {
        self.order
    }

    /// Records that the block is about to be reclaimed. `record`: the ledger notes its frames, each
    /// filled with the byte `fill` from now on.
    ///
    /// `None`: the guest wants it, part of it is locked, or it cannot be filled; the claim is given
    /// up.
    pub fn commit(mut self, record: bool, fill: u8) -> Option<Committed<'p>> {
        let mut parts: Words<'p> = [None, None];
        debug_assert_eq!(self.watch.content(), Content::Resident, "{:?}", self.metadata);
        // A touch of one frame fills that frame, and devices would reach the unfilled rest.
        let can_fill = fill == 0 || !self.blocks.frames.devices().is_whole();
        let held = can_fill && (!record || self.lock_parts(&mut parts));
        if !held || !self.watch.commit(Content::Watch { head: self.head, order: self.order }) {
            for part in parts.into_iter().flatten() {
                let frames = part.frames();
                let wanted = part.abandon();
                self.blocks.frames.after(wanted, frames);
            }
            self.abandon();
            return None;
        }
        let parts: Vec<Part<'p>> = parts.into_iter().flatten().map(Part::new).collect();
        let locked: u64 = parts.iter().map(|part| part.words.frames().count).sum();
        debug_assert_eq!(locked, if record { self.block().count } else { 0 }, "{:?}", self.block());
        for part in &parts {
            add(&self.blocks.frames.counters().empty_frames, part.resident);
            part.words.set(Content::Empty { fill, hard: false });
            self.blocks.residency.drop_slots(part.words.frames());
        }
        Some(Committed { claim: self, parts, fill })
    }

    fn lock_parts(&self, parts: &mut Words<'p>) -> bool {
        let frames_of = &self.blocks.frames;
        for (slot, frames) in parts.iter_mut().zip(self.block().by_huge()) {
            let part = frames.count < ebb_units::FRAMES_PER_HUGE;
            if part && frames_of.split(frames.start.huge()).is_err() {
                return false;
            }
            match frames_of.ledger().lock(frames) {
                // Only plain memory may be reclaimed.
                Ok(held) if !held.contents().all(|(_, content)| is_plain(content)) => {
                    let wanted = held.abandon();
                    frames_of.after(wanted, frames);
                    return false;
                }
                Ok(held) => *slot = Some(held),
                Err(busy) => {
                    frames_of.after(busy.wanted, frames);
                    return false;
                }
            }
        }
        true
    }

    /// Gives the claim up; the guest goes on with the block. A writer that waits for its metadata
    /// is woken by the end of the protection.
    pub fn abandon(self) {
        let frame = FrameRange::new(self.metadata, 1);
        let frames = &self.blocks.frames;
        frames.report("unprotect", frames.unprotect(frame));
        let wanted = self.watch.unlock(Content::Resident);
        self.blocks.frames.after(wanted, frame);
    }
}

impl<'p> Part<'p> {
    fn new(words: Locked<'p>) -> Part<'p> {
        let before = words.contents().map(|(_, content)| content).collect();
        let resident = words.contents().filter(|(_, content)| *content == Content::Resident);
        let resident = resident.map(|(frames, _)| frames.count).sum();
        Part { words, before, resident }
    }
}

impl Committed<'_> {
    /// The block's frames.
    pub fn block(&self) -> FrameRange {
        self.claim.block()
    }

    fn finish(self, keep: bool) {
        let Committed { claim, parts, fill } = self;
        if parts.is_empty() {
            claim.blocks.residency.give_up_in(claim.block());
        }
        let empty = Content::Empty { fill, hard: false };
        for Part { words, .. } in parts {
            let frames = words.frames();
            debug_assert!(words.contents().all(|(_, content)| content == empty), "{frames:?}");
            let wanted = words.unlock(empty);
            claim.blocks.frames.after(wanted, frames);
        }
        if !keep {
            return claim.abandon();
        }
        let watch = Content::Watch { head: claim.head, order: claim.order };
        let wanted = claim.watch.unlock(watch);
        claim.blocks.frames.after(wanted, FrameRange::new(claim.metadata, 1));
    }

    fn spare(self) {
        let Committed { claim, parts, .. } = self;
        for Part { words, before, resident } in parts {
            let frames = words.frames();
            subtract(&claim.blocks.frames.counters().empty_frames, resident);
            let wanted = words.unlock_each(&before);
            claim.blocks.frames.after(wanted, frames);
        }
        claim.abandon();
    }
}

/// Whether it is memory that the guest may use: resident, or empty and not hard.
fn is_plain(content: Content) -> bool {
    matches!(content, Content::Resident | Content::Empty { hard: false, .. })
}

/// Claims and reclaims blocks of one VM's frames.
pub struct Blocks {
    frames: Arc<Frames>,
    residency: Arc<Residency>,
}

impl Blocks {
    pub(crate) fn new(frames: &Arc<Frames>, residency: &Arc<Residency>) -> Blocks {
        Blocks { frames: Arc::clone(frames), residency: Arc::clone(residency) }
    }

    /// Locks and protects the metadata of a block that looked free. The caller must look again now,
    /// and then commit or give the claim up.
    ///
    /// `None`: the block is reclaimed already, another thread works on it, or devices do not allow
    /// it.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn claim(&self, metadata: Gfn, head: Gfn, order: u8) -> io::Result<Option<Claim<'_>>> {
        let block = FrameRange::block(head, order.min(MAX_ORDER));
        let inside = self.frames.ram().range(block).is_some()
            && self.frames.ram().region_of(metadata).is_some()
            && self.frames.devices().allows(block, metadata);
        if order > MAX_ORDER || !inside || self.frames.split(metadata.huge()).is_err() {
            return Ok(None);
        }
        let Ok(watch) = self.frames.ledger().lock_frame(metadata) else { return Ok(None) };
        let frame = FrameRange::new(metadata, 1);
        if watch.content() != Content::Resident {
            let wanted = watch.abandon();
            self.frames.after(wanted, frame);
            return Ok(None);
        }
        let claim = Claim { blocks: self, metadata, watch, head, order };
        match self.frames.protect(frame) {
            Ok(()) => Ok(Some(claim)),
            Err(error) => {
                claim.abandon();
                Err(error)
            }
        }
    }

    /// Punches committed blocks, adjacent ones in one call, and leaves each either watched (`keep`)
    /// or free to be used unseen. A block that a device uses stays as it was. Returns the number of
    /// frames punched.
    ///
    /// # Errors
    /// As fallocate(2). Frames that were not punched keep their memory; `blocks` is empty then,
    /// too.
    pub fn empty(&self, blocks: &mut Vec<Committed<'_>>, keep: bool) -> io::Result<u64> {
        add(&self.frames.counters().worker_batches, 1);
        blocks.sort_unstable_by_key(|block| block.claim.head);
        let unmapped = |block: &Committed<'_>| self.frames.devices().unmap(block.block());
        let (free, in_use): (Vec<_>, Vec<_>) = blocks.drain(..).partition(unmapped);
        let result = self.frames.punch_runs(free.iter().map(Committed::block));
        free.into_iter().for_each(|block| block.finish(keep));
        self.spare(in_use);
        result
    }

    /// Gives up committed blocks that are not to be reclaimed after all: they are again what they
    /// were.
    pub fn spare(&self, blocks: Vec<Committed<'_>>) {
        blocks.into_iter().for_each(Committed::spare);
    }
}
