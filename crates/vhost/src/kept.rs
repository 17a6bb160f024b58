//! Guest memory that a front end shares, and may take away.
//!
//! A memfd that can be sealed is sealed (`vet`). A front end can shrink other files, such as those
//! on tmpfs and hugetlbfs, just before the device touches them. Their mappings are guarded, and a
//! device whose memory is broken tells its driver nothing more.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_sys::bus_guard::{BusGuard, broken_count};
use ebb_sys::guest_mapping;
use ebb_units::Hva;
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

/// Guarded memory. The guards are dropped before the memory.
struct Guarded {
    guards: Vec<BusGuard>,
    memory: Arc<GuestMemoryMmap>,
}

/// All memory of one front end that may still be in use.
pub struct Kept {
    all: Mutex<Vec<Guarded>>,
    /// How many mappings of this process were broken at the last check.
    seen: AtomicU64,
    broken: OwnedFd,
}

impl Kept {
    /// Makes an empty list of memory.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Kept> {
        let broken = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Kept { all: Mutex::default(), seen: AtomicU64::new(broken_count()), broken })
    }

    /// Guards `memory` until nobody else has it, and makes it use small pages only: a huge page
    /// would bring zeros beside the page that the device touches. Call it before the memory is
    /// touched.
    ///
    /// # Errors
    /// The memory is larger than can be guarded.
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

    /// Whether some of it has lost its content. If so, [`Kept::broken`] is readable.
    pub fn is_broken(&self) -> bool {
        let count = broken_count();
        if self.seen.load(SeqCst) == count {
            return false;
        }
        if self.all().iter().any(|guarded| guarded.guards.iter().any(BusGuard::is_broken)) {
            // An eventfd whose counter is full is readable as well.
            let _ = rustix::io::write(&self.broken, &1u64.to_ne_bytes());
            return true;
        }
        self.seen.store(count, SeqCst);
        false
    }

    /// Returns a descriptor that is readable once [`Kept::is_broken`] has found broken memory.
    pub fn broken(&self) -> BorrowedFd<'_> {
        self.broken.as_fd()
    }

    /// Locks the list. It is consistent even if a holder has panicked.
    fn all(&self) -> MutexGuard<'_, Vec<Guarded>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
/// Makes a region use small pages only from now on, if the kernel has huge ones.
pub fn use_small_pages(region: &GuestRegionMmap) {
    if let Err(error) = guest_mapping::use_small_pages(region) {
        tracing::debug!("small pages for a device's view: {error}");
    }
}
