//! What a tier is to whoever moves pages.

use std::collections::BTreeMap;
use std::io;

use ebb_units::Gfn;

use crate::ladder::Kind;

/// A kind of memory, for the pages of one VM.
pub trait Tier: Send + Sync {
    /// What it is.
    fn kind(&self) -> Kind;

    /// Brings these frames here, wherever they are; what became of each, in the same order.
    /// Frames may be touched meanwhile, and hold what they held.
    ///
    /// # Errors
    /// Why none can be brought here now; some may have been.
    fn bring(&self, frames: &[Gfn]) -> Result<Vec<Outcome>, TierError>;
}

/// What became of a frame.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Outcome {
    /// It was brought here.
    Moved,
    /// It was here.
    There,
    /// It holds no page.
    Nothing,
    /// It was in use, however often it was asked for: it waits for the next plan.
    InUse,
    /// The tier is full.
    NoRoom,
    /// The kernel has another reason, by its error number.
    Refused(i32),
}

impl Outcome {
    /// Whether the frame is in the tier now.
    pub fn is_here(self) -> bool {
        matches!(self, Outcome::Moved | Outcome::There)
    }

    /// Whether the frame is where it was, elsewhere.
    pub fn stays(self) -> bool {
        matches!(self, Outcome::InUse | Outcome::NoRoom | Outcome::Refused(_))
    }
}

/// How many frames had each outcome.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Tally(BTreeMap<Outcome, u64>);

impl Tally {
    /// How many had this one.
    pub fn of(&self, outcome: Outcome) -> u64 {
        self.0.get(&outcome).copied().unwrap_or(0)
    }

    /// Each outcome that was there.
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

/// Why a tier takes no page.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// Its process has ended.
    #[error("the VM has ended")]
    Gone,
    /// Moving another process's pages takes `CAP_SYS_NICE`.
    #[error("moving the VM's pages is not allowed ({0}): run as root")]
    NotAllowed(#[source] io::Error),
    /// There is no such node, or this process may not use it.
    #[error(
        "node {node} has no memory that may be used here ({error}): see /sys/devices/system/node"
    )]
    NoNode {
        /// Its number.
        node: u32,
        /// What the kernel said.
        #[source]
        error: io::Error,
    },
    /// The kernel does not say where its pages are.
    #[error("asking where the VM's pages are: {0}")]
    Asking(#[source] io::Error),
    /// Its store or the kernel failed.
    #[error("{tier}: {error}")]
    Failed {
        /// Which tier.
        tier: Kind,
        /// What was said.
        #[source]
        error: io::Error,
    },
}
