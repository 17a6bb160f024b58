//! V-Probe: free blocks found in the guest's page metadata.
//!
//! Wang et al., ATC'23, Algorithm 1. A block is reclaimed only after its metadata was
//! write-protected and then looked at once more. In strict mode the protection stays until the
//! guest writes the metadata, and the fault brings the block back in time (Algorithm 2, in the
//! pager). In release mode it ends at once, and the block's next touch is a plain first touch.
//!
//! Unlike in the paper, blocks come from the tails of the guest's free lists, where they are used
//! last, and are reclaimed in batches.

use std::io;
use std::time::{Duration, Instant};

use ebb_inspect::{BuddyBlock, FreeBlocks, Head, Request};
use ebb_ledger::Content;
use ebb_pager::{Claim, Committed, Grain, Pager};
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn};

use crate::resting::Resting;

/// What Linux fills freed pages with under `page_poison=1`
/// (`include/linux/poison.h`), and looks for when it allocates them.
const PAGE_POISON: u8 = 0xaa;

/// Lowest order of blocks that can be reclaimed. Below it, several blocks share a frame of
/// metadata, and a write to one block's would bring all of them back.
pub const MIN_ORDER_LOWEST: u8 = 6;

/// What happens to a block's record and protection after it was reclaimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Both stay: the block is back before the guest or a device uses it.
    Strict,
    /// Both end: the kernel gives memory at the next touch.
    Release,
}

/// What to reclaim.
#[derive(Clone, Copy)]
pub struct Order<'a> {
    /// The mode.
    pub mode: Mode,
    /// Order of the smallest blocks to reclaim.
    pub min_order: u8,
    /// Free memory to leave at the heads of the guest's lists.
    pub reserve_bytes: u64,
    /// Bytes after which to stop.
    pub want_bytes: u64,
    /// Bytes to protect, empty and release at a time. A guest that wants a block of a batch that is
    /// being reclaimed waits for the batch.
    pub batch_bytes: u64,
    /// Memory to leave alone. `None`: all that is free is reclaimed.
    pub resting: Option<&'a Resting>,
}

/// What was reclaimed, and what was passed over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReclaimedBlocks {
    /// Bytes reclaimed.
    pub bytes: u64,
    /// Blocks reclaimed.
    pub blocks: u64,
    /// Bytes of all free blocks that were found.
    pub found_bytes: u64,
    /// Bytes of those that were looked at so far.
    pub seen_bytes: u64,
    /// Part of the time that went into reading free lists.
    pub scan: Duration,
    /// Blocks that were in use at the second look.
    pub in_use: u64,
    /// Blocks without memory, or reclaimed before.
    pub already_empty: u64,
    /// Blocks that the guest allocated while they were being reclaimed.
    pub cancelled: u64,
}

impl ReclaimedBlocks {
    /// The sum of two passes, one after the other. Blocks in use or already empty are those of the
    /// second pass.
    #[must_use]
    pub fn and_then(self, next: ReclaimedBlocks) -> ReclaimedBlocks {
        ReclaimedBlocks {
            bytes: self.bytes + next.bytes,
            blocks: self.blocks + next.blocks,
            scan: self.scan + next.scan,
            cancelled: self.cancelled + next.cancelled,
            ..next
        }
    }
}

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
pub enum VProbeStop {
    /// Nobody vouches for the guest's kernel: it may no longer be the one that was inspected.
    #[error("the guest was reset, or QEMU did not tell in time that it was not")]
    Unknown,
    /// A system call failed. Blocks reclaimed so far stay reclaimed.
    #[error("the host refused: {0}")]
    Io(#[from] io::Error),
}

/// Reclaims free blocks. Asks `still_runs` right before each batch is punched, while the batch is
/// locked, with what was reclaimed before: `false` once the guest may have been reset since it was
/// last known to run, or nobody wants more.
///
/// Returns what was reclaimed, and what ended it early.
pub fn reclaim(
    pager: &Pager,
    guest: &dyn FreeBlocks,
    order: Order<'_>,
    blocks: &mut Vec<BuddyBlock>,
    still_runs: impl FnMut(&ReclaimedBlocks) -> bool,
) -> (ReclaimedBlocks, Option<VProbeStop>) {
    let mut reclaimed = ReclaimedBlocks::default();
    let began = Instant::now();
    blocks.clear();
    let request = Request {
        min_order: order.min_order.max(MIN_ORDER_LOWEST),
        reserve_bytes: order.reserve_bytes,
        // The blocks found include empty ones.
        want_bytes: u64::MAX,
    };
    guest.victims(&pager.view(), request, blocks);
    if let Some(resting) = order.resting {
        blocks.retain(|block| !resting.rests(block.head, began));
    }
    reclaimed.found_bytes = blocks.iter().map(|block| block.frames().bytes()).sum();
    reclaimed.scan = began.elapsed();
    let mut pass = Pass { pager, guest, order, reclaimed, still_runs, is_watched: false };
    let mut left = blocks.iter().copied();
    let stop = loop {
        if pass.reclaimed.bytes >= order.want_bytes {
            break None;
        }
        match pass.batch(&mut left) {
            Ok(true) => {}
            Ok(false) => break None,
            Err(stop) => break Some(stop),
        }
    };
    (pass.reclaimed, stop)
}

struct Pass<'a, R> {
    pager: &'a Pager,
    guest: &'a dyn FreeBlocks,
    order: Order<'a>,
    reclaimed: ReclaimedBlocks,
    still_runs: R,
    /// Whether all first touches already come to the pager.
    is_watched: bool,
}

impl<'a, R: FnMut(&ReclaimedBlocks) -> bool> Pass<'a, R> {
    /// Reclaims the next batch; `false`: no block is left.
    ///
    /// Algorithm 1, each line for the whole batch: all blocks are protected before any is looked at
    /// again, so that one walk of page tables serves many.
    fn batch(&mut self, left: &mut impl Iterator<Item = BuddyBlock>) -> Result<bool, VProbeStop> {
        let limit = self.order.batch_bytes.min(self.order.want_bytes - self.reclaimed.bytes);
        let (mut bytes, mut claims, mut result) = (0, Vec::new(), Ok(true));
        while bytes < limit && matches!(result, Ok(true)) {
            match left.next().map(|block| self.claim(block)) {
                Some(Ok(Some(claim))) => {
                    bytes += claim.block().bytes();
                    claims.push(claim);
                }
                Some(Ok(None)) => {}
                Some(Err(error)) => result = Err(error),
                None => result = Ok(false),
            }
        }
        let (mut committed, watched) = self.look_again(claims);
        if !(self.still_runs)(&self.reclaimed) {
            self.pager.blocks().spare(committed);
            return Err(VProbeStop::Unknown);
        }
        let blocks = committed.len() as u64;
        let frames = self.pager.blocks().empty(&mut committed, self.order.mode == Mode::Strict)?;
        self.reclaimed.bytes += frames * FRAME_BYTES;
        self.reclaimed.blocks += blocks;
        Ok(watched.and(result)?)
    }

    /// Protects the metadata of a block that is on a free list.
    fn claim(&mut self, block: BuddyBlock) -> io::Result<Option<Claim<'a>>> {
        self.reclaimed.seen_bytes += block.frames().bytes();
        let Some(metadata) = self.guest.metadata_frame(block.head) else {
            self.reclaimed.in_use += 1;
            return Ok(None);
        };
        if self.is_empty(block.frames())? {
            self.reclaimed.already_empty += 1;
            return Ok(None);
        }
        let claim = self.pager.blocks().claim(metadata, block.head, block.order)?;
        self.reclaimed.already_empty += u64::from(claim.is_none());
        Ok(claim)
    }

    /// Has all first touches come to the pager: once a pass.
    fn watch(&mut self) -> io::Result<()> {
        if !self.is_watched {
            self.pager.frames().watch_all()?;
            self.is_watched = true;
        }
        Ok(())
    }

    /// Commits the claims whose blocks are still free. After an error, only those that read as
    /// zero.
    fn look_again(&mut self, claims: Vec<Claim<'a>>) -> (Vec<Committed<'a>>, io::Result<()>) {
        let view = self.pager.view();
        let mut look = self.guest.heads(&view);
        let (mut committed, mut result) = (Vec::with_capacity(claims.len()), Ok(()));
        for claim in claims {
            let now = look(claim.block().start);
            let same = |now: &Head| now.order == claim.order() && now.metadata == claim.metadata();
            match now.filter(same).and_then(|_| self.fill_of(claim.block())) {
                // Only a served fault can bring back a byte other than zero.
                Some(fill) if fill != 0 && result.is_ok() => match self.watch() {
                    Ok(()) => committed.extend(self.commit(claim, fill)),
                    Err(error) => {
                        result = Err(error);
                        claim.abandon();
                    }
                },
                Some(0) => committed.extend(self.commit(claim, 0)),
                _ => {
                    self.reclaimed.in_use += 1;
                    claim.abandon();
                }
            }
        }
        (committed, result)
    }

    fn commit(&mut self, claim: Claim<'a>, fill: u8) -> Option<Committed<'a>> {
        let record = self.order.mode == Mode::Strict || fill != 0;
        let committed = claim.commit(record, fill);
        self.reclaimed.cancelled += u64::from(committed.is_none());
        committed
    }

    /// Whether a block is empty and need not be reclaimed. Never in strict mode: a fault on its
    /// metadata brings a block back, so even a block that was never touched is reclaimed, as
    /// otherwise each of its frames would cost a fault.
    fn is_empty(&self, block: FrameRange) -> io::Result<bool> {
        match self.order.mode {
            Mode::Strict => Ok(false),
            Mode::Release => self.pager.ram().is_hole(block),
        }
    }

    /// The byte that a free block must read as when it comes back: zero, or the guest's poison.
    /// `None`: the block is only partly poison, or might lose it, and Ebb does not guess.
    fn fill_of(&self, block: FrameRange) -> Option<u8> {
        match self.byte_of(block.start) == Some(PAGE_POISON) {
            false => Some(0),
            true if self.has_part_of_a_huge_page(block) => None,
            true => block
                .frames()
                .all(|gfn| self.is_filled(FrameRange::new(gfn, 1)))
                .then_some(PAGE_POISON),
        }
    }

    /// Whether a huge page may lie in the block only in part. Such a part is zeroed in place instead
    /// of punched, or comes back with the rest of its page: the guest would find zeros instead of
    /// its poison.
    fn has_part_of_a_huge_page(&self, block: FrameRange) -> bool {
        let folios = self.pager.folios();
        let holds_whole_pages =
            || block.by_huge().all(|frames| folios.holds_whole_folios(frames.start));
        folios.grain() == Grain::Huge && (block.count < FRAMES_PER_HUGE || !holds_whole_pages())
    }

    /// The first byte of a frame, if the next seven equal it.
    fn byte_of(&self, gfn: Gfn) -> Option<u8> {
        match self.pager.ledger().content(gfn) {
            Content::Empty { fill, .. } => Some(fill),
            _ => {
                let bytes = self.pager.ram().word(gfn.gpa())?.to_ne_bytes();
                bytes.iter().all(|&byte| byte == bytes[0]).then_some(bytes[0])
            }
        }
    }

    fn is_filled(&self, frame: FrameRange) -> bool {
        if let Content::Empty { fill, .. } = self.pager.ledger().content(frame.start) {
            return fill == PAGE_POISON;
        }
        let mut page = [0; FRAME_BYTES as usize];
        self.pager.ram().read(frame, &mut page).is_ok()
            && page.iter().all(|&byte| byte == PAGE_POISON)
    }
}
