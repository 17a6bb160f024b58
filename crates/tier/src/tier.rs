//! What a tier looks like to those who move pages.

use std::collections::BTreeMap;
use std::io;

use ebb_units::Gfn;

use crate::ladder::TierKind;

/// A kind of memory, for the pages of one VM.
pub trait Tier: Send + Sync {
    /// Its kind.
    fn kind(&self) -> TierKind;

    /// Brings these frames here, wherever they are. Returns what happened to each, in the same
    /// order. Frames may be touched meanwhile, and keep their content.
    ///
    /// # Errors
    /// Why no frame can be brought here now. Some may have been brought.
    fn bring(&self, frames: &[Gfn]) -> Result<Vec<Outcome>, TierError>;
}

/// What happened to a frame.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Outcome {
    /// It was brought here.
    Moved,
    /// It was already here.
    There,
    /// It holds no page.
    Nothing,
    /// It was in use at every attempt: it waits for the next plan.
    InUse,
    /// The tier is full.
    NoRoom,
    /// The kernel refused for another reason, given by its error number.
    Refused(i32),
}

impl Outcome {
    /// Whether the frame is in the tier now.
    pub fn is_here(self) -> bool {
        matches!(self, Outcome::Moved | Outcome::There)
    }

    /// Whether the frame stayed in another tier.
    pub fn stays(self) -> bool {
        matches!(self, Outcome::InUse | Outcome::NoRoom | Outcome::Refused(_))
    }
}

/// How many frames had each outcome.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tally(BTreeMap<Outcome, u64>);

impl Tally {
    /// The number of frames with this outcome.
    pub fn of(&self, outcome: Outcome) -> u64 {
        self.0.get(&outcome).copied().unwrap_or(0)
    }

    /// Each outcome that occurred, with its number of frames.
    pub fn each(&self) -> impl Iterator<Item = (Outcome, u64)> {
        self.0.iter().map(|(outcome, count)| (*outcome, *count))
    }
}

impl Extend<Outcome> for Tally {
    fn extend<I: IntoIterator<Item = Outcome>>(&mut self, outcomes: I) {
        outcomes.into_iter().for_each(|outcome| *self.0.entry(outcome).or_default() += 1);
    }
}

impl FromIterator<Outcome> for Tally {
    fn from_iter<I: IntoIterator<Item = Outcome>>(outcomes: I) -> Tally {
        let mut tally = Tally::default();
        tally.extend(outcomes);
        tally
    }
}

/// Why a tier takes no pages.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// The VM's process has ended.
    #[error("the VM has ended")]
    VmEnded,
    /// Moving pages of another process needs `CAP_SYS_NICE`.
    #[error("moving the VM's pages is not allowed ({0}): run as root")]
    NotAllowed(#[source] io::Error),
    /// There is no such node, or this process may not use it.
    #[error(
        "node {node} has no memory that may be used here ({error}): see /sys/devices/system/node"
    )]
    NoNode {
        /// The number of the node.
        node: u32,
        /// The kernel's error.
        #[source]
        error: io::Error,
    },
    /// The kernel does not say where the VM's pages are.
    #[error("asking where the VM's pages are: {0}")]
    Asking(#[source] io::Error),
    /// The tier's store or the kernel failed.
    #[error("{tier}: {error}")]
    Failed {
        /// The tier that failed.
        tier: TierKind,
        /// The error.
        #[source]
        error: io::Error,
    },
}
