//! Guest memory that a front end shares, and may take away.
//!
//! A memfd that can be sealed is (`vet`). Others, as files on tmpfs and hugetlbfs are, a front
//! end can shrink while the device is about to touch what goes: over these mappings stands a
//! guard, and a device whose memory is broken tells its driver nothing more.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_sys::bus_guard::{BusGuard, broken_count};
use ebb_sys::guest_mapping;
use ebb_units::Hva;
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

/// The guards go before the memory that they are for.
struct Guarded {
    guards: Vec<BusGuard>,
    memory: Arc<GuestMemoryMmap>,
}

/// All memory of one front end that may still be in use.
pub struct Kept {
    all: Mutex<Vec<Guarded>>,
    /// As many mappings of this process were broken when it was looked last.
    seen: AtomicU64,
    broken: OwnedFd,
}

impl Kept {
    /// None yet.
    ///
    /// # Errors
    /// No descriptor is to be had.
    pub fn new() -> io::Result<Kept> {
        let broken = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Kept { all: Mutex::default(), seen: AtomicU64::new(broken_count()), broken })
    }

    /// Guards `memory` from now on until nobody else has it, and has it get small pages only: a huge
    /// one would bring zeros beside the page that the device touches. To be called before it is touched.
    ///
    /// # Errors
    /// It is larger than can be guarded.
    pub fn keep(&self, memory: Arc<GuestMemoryMmap>) -> io::Result<()> {
        let mut all = self.all();
        all.retain(|guarded| Arc::strong_count(&guarded.memory) > 1);
        let guard =
            |region: &GuestRegionMmap| BusGuard::new(Hva(region.as_ptr() as u64), region.len());
        let guards = memory.iter().map(guard).collect::<io::Result<_>>()?;
        memory.iter().for_each(use_small_pages);
        all.push(Guarded { guards, memory });
        Ok(())
    }

    /// Whether some of it has lost its content. Then [`Kept::broken`] is readable, too.
    pub fn is_broken(&self) -> bool {
        let count = broken_count();
        if self.seen.load(SeqCst) == count {
            return false;
        }
        if self.all().iter().any(|guarded| guarded.guards.iter().any(BusGuard::is_broken)) {
            // A counter that is full is readable as well.
            let _ = rustix::io::write(&self.broken, &1u64.to_ne_bytes());
            return true;
        }
        self.seen.store(count, SeqCst);
        false
    }

    /// Readable once somebody has found it broken.
    pub fn broken(&self) -> BorrowedFd<'_> {
        self.broken.as_fd()
    }

    /// A list is whole also when its holder panics.
    fn all(&self) -> MutexGuard<'_, Vec<Guarded>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
/// As far as the kernel has others.
pub fn use_small_pages(region: &GuestRegionMmap) {
    if let Err(error) = guest_mapping::use_small_pages(region) {
        tracing::debug!("small pages for a device's view: {error}");
    }
}
