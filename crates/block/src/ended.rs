//! Threads that the vhost-user library makes for one front end. It looks at their end only when the
//! device is dropped. Until then, the queue of a thread that has ended would not be served, and its
//! driver would wait for ever.

use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use rustix::event::{EventfdFlags, eventfd};

use crate::block_locks::wake_up;

thread_local! {
    /// Dropped when the thread ends.
    static LAST: OnceCell<Last> = const { OnceCell::new() };
}

/// Whether one of the threads has ended.
pub(crate) struct Ended {
    any: AtomicBool,
    event: OwnedFd,
}

impl Ended {
    pub(crate) fn new() -> io::Result<Arc<Ended>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Ended { any: AtomicBool::new(false), event }))
    }

    /// Has the end of the calling thread noted, whether it returns, fails or panics. A thread works
    /// for one device only.
    pub(crate) fn note_end(self: &Arc<Ended>) {
        LAST.with(|last| {
            last.get_or_init(|| Last(Arc::clone(self)));
        });
    }

    /// Whether a thread has ended.
    pub(crate) fn is_any(&self) -> bool {
        self.any.load(SeqCst)
    }

    /// Returns a descriptor that is readable once a thread has ended.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

struct Last(Arc<Ended>);

impl Drop for Last {
    fn drop(&mut self) {
        self.0.any.store(true, SeqCst);
        wake_up(&self.0.event);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(ended: &Ended) -> bool {
        let mut events = [PollFd::from_borrowed_fd(ended.event(), PollFlags::IN)];
        poll(&mut events, Some(&Timespec::default())).unwrap() == 1
    }

    #[test]
    fn the_end_of_a_thread_is_noted_however_it_ends() {
        for panics in [false, true] {
            let ended = Ended::new().unwrap();
            let (go, wait) = channel::<()>();
            let noted = Arc::clone(&ended);
            let thread = thread::spawn(move || {
                noted.note_end();
                noted.note_end();
                drop(noted);
                let _ = wait.recv();
                assert!(!panics, "on purpose");
            });
            assert!(!ended.is_any() && !is_readable(&ended));
            drop(go);
            assert_eq!(thread.join().is_err(), panics);
            assert!(ended.is_any() && is_readable(&ended));
        }
    }
}
