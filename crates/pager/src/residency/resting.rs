//! The guest's disks as places where frames' content rests.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_digest::Digest;
use ebb_store::Page;
use ebb_units::Gfn;

/// The guest's disks, in blocks of a frame's size. All disks of a VM share one
/// space of block numbers, below 2^48.
pub trait Disk: Send + Sync {
    /// A block whose content has this digest, by the key that the pager has, and that is not
    /// being written.
    fn find(&self, digest: &Digest) -> Option<u64>;

    /// Reads blocks in a row, the first of them `block`.
    ///
    /// # Errors
    /// What the disk said.
    fn read(&self, block: u64, pages: &mut [Page]) -> io::Result<()>;
}

/// A VM none of whose disks are served here.
pub struct NoDisk;

impl Disk for NoDisk {
    fn find(&self, _digest: &Digest) -> Option<u64> {
        None
    }

    fn read(&self, _block: u64, _pages: &mut [Page]) -> io::Result<()> {
        Err(io::Error::other("no disk of this VM is served here"))
    }
}

/// Which frames rest on which blocks: what must be brought back before a block
/// is written.
#[derive(Default)]
pub(crate) struct Resting {
    /// By block, then by frame.
    pairs: Mutex<BTreeSet<(u64, Gfn)>>,
}

impl Resting {
    /// Notes that `gfn` is to rest on the block that `find` finds. It is asked
    /// again after that: whoever is about to write a block first has `find` not
    /// find it any more, and looks here after that.
    pub(crate) fn rest(&self, gfn: Gfn, find: impl Fn() -> Option<u64>) -> Option<u64> {
        let block = find()?;
        self.pairs().insert((block, gfn));
        if find() == Some(block) {
            return Some(block);
        }
        self.leave(gfn, block);
        None
    }

    /// It rests there, by the ledger of a dead daemon.
    pub(crate) fn rests(&self, gfn: Gfn, block: u64) {
        self.pairs().insert((block, gfn));
    }

    pub(crate) fn leave(&self, gfn: Gfn, block: u64) {
        self.pairs().remove(&(block, gfn));
    }

    pub(crate) fn has(&self, gfn: Gfn, block: u64) -> bool {
        self.pairs().contains(&(block, gfn))
    }

    /// Who rests on these blocks.
    pub(crate) fn on(&self, blocks: Range<u64>) -> Vec<(u64, Gfn)> {
        self.pairs().range((blocks.start, Gfn(0))..(blocks.end, Gfn(0))).copied().collect()
    }

    /// A frame that rests on this block.
    pub(crate) fn first_on(&self, block: u64) -> Option<Gfn> {
        let pairs = self.pairs();
        let first = pairs.range((block, Gfn(0))..(block + 1, Gfn(0))).next();
        first.map(|(_, gfn)| *gfn)
    }

    /// A set stays whole also when its holder panics.
    fn pairs(&self) -> MutexGuard<'_, BTreeSet<(u64, Gfn)>> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
