//! HyperAlloc: the guest's page-frame allocator, shared by the host.
//!
//! Wrenger et al., EuroSys'25. A guest whose kernel allocates by LLFree (`docs/llfree.md`)
//! announces where the allocator's state is. The host reclaims huge frames there by
//! compare-and-swap, and returns them in the same way. R ([`State`]) says what a huge frame is to
//! the host. No guest can write it, and nothing is decided on the guest's copy of it (E).
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
//! The ledger words of a huge frame are its only lock. A soft reclaim takes the frame as a hard one
//! does, empties it, and returns it (`docs/decisions/0018-*`).

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
use ebb_units::{HUGE_BYTES, HugeFrame};
use ebb_vm::Ram;

pub use attach::AttachError;
pub use reclaim::{How, HyperAllocStop, ReclaimedHuge};
pub use states::State;
pub use usage::{AllocatorUsage, KindUsage};
pub use zone::BadZone;

use zone::Zone;

/// For fuzzing. Whether a zone with its header at this place in the guest's memory can be worked
/// on; `false`: the zone is too small. The header's frame must be resident.
///
/// # Errors
/// [`BadZone`].
#[cfg(feature = "testing")]
pub fn check_header(ram: &Ram, at: ebb_units::Gpa) -> Result<bool, BadZone> {
    Zone::open(ram, at).map(|zone| zone.is_some())
}

/// The shared allocator of one guest. Its operations may run concurrently, on any threads. The
/// pager passed to them must be the one that it was attached to.
pub struct HyperAlloc {
    ram: Arc<Ram>,
    /// In the order in which they are reclaimed: Normal, then DMA32.
    zones: Vec<Zone>,
    installs: AtomicU64,
    violations: AtomicU64,
    install: Latency,
    on_violation: OnceLock<Box<dyn Fn() + Send + Sync>>,
    may_be_reset: OnceLock<Box<dyn Fn() -> bool + Send + Sync>>,
}

/// Bytes in each state, and what the guest's touches led to.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct HugeCounts {
    /// Bytes of all zones, holes included.
    pub span_bytes: u64,
    /// Bytes that the guest may have back at a touch.
    pub soft_bytes: u64,
    /// Bytes that the guest may not have.
    pub hard_bytes: u64,
    /// Huge frames installed because they were touched.
    pub installs: u64,
    /// Touches of memory that the guest may not have.
    pub violations: u64,
}

impl HyperAlloc {
    /// The current counts.
    pub fn counts(&self) -> HugeCounts {
        let states = self.zones.iter().map(|zone| zone.states.count());
        let (soft, hard) = states.fold((0, 0), |all, zone| (all.0 + zone.0, all.1 + zone.1));
        HugeCounts {
            span_bytes: self.zones.iter().map(|zone| zone.span().bytes()).sum(),
            soft_bytes: soft * HUGE_BYTES,
            hard_bytes: hard * HUGE_BYTES,
            installs: self.installs.load(Relaxed),
            violations: self.violations.load(Relaxed),
        }
    }

    /// How long installs took, from the locking of the huge frame on.
    pub fn install_times(&self) -> &Latency {
        &self.install
    }

    /// Bytes that a scan of all zones reads: two of the guest's for each huge frame, and R.
    pub fn scanned_bytes(&self) -> u64 {
        let each = self.zones.iter().map(|zone| zone.areas() as u64 * 2 + zone.states.bytes());
        each.sum()
    }

    /// R of a huge frame. One that is in no zone is installed.
    pub fn state(&self, huge: HugeFrame) -> State {
        self.find(huge).map_or(State::Installed, |(zone, index)| zone.states.get(index))
    }

    /// Whether the guest's state is still where it was. After a reset it is not.
    pub fn is_there(&self) -> bool {
        self.zones.iter().all(|zone| zone.is_there(&self.ram))
    }

    /// Sets what is called on touches of memory that the guest may not have, by threads that serve
    /// faults. Only the first call has an effect.
    pub fn on_violation(&self, tell: impl Fn() + Send + Sync + 'static) {
        // A second one would only be told of the same.
        let _ = self.on_violation.set(Box::new(tell));
    }

    /// Sets what tells whether the guest may have been reset since it was last known to run. While
    /// it may, no E is cleared. Asked by threads that serve faults. Only the first call has an
    /// effect.
    pub fn ask_of_reset(&self, may_be_reset: impl Fn() -> bool + Send + Sync + 'static) {
        // A second one would only tell the same.
        let _ = self.may_be_reset.set(Box::new(may_be_reset));
    }

    /// Clears E of an installed area, unless its words may be another kernel's. An area that keeps
    /// its E costs the guest a touch for each block that it gets there.
    fn clear_evicted(&self, zone: &Zone, index: usize) {
        if self.may_be_reset.get().is_some_and(|may_be_reset| may_be_reset()) {
            return;
        }
        if let Some(host) = zone.host_if_there(&self.ram) {
            host.install(index);
        }
    }

    fn find(&self, huge: HugeFrame) -> Option<(&Zone, usize)> {
        self.zones.iter().find_map(|zone| Some((zone, zone.index(huge)?)))
    }
}
