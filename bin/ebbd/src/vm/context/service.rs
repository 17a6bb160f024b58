//! The threads that serve a VM's faults.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_pager::{FaultThread, Pager, RefillThreads};

use super::mailbox::{Command, Mailbox};

/// Refills that wait for a disk go on beside each other: an SSD serves so many reads in little more time
/// than one. Threads that are not needed sleep, and their buffers take no memory.
const REFILL_THREADS: usize = 16;

/// In the order in which they end.
pub struct FaultService {
    _faults: FaultThread,
    /// None before the first frame is evicted: most VMs never have one that is.
    refills: Option<RefillThreads>,
}

impl FaultService {
    /// Begins to serve. When the VMM ends, or its faults cannot be read, the worker is told.
    ///
    /// # Errors
    /// When threads cannot be made.
    pub fn start(pager: &Arc<Pager>, vmm: OwnedFd, mailbox: &Mailbox) -> io::Result<FaultService> {
        let counters = &pager.counters();
        // By a process before this one.
        let evicted = counters.saved_frames.load(Relaxed) + counters.on_disk_frames.load(Relaxed);
        let refills = (evicted > 0).then(|| refill_threads(pager)).transpose()?;
        let mailbox = mailbox.clone();
        let gone = move |why| mailbox.put(Command::Gone(why));
        let faults = FaultThread::start(Arc::clone(pager), vmm, gone)?;
        Ok(FaultService { _faults: faults, refills })
    }

    /// Before frames are evicted: from now on what they hold comes back beside the
    /// fault thread. A fault that is served just now is served by that thread.
    ///
    /// # Errors
    /// When threads cannot be made.
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
