//! The guest's disks as places that hold the content of evicted frames.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_digest::Digest;
use ebb_store::Page;
use ebb_units::Gfn;

/// The guest's disks, in blocks of a frame's size. All disks of a VM share one space of block
/// numbers, below 2^48.
pub trait GuestDisk: Send + Sync {
    /// Returns a block whose content has this digest, by the pager's key, and that is not being
    /// written.
    fn find(&self, digest: &Digest) -> Option<u64>;

    /// Reads consecutive blocks, from `block` on.
    ///
    /// # Errors
    /// The disk's error.
    fn read(&self, block: u64, pages: &mut [Page]) -> io::Result<()>;
}

/// A VM none of whose disks are served here.
pub struct NoDisk;

impl GuestDisk for NoDisk {
    fn find(&self, _digest: &Digest) -> Option<u64> {
        None
    }

    fn read(&self, _block: u64, _pages: &mut [Page]) -> io::Result<()> {
        Err(io::Error::other("no disk of this VM is served here"))
    }
}

/// Which frames are disk-backed by which blocks: these frames must be brought back before the block
/// is written.
#[derive(Default)]
pub(crate) struct DiskBacked {
    /// Pairs of block and frame, ordered by block, then by frame.
    pairs: Mutex<BTreeSet<(u64, Gfn)>>,
}

impl DiskBacked {
    /// Notes that the block that `find` finds will back `gfn`, then asks `find` again: a thread
    /// that is about to write a block first has `find` not find it any more, and looks here after
    /// that.
    pub(crate) fn add(&self, gfn: Gfn, find: impl Fn() -> Option<u64>) -> Option<u64> {
        let block = find()?;
        self.insert(gfn, block);
        if find() == Some(block) {
            return Some(block);
        }
        self.leave(gfn, block);
        None
    }

    /// Notes that the block backs the frame. The caller has locked the frame's word, or goes by the
    /// ledger of a dead daemon.
    pub(crate) fn insert(&self, gfn: Gfn, block: u64) {
        let is_new = self.pairs().insert((block, gfn));
        debug_assert!(is_new, "block {block} backs {gfn:?} already");
    }

    /// Notes that the block does not back the frame any more. The caller has locked the frame's
    /// word.
    pub(crate) fn leave(&self, gfn: Gfn, block: u64) {
        let was_there = self.pairs().remove(&(block, gfn));
        debug_assert!(was_there, "block {block} does not back {gfn:?}");
    }

    pub(crate) fn has(&self, gfn: Gfn, block: u64) -> bool {
        self.pairs().contains(&(block, gfn))
    }

    /// Returns the pairs of these blocks and the frames that they back.
    pub(crate) fn on(&self, blocks: Range<u64>) -> Vec<(u64, Gfn)> {
        self.pairs().range((blocks.start, Gfn(0))..(blocks.end, Gfn(0))).copied().collect()
    }

    /// Returns a frame that this block backs.
    pub(crate) fn first_on(&self, block: u64) -> Option<Gfn> {
        let pairs = self.pairs();
        let first = pairs.range((block, Gfn(0))..(block + 1, Gfn(0))).next();
        first.map(|(_, gfn)| *gfn)
    }

    /// The set stays whole even if the holder of its lock panics.
    fn pairs(&self) -> MutexGuard<'_, BTreeSet<(u64, Gfn)>> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
