//! Faults that may have to wait, and the refill threads that wait for them, so that the fault
//! thread never does.
//!
//! A refill thread with nothing to do sleeps at once: a thread that yields for a while first counts
//! as running, and waits behind the guest's processors when it is woken. The thread that went to
//! sleep last is woken first, so no more threads are used than there are faults that wait. A thread
//! that was not woken for a while gives its buffer's memory back, once, and from then on is woken
//! only after those with a buffer.
//!
//! A fault that failed waits without a thread: a refill thread wakes it when its time has come, and
//! the guest touches the frame again.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use ebb_sys::uffd::Fault;
use ebb_units::Gfn;

/// Most faults in the queue; beyond that the fault thread serves them itself.
const JOBS: usize = 1024;
/// Most refill threads of one VM.
pub(crate) const THREADS_MOST: usize = 64;
/// Pause after which a touch of a frame that cannot be brought back is woken to ask again.
pub(super) const PAUSE: Duration = Duration::from_millis(100);
/// Time without a fault after which a thread gives its buffer's memory back.
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// A fault, and when it was read.
pub(crate) struct Job {
    pub(crate) fault: Fault,
    pub(crate) began: Instant,
}

/// What a refill thread does next.
pub(crate) enum Work {
    Serve(Job),
    /// Wake this frame, whose fault has failed and has waited its pause.
    Wake(Gfn),
    /// Give the buffer's memory back: no fault came for [`IDLE_AFTER`].
    Idle,
}

/// Faults for the refill threads.
pub(crate) struct Jobs {
    queue: Mutex<Queue>,
    /// [`PAUSE`]. Tests have longer times, as a busy host may give a thread no processor for long.
    pause: Duration,
    /// [`IDLE_AFTER`].
    idle_after: Duration,
}

struct Queue {
    /// Faults to serve, at most [`JOBS`]. Allocated in full at the start.
    jobs: VecDeque<Job>,
    /// Frames whose faults failed, and when to wake them, in this order; at most [`JOBS`].
    failed: VecDeque<(Instant, Gfn)>,
    /// Threads that sleep, or are about to; the last is woken next. Allocated in full at the start.
    asleep: Vec<Thread>,
    /// Whether there are refill threads.
    is_open: bool,
}

impl Jobs {
    pub(crate) fn new() -> Jobs {
        let (jobs, failed) = (VecDeque::with_capacity(JOBS), VecDeque::with_capacity(JOBS));
        let asleep = Vec::with_capacity(THREADS_MOST);
        let queue = Mutex::new(Queue { jobs, failed, asleep, is_open: false });
        Jobs { queue, pause: PAUSE, idle_after: IDLE_AFTER }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn give(&self, job: Job) -> bool {
        let mut queue = self.queue();
        let takes = queue.is_open && queue.jobs.len() < JOBS;
        if takes {
            queue.jobs.push_back(job);
            wake_one(queue);
        }
        takes
    }

    /// Has a frame woken after a pause; `false`: too many wait already.
    pub(super) fn wake_later(&self, gfn: Gfn) -> bool {
        let mut queue = self.queue();
        let takes = queue.is_open && queue.failed.len() < JOBS;
        if takes {
            queue.failed.push_back((Instant::now() + self.pause, gfn));
            // A sleeping thread must now wait for this time, and not for ever.
            wake_one(queue);
        }
        takes
    }

    /// Returns the next work; `None` once the queue is closed and nothing is left. A thread that
    /// `keeps` a buffer is told when to give its memory back.
    pub(crate) fn next(&self, keeps: bool) -> Option<Work> {
        let idle_at = keeps.then(|| Instant::now() + self.idle_after);
        let mut queue = self.queue();
        loop {
            let left =
                queue.failed.front().map(|(at, _)| at.saturating_duration_since(Instant::now()));
            // In a closed queue no thread waits for the time.
            if left.is_some_and(|left| left.is_zero() || !queue.is_open) {
                return queue.failed.pop_front().map(|(_, gfn)| Work::Wake(gfn));
            }
            if let Some(job) = queue.jobs.pop_front() {
                if left.is_some() {
                    // Another thread has to wait for the time of the failed ones.
                    wake_one(queue);
                }
                return Some(Work::Serve(job));
            }
            if !queue.is_open {
                return None;
            }
            let until_idle = idle_at.map(|at| at.saturating_duration_since(Instant::now()));
            if until_idle == Some(Duration::ZERO) {
                return Some(Work::Idle);
            }
            queue = self.sleep(queue, keeps, left.into_iter().chain(until_idle).min());
        }
    }

    /// Sleeps until it is woken, or for `most`. It may be woken for nothing. A thread without a
    /// buffer goes to the bottom of the stack: otherwise it would be woken next, and another thread
    /// would give its buffer back instead.
    fn sleep<'q>(
        &'q self,
        mut queue: MutexGuard<'q, Queue>,
        keeps: bool,
        most: Option<Duration>,
    ) -> MutexGuard<'q, Queue> {
        let me = thread::current();
        let id = me.id();
        let place = if keeps { queue.asleep.len() } else { 0 };
        queue.asleep.insert(place, me);
        drop(queue);
        match most {
            Some(most) => thread::park_timeout(most),
            None => thread::park(),
        }
        let mut queue = self.queue();
        queue.asleep.retain(|thread| thread.id() != id);
        queue
    }

    /// Opens the queue: there are refill threads from now on.
    pub(crate) fn open(&self) {
        self.queue().is_open = true;
    }

    /// Closes the queue: the threads end once nothing is left.
    pub(crate) fn close(&self) {
        let mut queue = self.queue();
        queue.is_open = false;
        queue.asleep.drain(..).for_each(|thread| thread.unpark());
    }
}

/// Wakes the thread with a buffer that went to sleep last, or one without a buffer, if there is
/// one.
fn wake_one(mut queue: MutexGuard<'_, Queue>) {
    let thread = queue.asleep.pop();
    drop(queue);
    if let Some(thread) = thread {
        thread.unpark();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::Scope;

    use ebb_units::Hva;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    /// Closes the queue, so that threads end even if the test fails.
    struct Closing<'j>(&'j Jobs);

    impl Drop for Closing<'_> {
        fn drop(&mut self) {
            self.0.close();
        }
    }

    /// An open queue. Its threads keep their buffers for as long as a test takes.
    fn open() -> Jobs {
        let jobs = Jobs { pause: 20 * PAUSE, idle_after: LONG, ..Jobs::new() };
        jobs.open();
        jobs
    }

    fn job() -> Job {
        let fault = Fault { address: Hva(0), write: false, write_protected: false };
        Job { fault, began: Instant::now() }
    }

    /// Starts a thread that reports its number, and whether its work was a job. It has a buffer,
    /// and never gives it back.
    fn thread<'s>(
        scope: &'s Scope<'s, '_>,
        jobs: &'s Jobs,
        number: usize,
        sender: &Sender<(usize, bool)>,
    ) {
        let sender = sender.clone();
        scope.spawn(move || {
            while let Some(work) = busy(jobs) {
                let _ = sender.send((number, matches!(work, Work::Serve(_))));
            }
        });
        asleep(jobs, number);
    }

    /// Returns the next work of a thread with a buffer, however long it takes.
    fn busy(jobs: &Jobs) -> Option<Work> {
        loop {
            match jobs.next(true) {
                Some(Work::Idle) => {}
                work => return work,
            }
        }
    }

    fn asleep(jobs: &Jobs, count: usize) {
        let began = Instant::now();
        while jobs.queue().asleep.len() != count {
            assert!(began.elapsed() < LONG, "{} sleep", jobs.queue().asleep.len());
            thread::yield_now();
        }
    }

    fn next(receiver: &Receiver<(usize, bool)>) -> (usize, bool) {
        receiver.recv_timeout(LONG).unwrap()
    }

    #[test]
    fn who_went_to_sleep_last_works_first() {
        let (jobs, (sender, receiver)) = (open(), channel());
        thread::scope(|scope| {
            let _closing = Closing(&jobs);
            (1..=3).for_each(|number| thread(scope, &jobs, number, &sender));
            for _ in 0..3 {
                assert!(jobs.give(job()));
                assert_eq!(next(&receiver), (3, true));
                asleep(&jobs, 3);
            }
        });
    }

    #[test]
    fn who_has_no_buffer_works_last() {
        let (jobs, (sender, receiver)) = (open(), channel());
        thread::scope(|scope| {
            let _closing = Closing(&jobs);
            thread(scope, &jobs, 1, &sender);
            let sender = sender.clone();
            let jobs = &jobs;
            scope.spawn(move || {
                while let Some(work) = jobs.next(false) {
                    let _ = sender.send((2, matches!(work, Work::Serve(_))));
                }
            });
            for _ in 0..3 {
                asleep(jobs, 2);
                assert!(jobs.give(job()));
                assert_eq!(next(&receiver), (1, true));
            }
        });
    }

    #[test]
    fn a_thread_without_faults_rests_once_and_works_again() {
        let (jobs, (sender, receiver)) = (Jobs::new(), channel());
        jobs.open();
        thread::scope(|scope| {
            let _closing = Closing(&jobs);
            scope.spawn(|| {
                let mut keeps = true;
                while let Some(work) = jobs.next(keeps) {
                    keeps = matches!(work, Work::Serve(_));
                    let _ = sender.send(keeps);
                }
            });
            assert!(!receiver.recv_timeout(LONG).unwrap(), "it rests");
            assert!(receiver.recv_timeout(2 * IDLE_AFTER).is_err(), "and then sleeps");
            assert!(jobs.give(job()));
            assert!(receiver.recv_timeout(LONG).unwrap(), "it serves");
            assert!(!receiver.recv_timeout(LONG).unwrap(), "it rests");
        });
    }

    /// Holds even if the thread that waited for the time has other work by then.
    #[test]
    fn a_failed_fault_is_woken_in_time() {
        let (jobs, (sender, receiver)) = (open(), channel());
        thread::scope(|scope| {
            let _closing = Closing(&jobs);
            thread(scope, &jobs, 1, &sender);
            let (begun, begin) = channel();
            let (end, ended) = channel::<()>();
            let jobs = &jobs;
            scope.spawn(move || {
                let work = busy(jobs);
                let _ = begun.send(matches!(work, Some(Work::Serve(_))));
                // It serves that for as long as this test runs.
                let _ = ended.recv();
            });
            asleep(jobs, 2);
            assert!(jobs.wake_later(Gfn(7)));
            asleep(jobs, 2);
            assert!(jobs.give(job()));
            assert!(begin.recv_timeout(LONG).unwrap());
            assert_eq!(next(&receiver), (1, false));
            drop(end);
        });
    }
}
