//! Memory, and the store behind it that no processor can address, as tiers: the pager's two sides.

use std::io;
use std::sync::Arc;

use ebb_ledger::Content;
use ebb_pager::{Judge, Pager};
use ebb_store::MEMORY_SLOTS;
use ebb_units::{FrameRange, Gfn};

use crate::ladder::TierKind;
use crate::tier::{Outcome, Tier, TierError};

/// Where a frame's content is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Home {
    /// In memory that a processor can address.
    Memory,
    /// In memory, compressed.
    Compressed,
    /// In a file, on a block device, or on an equal block of the guest's disk.
    Disk,
}

/// Where a frame's content is, or was until somebody locked the frame just now. `None`: it has no
/// content to keep.
pub fn home(pager: &Pager, gfn: Gfn) -> Option<Home> {
    match pager.ledger().content(gfn) {
        Content::Resident | Content::Clean { .. } => Some(Home::Memory),
        Content::Saved { slot } if slot >= MEMORY_SLOTS => Some(Home::Compressed),
        Content::Saved { .. } | Content::OnDisk { .. } => Some(Home::Disk),
        Content::Empty { .. } | Content::Watch { .. } | Content::Unplugged => None,
    }
}

/// The host's memory, as the tier to which pages come back. They also come back by themselves, at
/// their next touch.
pub struct MemoryTier {
    pager: Arc<Pager>,
}

impl MemoryTier {
    /// The memory of this pager's VM.
    pub fn new(pager: Arc<Pager>) -> MemoryTier {
        MemoryTier { pager }
    }
}

impl Tier for MemoryTier {
    fn kind(&self) -> TierKind {
        TierKind::Dram
    }

    fn bring(&self, frames: &[Gfn]) -> Result<Vec<Outcome>, TierError> {
        let mut outcomes = Vec::with_capacity(frames.len());
        for &gfn in frames {
            outcomes.push(match home(&self.pager, gfn) {
                Some(Home::Memory) => Outcome::There,
                None => Outcome::Nothing,
                Some(_) => {
                    let frame = FrameRange::new(gfn, 1);
                    self.pager.devices().pin(frame, false).map_err(failed(TierKind::Dram))?;
                    self.pager.devices().unpin(frame);
                    Outcome::Moved
                }
            });
        }
        Ok(outcomes)
    }
}

/// What a pager's store keeps: compressed memory, a file, or the one in front of the other. The
/// store decides which of the two holds a page: a page that shrinks stays compressed until it is
/// the oldest there (`docs/decisions/0014-*`). Pages come back on a fault.
pub struct Stored {
    pager: Arc<Pager>,
    kind: TierKind,
    judge: Box<dyn Judge + Send + Sync>,
}

impl Stored {
    /// The store of this pager, reported as a tier of this kind. `judge` knows which frames need
    /// not be kept.
    pub fn new(pager: Arc<Pager>, kind: TierKind, judge: Box<dyn Judge + Send + Sync>) -> Stored {
        Stored { pager, kind, judge }
    }
}

impl Tier for Stored {
    fn kind(&self) -> TierKind {
        self.kind.clone()
    }

    /// Where frames are not evicted one by one, only whole huge frames are. Other frames count as
    /// in use.
    fn bring(&self, frames: &[Gfn]) -> Result<Vec<Outcome>, TierError> {
        let before: Vec<_> = frames.iter().map(|&gfn| home(&self.pager, gfn)).collect();
        let mut sorted = frames.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let is_full = match self.pager.evictor().evict(&sorted, &*self.judge) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull => true,
            result => result.map(|_| false).map_err(failed(self.kind.clone()))?,
        };
        let outcome = |(before, &gfn): (Option<Home>, &Gfn)| match (before, home(&self.pager, gfn))
        {
            (_, Some(Home::Memory)) if is_full => Outcome::NoRoom,
            (_, Some(Home::Memory)) => Outcome::InUse,
            (None, _) => Outcome::Nothing,
            (Some(Home::Memory), _) => Outcome::Moved,
            (Some(_), _) => Outcome::There,
        };
        Ok(before.into_iter().zip(frames).map(outcome).collect())
    }
}

fn failed(tier: TierKind) -> impl FnOnce(io::Error) -> TierError {
    move |error| TierError::Failed { tier, error }
}
