//! Faults that may have to wait, and the threads that wait for them, so that who reads the
//! faults never does.
//!
//! Threads sleep at once where there is nothing to do: one that yields for a while first counts
//! as one that runs, and waits behind the guest's processors when it is woken. Who went to sleep last is
//! woken first: no more threads are used than there are faults that wait. A thread that was not
//! woken for a while gives its buffer's memory back, once, and is woken after those with one.
//!
//! A fault that failed waits without a thread: one of them wakes it when its time has come, and the
//! guest touches the frame again.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use ebb_sys::uffd::Fault;
use ebb_units::Gfn;

/// Beyond that the fault thread serves them itself.
const JOBS: usize = 1024;
/// Of one VM.
pub(crate) const THREADS_MOST: usize = 64;
/// Who touched a frame that cannot be brought back rests so long before it asks again.
pub(super) const PAUSE: Duration = Duration::from_millis(100);
/// A thread without a fault for so long does not need its buffer.
const REST: Duration = Duration::from_secs(1);

/// A fault that was read.
pub(crate) struct Job {
    pub(crate) fault: Fault,
    pub(crate) began: Instant,
}

/// What a refill thread is to do next.
pub(crate) enum Work {
    Serve(Job),
    /// Its fault has failed and rested.
    Wake(Gfn),
    /// Give memory back: no fault came for [`REST`].
    Rest,
}

/// Faults for the refill threads.
pub(crate) struct Jobs {
    queue: Mutex<Queue>,
}

struct Queue {
    /// It has room for all from the beginning.
    jobs: VecDeque<Job>,
    /// Frames whose faults failed, and when to wake them; in this order, and at most as many.
    failed: VecDeque<(Instant, Gfn)>,
    /// Threads that sleep, or are about to; the last is woken next. It has room for all from the
    /// beginning.
    asleep: Vec<Thread>,
    /// There are threads.
    is_open: bool,
}

impl Jobs {
    pub(crate) fn new() -> Jobs {
        let (jobs, failed) = (VecDeque::with_capacity(JOBS), VecDeque::with_capacity(JOBS));
        let asleep = Vec::with_capacity(THREADS_MOST);
        Jobs { queue: Mutex::new(Queue { jobs, failed, asleep, is_open: false }) }
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

    /// Has a frame woken after a pause; `false`: too many rest already.
    pub(super) fn wake_later(&self, gfn: Gfn) -> bool {
        let mut queue = self.queue();
        let takes = queue.is_open && queue.failed.len() < JOBS;
        if takes {
            queue.failed.push_back((Instant::now() + PAUSE, gfn));
            // It has to wait until then, and not for ever.
            wake_one(queue);
        }
        takes
    }

    /// The next; none once there are to be no threads, and nothing is left. A thread that `keeps`
    /// a buffer is told when to give its memory back.
    pub(crate) fn next(&self, keeps: bool) -> Option<Work> {
        let rest_at = keeps.then(|| Instant::now() + REST);
        let mut queue = self.queue();
        loop {
            let left =
                queue.failed.front().map(|(at, _)| at.saturating_duration_since(Instant::now()));
            // Without threads there is nobody to wait.
            if left.is_some_and(|left| left.is_zero() || !queue.is_open) {
                return queue.failed.pop_front().map(|(_, gfn)| Work::Wake(gfn));
            }
            if let Some(job) = queue.jobs.pop_front() {
                if left.is_some() {
                    // Somebody else has to wait for the failed ones' time.
                    wake_one(queue);
                }
                return Some(Work::Serve(job));
            }
            if !queue.is_open {
                return None;
            }
            let until_rest = rest_at.map(|at| at.saturating_duration_since(Instant::now()));
            if until_rest == Some(Duration::ZERO) {
                return Some(Work::Rest);
            }
            queue = self.sleep(queue, keeps, left.into_iter().chain(until_rest).min());
        }
    }

    /// Until it is woken, or so long. It may be woken for nothing. Without a buffer it lies at the
    /// bottom: else it would be woken next, and another thread rest instead.
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

    /// There are threads from now on.
    pub(crate) fn open(&self) {
        self.queue().is_open = true;
    }

    /// There are to be none any more, once nothing is left.
    pub(crate) fn close(&self) {
        let mut queue = self.queue();
        queue.is_open = false;
        queue.asleep.drain(..).for_each(|thread| thread.unpark());
    }
}

/// The thread with a buffer that went to sleep last, or else one without, if there is one.
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

    /// Threads end, also where the test fails.
    struct Closing<'j>(&'j Jobs);

    impl Drop for Closing<'_> {
        fn drop(&mut self) {
            self.0.close();
        }
    }

    fn open() -> Jobs {
        let jobs = Jobs::new();
        jobs.queue().is_open = true;
        jobs
    }

    fn job() -> Job {
        let fault = Fault { address: Hva(0), write: false, write_protected: false };
        Job { fault, began: Instant::now() }
    }

    /// Tells its number, and whether that was a job. It has a buffer, and never gives it back.
    fn thread<'s>(
        scope: &'s Scope<'s, '_>,
        jobs: &'s Jobs,
        number: usize,
        told: &Sender<(usize, bool)>,
    ) {
        let told = told.clone();
        scope.spawn(move || {
            while let Some(work) = busy(jobs) {
                let _ = told.send((number, matches!(work, Work::Serve(_))));
            }
        });
        asleep(jobs, number);
    }

    /// The next, of a thread with a buffer, however long it takes.
    fn busy(jobs: &Jobs) -> Option<Work> {
        loop {
            match jobs.next(true) {
                Some(Work::Rest) => {}
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

    fn next(told: &Receiver<(usize, bool)>) -> (usize, bool) {
        told.recv_timeout(LONG).unwrap()
    }

    #[test]
    fn who_went_to_sleep_last_works_first() {
        let (jobs, (tell, told)) = (open(), channel());
        thread::scope(|scope| {
            let _closing = Closing(&jobs);
            (1..=3).for_each(|number| thread(scope, &jobs, number, &tell));
            for _ in 0..3 {
                assert!(jobs.give(job()));
                assert_eq!(next(&told), (3, true));
                asleep(&jobs, 3);
            }
        });
    }

    #[test]
    fn who_has_no_buffer_works_last() {
        let (jobs, (tell, told)) = (open(), channel());
        thread::scope(|scope| {
            let _closing = Closing(&jobs);
            thread(scope, &jobs, 1, &tell);
            let tell = tell.clone();
            let jobs = &jobs;
            scope.spawn(move || {
                while let Some(work) = jobs.next(false) {
                    let _ = tell.send((2, matches!(work, Work::Serve(_))));
                }
            });
            for _ in 0..3 {
                asleep(jobs, 2);
                assert!(jobs.give(job()));
                assert_eq!(next(&told), (1, true));
            }
        });
    }

    #[test]
    fn a_thread_without_faults_rests_once_and_works_again() {
        let (jobs, (tell, told)) = (open(), channel());
        thread::scope(|scope| {
            let _closing = Closing(&jobs);
            scope.spawn(|| {
                let mut keeps = true;
                while let Some(work) = jobs.next(keeps) {
                    keeps = matches!(work, Work::Serve(_));
                    let _ = tell.send(keeps);
                }
            });
            assert!(!told.recv_timeout(LONG).unwrap(), "it rests");
            assert!(told.recv_timeout(2 * REST).is_err(), "and then sleeps");
            assert!(jobs.give(job()));
            assert!(told.recv_timeout(LONG).unwrap(), "it serves");
            assert!(!told.recv_timeout(LONG).unwrap(), "it rests");
        });
    }

    /// Also where the thread that waited for its time has got something else to do.
    #[test]
    fn a_failed_fault_is_woken_in_time() {
        let (jobs, (tell, told)) = (open(), channel());
        thread::scope(|scope| {
            let _closing = Closing(&jobs);
            thread(scope, &jobs, 1, &tell);
            let (begun, begin) = channel();
            let (end, ended) = channel::<()>();
            let jobs = &jobs;
            scope.spawn(move || {
                let work = busy(jobs);
                let _ = begun.send(matches!(work, Some(Work::Serve(_))));
                // It serves that for as long as this test.
                let _ = ended.recv();
            });
            asleep(jobs, 2);
            assert!(jobs.wake_later(Gfn(7)));
            asleep(jobs, 2);
            assert!(jobs.give(job()));
            assert!(begin.recv_timeout(LONG).unwrap());
            assert_eq!(next(&told), (1, false));
            drop(end);
        });
    }
}
