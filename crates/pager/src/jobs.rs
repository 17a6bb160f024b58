//! Faults that may have to wait, and the threads that wait for them, so that who reads the
//! faults never does.
//!
//! Threads sleep at once where there is nothing to do: one that yields for a while first counts
//! as one that runs, and waits behind the guest's processors when it is woken.
//!
//! A fault that failed waits without a thread: one of them wakes it when its time has come, and the
//! guest touches the frame again.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_sys::uffd::Fault;
use ebb_units::{FrameRange, Gfn};

use crate::hand::Hand;
use crate::pager::Pager;

/// Beyond that the fault thread serves them itself.
const JOBS: usize = 1024;
/// Who touched a frame that cannot be brought back rests so long before it asks again.
const PAUSE: Duration = Duration::from_millis(100);

/// A fault that was read.
struct Job {
    fault: Fault,
    began: Instant,
}

/// What a refill thread is to do next.
enum Work {
    Serve(Job),
    /// Its fault has failed and rested.
    Wake(Gfn),
}

/// Faults for the refill threads.
pub(crate) struct Jobs {
    queue: Mutex<Queue>,
    changed: Condvar,
}

struct Queue {
    /// It has room for all from the beginning.
    jobs: VecDeque<Job>,
    /// Frames whose faults failed, and when to wake them; in this order, and at most as many.
    failed: VecDeque<(Instant, Gfn)>,
    /// There are threads.
    is_open: bool,
}

impl Jobs {
    pub(crate) fn new() -> Jobs {
        let (jobs, failed) = (VecDeque::with_capacity(JOBS), VecDeque::with_capacity(JOBS));
        let queue = Queue { jobs, failed, is_open: false };
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

    /// Has a frame woken after a pause; `false`: too many rest already.
    fn wake_later(&self, gfn: Gfn) -> bool {
        let mut queue = self.queue();
        let takes = queue.is_open && queue.failed.len() < JOBS;
        if takes {
            queue.failed.push_back((Instant::now() + PAUSE, gfn));
            drop(queue);
            // It has to wait until then, and not for ever.
            self.changed.notify_one();
        }
        takes
    }

    /// The next; none once there are to be no threads, and nothing is left.
    fn next(&self) -> Option<Work> {
        let mut queue = self.queue();
        loop {
            let left =
                queue.failed.front().map(|(at, _)| at.saturating_duration_since(Instant::now()));
            // Without threads there is nobody to wait.
            if left.is_some_and(|left| left.is_zero() || !queue.is_open) {
                return queue.failed.pop_front().map(|(_, gfn)| Work::Wake(gfn));
            }
            if let Some(job) = queue.jobs.pop_front() {
                return Some(Work::Serve(job));
            }
            if !queue.is_open {
                return None;
            }
            queue = match left {
                Some(left) => {
                    let waited = self.changed.wait_timeout(queue, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
            };
        }
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
    while let Some(work) = pager.jobs.next() {
        let job = match work {
            Work::Serve(job) => job,
            Work::Wake(gfn) => {
                pager.after(true, FrameRange::new(gfn, 1));
                continue;
            }
        };
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

    /// Has whoever touches a frame that cannot be brought back wait, and ask again. `false`: it is
    /// to be woken now, after this thread has waited.
    pub(crate) fn ask_again_later(&self, gfn: Gfn) -> bool {
        let later = self.jobs.wake_later(gfn);
        if !later {
            std::thread::sleep(PAUSE);
        }
        later
    }
}
