//! V-Probe: free blocks found in the guest's page metadata.
//!
//! Wang et al., ATC'23, Algorithm 1. A block is taken only after its metadata
//! was write-protected and then looked at once more. In strict mode the
//! protection stays until the guest writes the metadata, and the fault brings
//! the block back in time (Algorithm 2, in the pager); in release mode it ends
//! at once, and the block's next touch is a plain first touch.
//!
//! Other than in the paper, blocks come from the tails of the guest's free
//! lists, where they are used last, and leave in batches.

use std::io;
use std::time::{Duration, Instant};

use ebb_inspect::{Block, Guest, Head, Request};
use ebb_ledger::Content;
use ebb_pager::{Claim, Committed, Grain, Pager};
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn, Gpa};

/// What Linux fills freed pages with under `page_poison=1`
/// (`include/linux/poison.h`), and looks for when it allocates them.
const PAGE_POISON: u8 = 0xaa;

/// Below this order several blocks share a frame of metadata, and a write to
/// one block's would bring all of them back.
pub const MIN_ORDER_LOWEST: u8 = 6;

/// What happens to a block's record and protection after it was emptied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Both stay: the block is back before the guest uses it, also for devices.
    Strict,
    /// Both end: the kernel gives memory at the next touch.
    Release,
}

/// What to take.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// The mode.
    pub mode: Mode,
    /// The smallest blocks to take.
    pub min_order: u8,
    /// Free memory to leave at the heads of the guest's lists.
    pub reserve_bytes: u64,
    /// Stop after so much.
    pub want_bytes: u64,
    /// Protect, empty and let go so much at a time: a guest that wants a block
    /// of a batch that is being emptied waits for the batch.
    pub batch_bytes: u64,
}

/// What was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Taken {
    /// Emptied.
    pub bytes: u64,
    /// In so many blocks.
    pub blocks: u64,
    /// Of the time, what went into reading free lists.
    pub scan: Duration,
    /// Blocks that were in use at the second look.
    pub in_use: u64,
    /// Blocks without memory, or emptied before.
    pub already_empty: u64,
    /// Blocks that the guest took while they were being taken from it.
    pub cancelled: u64,
}

impl Taken {
    /// Of two passes, one after the other: what the second passed over counts.
    #[must_use]
    pub fn and_then(self, next: Taken) -> Taken {
        Taken {
            bytes: self.bytes + next.bytes,
            blocks: self.blocks + next.blocks,
            scan: self.scan + next.scan,
            cancelled: self.cancelled + next.cancelled,
            ..next
        }
    }
}

/// Why it ended before everything was taken.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// Nobody vouches for the guest's kernel: it may not be the one that was inspected any more.
    #[error("the guest was reset, or QEMU did not tell in time that it was not")]
    Unknown,
    /// A system call failed; blocks taken so far stay taken.
    #[error("the host refused: {0}")]
    Io(#[from] io::Error),
}

/// Takes free blocks. `still_runs` is asked right before each batch is emptied,
/// with the batch held: `false` once the guest may have been reset since it was last known to run.
///
/// Returns what was taken, and what ended it early.
pub fn reclaim(
    pager: &Pager,
    guest: &Guest,
    order: Order,
    blocks: &mut Vec<Block>,
    still_runs: impl FnMut() -> bool,
) -> (Taken, Option<Stop>) {
    let mut taken = Taken::default();
    let began = Instant::now();
    blocks.clear();
    let request = Request {
        min_order: order.min_order.max(MIN_ORDER_LOWEST),
        reserve_bytes: order.reserve_bytes,
        // Blocks that are empty already are among them.
        want_bytes: u64::MAX,
    };
    guest.victims(&pager.view(), request, blocks);
    taken.scan = began.elapsed();
    let mut pass = Pass { pager, guest, order, taken, still_runs, is_watched: false };
    let mut left = blocks.iter().copied();
    let stop = loop {
        if pass.taken.bytes >= order.want_bytes {
            break None;
        }
        match pass.batch(&mut left) {
            Ok(true) => {}
            Ok(false) => break None,
            Err(stop) => break Some(stop),
        }
    };
    (pass.taken, stop)
}

struct Pass<'a, R> {
    pager: &'a Pager,
    guest: &'a Guest,
    order: Order,
    taken: Taken,
    still_runs: R,
    /// All first touches come to the pager.
    is_watched: bool,
}

impl<'a, R: FnMut() -> bool> Pass<'a, R> {
    /// Takes the next batch; `false`: no block is left.
    ///
    /// Algorithm 1, line by line for the whole batch: all are protected before
    /// any is looked at again, so one walk of page tables serves many.
    fn batch(&mut self, left: &mut impl Iterator<Item = Block>) -> Result<bool, Stop> {
        let limit = self.order.batch_bytes.min(self.order.want_bytes - self.taken.bytes);
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
        if !(self.still_runs)() {
            self.pager.blocks().spare(committed);
            return Err(Stop::Unknown);
        }
        let blocks = committed.len() as u64;
        let frames = self.pager.blocks().empty(&mut committed, self.order.mode == Mode::Strict)?;
        self.taken.bytes += frames * FRAME_BYTES;
        self.taken.blocks += blocks;
        Ok(watched.and(result)?)
    }

    /// Protects the metadata of a block that is on a free list.
    fn claim(&mut self, block: Block) -> io::Result<Option<Claim<'a>>> {
        // From the table of the inspection; the second look walks anew.
        let Some(metadata) = self.guest.memmap().metadata_gpa(block.head).map(Gpa::gfn) else {
            self.taken.in_use += 1;
            return Ok(None);
        };
        if self.is_empty(block.frames())? {
            self.taken.already_empty += 1;
            return Ok(None);
        }
        let claim = self.pager.blocks().claim(metadata, block.head, block.order)?;
        self.taken.already_empty += u64::from(claim.is_none());
        Ok(claim)
    }

    /// Has all first touches come to the pager, once a pass.
    fn watch(&mut self) -> io::Result<()> {
        if !self.is_watched {
            self.pager.frames().watch_all()?;
            self.is_watched = true;
        }
        Ok(())
    }

    /// Commits what is still free, until an error.
    fn look_again(&mut self, claims: Vec<Claim<'a>>) -> (Vec<Committed<'a>>, io::Result<()>) {
        let view = self.pager.view();
        let mut look = self.guest.look(&view);
        let (mut committed, mut result) = (Vec::with_capacity(claims.len()), Ok(()));
        for claim in claims {
            let now = look.head(claim.block().start);
            let same = |now: &Head| now.order == claim.order() && now.metadata == claim.metadata();
            match now.filter(same).and_then(|_| self.fill_of(claim.block())) {
                // Only a served fault can bring another byte than zero back.
                Some(fill) if fill != 0 && result.is_ok() => match self.watch() {
                    Ok(()) => committed.extend(self.commit(claim, fill)),
                    Err(error) => {
                        result = Err(error);
                        claim.let_go();
                    }
                },
                Some(0) => committed.extend(self.commit(claim, 0)),
                _ => {
                    self.taken.in_use += 1;
                    claim.let_go();
                }
            }
        }
        (committed, result)
    }

    fn commit(&mut self, claim: Claim<'a>, fill: u8) -> Option<Committed<'a>> {
        let record = self.order.mode == Mode::Strict || fill != 0;
        let committed = claim.commit(record, fill);
        self.taken.cancelled += u64::from(committed.is_none());
        committed
    }

    /// In strict mode the watch on its metadata tells, and a block that was
    /// never touched is taken too: else each of its frames costs a fault.
    fn is_empty(&self, block: FrameRange) -> io::Result<bool> {
        match self.order.mode {
            Mode::Strict => Ok(false),
            Mode::Release => self.pager.ram().is_hole(block),
        }
    }

    /// The byte that a free block must read as when it comes back: zero, or
    /// the guest's poison. `None`: partly poison, which is not for us to guess.
    fn fill_of(&self, block: FrameRange) -> Option<u8> {
        match self.byte_of(block.start) == Some(PAGE_POISON) {
            false => Some(0),
            // A part of a huge page may be zeroed where it is instead of
            // punched; the guest would find zeros in place of its poison.
            true if block.count < FRAMES_PER_HUGE && self.pager.folios().grain() == Grain::Huge => {
                None
            }
            true => block
                .frames()
                .all(|gfn| self.is_filled(FrameRange::new(gfn, 1)))
                .then_some(PAGE_POISON),
        }
    }

    /// A frame's first byte, if the next seven are the same.
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
