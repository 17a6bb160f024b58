//! The threads that refill a VM's frames.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use ebb_units::FrameRange;

use crate::fault::hand::Hand;
use crate::fault::server::jobs::{THREADS_MOST, Work};
use crate::pager::Pager;

/// The threads that refill one VM's frames.
pub struct RefillThreads {
    pager: Arc<Pager>,
    threads: Vec<JoinHandle<()>>,
}

impl RefillThreads {
    /// Begins to refill on `count` threads, 64 at most.
    ///
    /// # Errors
    /// As pthread_create(3).
    pub fn start(pager: &Arc<Pager>, count: usize) -> io::Result<RefillThreads> {
        let mut started = RefillThreads { pager: Arc::clone(pager), threads: Vec::new() };
        pager.faults().jobs().open();
        for _ in 0..count.min(THREADS_MOST) {
            let pager = Arc::clone(pager);
            let run = move || {
                pager.catch(|| run(&pager));
            };
            started.threads.push(std::thread::Builder::new().name("refill".into()).spawn(run)?);
        }
        Ok(started)
    }
}

impl Drop for RefillThreads {
    /// Ends the threads after all waiting faults are served. The fault thread must have ended
    /// before.
    fn drop(&mut self) {
        self.pager.faults().jobs().close();
        for thread in self.threads.drain(..) {
            // A panic of that thread was caught.
            let _ = thread.join();
        }
        // Serves what threads left that could not be started, or that ended early.
        self.pager.catch(|| run(&self.pager));
    }
}

fn run(pager: &Pager) {
    let (mut hand, mut keeps) = (Hand::with_pages(), false);
    while let Some(work) = pager.faults().jobs().next(keeps) {
        let job = match work {
            Work::Serve(job) => job,
            Work::Wake(gfn) => {
                pager.frames().after(true, FrameRange::new(gfn, 1));
                continue;
            }
            Work::Idle => {
                hand.free_idle();
                keeps = false;
                continue;
            }
        };
        keeps = true;
        if pager.room().may_halt() {
            // Nobody makes room: evicted content comes back at once, the rest once there is room.
            if pager.room().leave_waiting(job.fault) {
                continue;
            }
        } else {
            pager.room().wait_for_room();
        }
        let kind = pager.faults().serve_on(job.fault, &mut hand);
        pager.counters().note_time(kind, job.began.elapsed());
    }
}
