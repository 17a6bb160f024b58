//! HyperAlloc: the guest's page-frame allocator, shared by the host.
//!
//! Wrenger et al., EuroSys'25. A guest whose kernel allocates by LLFree
//! (`docs/llfree.md`) announces where the allocator's state is; the host takes huge
//! frames there by compare-and-swap, and gives them back so. What a huge frame is to the
//! host is R ([`State`]), which no guest can write, and nothing is decided on the guest's
//! copy of it (E).
//!
//! ```text
//!             hard reclaim                hard reclaim
//!   I  ---------------------->  H  <----------------------  S
//!   |                           |         return            ^
//!   |                           +-------------------------->|
//!   |        soft reclaim                                   |
//!   +------------------------------------------------------>|
//!   ^                       install                         |
//!   +-------------------------------------------------------+
//! ```
//!
//! Each huge frame is locked by its words in the ledger and by nothing else. A soft
//! reclaim takes the frame as a hard one does, empties it, and returns it
//! (`docs/decisions/0018-*`).

mod attach;
mod install;
mod purge;
mod reclaim;
mod returns;
mod states;
mod usage;
mod zone;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use ebb_pager::Latency;
use ebb_units::{Gpa, HUGE_BYTES, HugeFrame};
use ebb_vm::Ram;

pub use attach::AttachError;
pub use reclaim::{How, Stop, Taken};
pub use states::State;
pub use usage::{KindUsage, Usage};
pub use zone::BadZone;

use zone::Zone;

/// Whether the header of a zone in the guest's memory is one that can be worked on; `false`:
/// the zone is too small. Its frame must be in memory.
///
/// # Errors
/// [`BadZone`].
pub fn check_header(ram: &Ram, at: Gpa) -> Result<bool, BadZone> {
    Zone::open(ram, at).map(|zone| zone.is_some())
}

/// The shared allocator of one guest. Its operations may run at once, on any threads;
/// the pager is the one that it was attached to.
pub struct HyperAlloc {
    ram: Arc<Ram>,
    /// In the order in which they are reclaimed: Normal, then DMA32.
    zones: Vec<Zone>,
    installs: AtomicU64,
    violations: AtomicU64,
    install: Latency,
    on_violation: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Bytes in each state, and what the guest's touches came to.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// All of the zones, holes included.
    pub span_bytes: u64,
    /// The guest may have it back at a touch.
    pub soft_bytes: u64,
    /// The guest may not have it.
    pub hard_bytes: u64,
    /// Huge frames that came back because they were touched.
    pub installs: u64,
    /// Touches of what the guest may not have.
    pub violations: u64,
}

impl HyperAlloc {
    /// What there is now.
    pub fn counts(&self) -> Counts {
        let states = self.zones.iter().map(|zone| zone.states.count());
        let (soft, hard) = states.fold((0, 0), |all, zone| (all.0 + zone.0, all.1 + zone.1));
        Counts {
            span_bytes: self.zones.iter().map(|zone| zone.span().bytes()).sum(),
            soft_bytes: soft * HUGE_BYTES,
            hard_bytes: hard * HUGE_BYTES,
            installs: self.installs.load(Relaxed),
            violations: self.violations.load(Relaxed),
        }
    }

    /// How long installs took, from when the huge frame was held.
    pub fn install_times(&self) -> &Latency {
        &self.install
    }

    /// What a scan of all zones reads: two bytes of the guest's for each huge frame, and R.
    pub fn scanned_bytes(&self) -> u64 {
        let each = self.zones.iter().map(|zone| zone.areas() as u64 * 2 + zone.states.bytes());
        each.sum()
    }

    /// R of a huge frame; one that is in no zone is installed.
    pub fn state(&self, huge: HugeFrame) -> State {
        self.find(huge).map_or(State::Installed, |(zone, index)| zone.states.get(index))
    }

    /// Whether the guest's state is still where it was: not so after a reset.
    pub fn is_there(&self) -> bool {
        self.zones.iter().all(|zone| zone.is_there(&self.ram))
    }

    /// Who is told, from threads that serve faults, of touches of what the guest may not
    /// have; once.
    pub fn on_violation(&self, tell: impl Fn() + Send + Sync + 'static) {
        // A second one would only be told of the same.
        let _ = self.on_violation.set(Box::new(tell));
    }

    fn find(&self, huge: HugeFrame) -> Option<(&Zone, usize)> {
        self.zones.iter().find_map(|zone| Some((zone, zone.index(huge)?)))
    }
}
