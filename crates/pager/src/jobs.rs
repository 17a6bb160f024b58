//! Faults that may have to wait, and the threads that wait for them, so that who reads the
//! faults never does.
//!
//! Threads sleep at once where there is nothing to do: one that yields for a while first counts
//! as one that runs, and waits behind the guest's processors when it is woken.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use ebb_sys::uffd::Fault;

use crate::hand::Hand;
use crate::pager::Pager;

/// Beyond that the fault thread serves them itself.
const JOBS: usize = 1024;

/// A fault that was read.
struct Job {
    fault: Fault,
    began: Instant,
}

/// Faults for the refill threads.
pub(crate) struct Jobs {
    queue: Mutex<Queue>,
    changed: Condvar,
}

struct Queue {
    /// It has room for all from the beginning.
    jobs: VecDeque<Job>,
    /// There are threads.
    is_open: bool,
}

impl Jobs {
    pub(crate) fn new() -> Jobs {
        let queue = Queue { jobs: VecDeque::with_capacity(JOBS), is_open: false };
        Jobs { queue: Mutex::new(queue), changed: Condvar::new() }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give(&self, job: Job) -> bool {
        let mut queue = self.queue();
        let takes = queue.is_open && queue.jobs.len() < JOBS;
        if takes {
            queue.jobs.push_back(job);
            drop(queue);
            self.changed.notify_one();
        }
        takes
    }

    /// The next; none once there are to be no threads, and nothing is left.
    fn next(&self) -> Option<Job> {
        let waits = |queue: &mut Queue| queue.is_open && queue.jobs.is_empty();
        let queue = self.changed.wait_while(self.queue(), waits);
        queue.unwrap_or_else(PoisonError::into_inner).jobs.pop_front()
    }
}

/// The threads that refill one VM's frames.
pub struct RefillThreads {
    pager: Arc<Pager>,
    threads: Vec<JoinHandle<()>>,
}

impl RefillThreads {
    /// Begins to refill, on so many threads.
    ///
    /// # Errors
    /// As pthread_create(3).
    pub fn start(pager: &Arc<Pager>, count: usize) -> io::Result<RefillThreads> {
        let mut started = RefillThreads { pager: Arc::clone(pager), threads: Vec::new() };
        pager.jobs.queue().is_open = true;
        for _ in 0..count {
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
    /// Ends the threads after what waits is served. The fault thread must have
    /// ended before.
    fn drop(&mut self) {
        self.pager.jobs.queue().is_open = false;
        self.pager.jobs.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of that thread was caught.
            let _ = thread.join();
        }
        // Of threads that could not be started, or that ended early.
        self.pager.catch(|| run(&self.pager));
    }
}

fn run(pager: &Pager) {
    let mut hand = Hand::with_pages();
    while let Some(job) = pager.jobs.next() {
        if pager.may_halt() {
            // Nobody makes room: what is elsewhere comes at once, the rest once there is some.
            if pager.leave_waiting(job.fault) {
                continue;
            }
        } else {
            pager.wait_for_room();
        }
        pager.serve_on(job.fault, &mut hand);
        pager.counters.fault.record(job.began.elapsed());
    }
}

impl Pager {
    /// Leaves the fault to the refill threads; `false`: there are none, or too
    /// much waits for them already.
    pub(crate) fn refill_later(&self, fault: Fault, began: Instant) -> bool {
        self.jobs.give(Job { fault, began })
    }
}
