//! The threads that serve a VM's faults.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_pager::{FaultThread, Pager, RefillThreads};

use super::mailbox::{Command, Mailbox};

/// Refill threads of a VM. Refills that wait for a disk run in parallel: an SSD serves this many
/// reads in little more time than one. Threads that are not needed sleep, and their buffers take no
/// memory.
const REFILL_THREADS: usize = 16;

/// The threads that serve a VM's faults. The fields are in the order in which the threads end.
pub struct FaultService {
    _faults: FaultThread,
    /// `None` before the first frame is evicted: most VMs never have an evicted frame.
    refills: Option<RefillThreads>,
}

impl FaultService {
    /// Begins to serve. Tells the worker when the VMM ends or its faults cannot be read.
    ///
    /// # Errors
    /// Threads cannot be made.
    pub fn start(pager: &Arc<Pager>, vmm: OwnedFd, mailbox: &Mailbox) -> io::Result<FaultService> {
        let counters = &pager.counters();
        // Frames that an earlier process evicted.
        let evicted = counters.saved_frames.load(Relaxed) + counters.on_disk_frames.load(Relaxed);
        let refills = (evicted > 0).then(|| refill_threads(pager)).transpose()?;
        let mailbox = mailbox.clone();
        let ended = move |why| mailbox.put(Command::FaultsEnded(why));
        let faults = FaultThread::start(Arc::clone(pager), vmm, ended)?;
        Ok(FaultService { _faults: faults, refills })
    }

    /// Starts the refill threads before frames are evicted: from now on content comes back beside
    /// the fault thread. The fault thread itself finishes the fault that it serves just now.
    ///
    /// # Errors
    /// Threads cannot be made.
    pub fn expect_refills(&mut self, pager: &Arc<Pager>) -> io::Result<()> {
        if self.refills.is_none() {
            self.refills = Some(refill_threads(pager)?);
        }
        Ok(())
    }
}

fn refill_threads(pager: &Arc<Pager>) -> io::Result<RefillThreads> {
    RefillThreads::start(pager, REFILL_THREADS)
}
