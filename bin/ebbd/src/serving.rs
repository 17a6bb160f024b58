//! The threads that serve a VM's faults.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;

use ebb_pager::{FaultThread, RefillThreads};

use crate::held::Held;
use crate::worker::Command;

/// Refills that wait for a disk go on beside each other: an SSD serves so many reads in little more time
/// than one. Threads that are not needed sleep, and their buffers take no memory.
const REFILL_THREADS: usize = 16;

/// In the order in which they end.
pub struct Serving {
    _faults: FaultThread,
    /// None before the first frame is evicted: most VMs never have one that is.
    refills: Option<RefillThreads>,
}

impl Serving {
    /// Begins to serve. When the VMM ends, or its faults cannot be read, `gone` is told.
    ///
    /// # Errors
    /// When threads cannot be made.
    pub fn start(held: &Held, gone: &Sender<Command>) -> io::Result<Serving> {
        let gone = gone.clone();
        let counters = &held.pager.counters;
        // By a daemon before this one.
        let evicted = counters.saved_frames.load(Relaxed) + counters.on_disk_frames.load(Relaxed);
        let refills = (evicted > 0).then(|| refill_threads(held)).transpose()?;
        let faults = FaultThread::start(held.pager.clone(), held.pidfd()?, move |why| {
            // A worker that is gone already needs no telling.
            let _ = gone.send(Command::Gone(why));
        })?;
        Ok(Serving { _faults: faults, refills })
    }

    /// Before frames are evicted: from now on what they hold comes back beside the
    /// fault thread. A fault that is served just now is served by that thread.
    ///
    /// # Errors
    /// When threads cannot be made.
    pub fn expect_refills(&mut self, held: &Held) -> io::Result<()> {
        if self.refills.is_none() {
            self.refills = Some(refill_threads(held)?);
        }
        Ok(())
    }
}

fn refill_threads(held: &Held) -> io::Result<RefillThreads> {
    RefillThreads::start(&held.pager, REFILL_THREADS)
}
