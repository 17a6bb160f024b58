//! The one thread of a VM that reads its faults.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use ebb_sys::uffd::Events;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::fault::hand::Hand;
use crate::frames::errors::is_vmm_ended;
use crate::pager::Pager;

/// The fault thread. It runs until it is stopped or its VMM ends.
pub struct FaultThread {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl FaultThread {
    /// Begins to serve. `vmm` becomes readable at the VMM's end. `ended` is called then, or with
    /// the reason when faults cannot be read any more, but not after a panic ([`Pager::on_panic`]).
    ///
    /// # Errors
    /// As eventfd(2) and pthread_create(3).
    pub fn start(
        pager: Arc<Pager>,
        vmm: OwnedFd,
        ended: impl FnOnce(io::Result<()>) + Send + 'static,
    ) -> io::Result<FaultThread> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stopped = stop.try_clone()?;
        let run = move || match pager.catch(|| serve_until(&pager, &vmm, &stopped)) {
            // The function that is told of panics was called.
            None | Some(Ok(End::Stopped)) => {}
            Some(Ok(End::VmmEnded)) => ended(Ok(())),
            Some(Err(error)) => ended(Err(error)),
        };
        let thread = std::thread::Builder::new().name("fault".into()).spawn(run)?;
        Ok(FaultThread { stop, thread: Some(thread) })
    }
}

impl Drop for FaultThread {
    /// Ends the thread. Faults wait in the userfaultfd from then on.
    fn drop(&mut self) {
        let written = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let (Ok(_), Some(thread)) = (written, self.thread.take())
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic of that thread was caught.
            let _ = thread.join();
        }
    }
}

enum End {
    Stopped,
    VmmEnded,
}

fn serve_until(pager: &Pager, vmm: &OwnedFd, stop: &OwnedFd) -> io::Result<End> {
    let (mut events, mut hand) = (Events::new(), Hand::empty());
    loop {
        let mut fds = [pager.frames().uffd().as_fd(), vmm.as_fd(), stop.as_fd()]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            result => result?,
        };
        let cannot_be_polled = fds[0].revents().contains(PollFlags::ERR);
        let ready = fds.map(|fd| !fd.revents().is_empty());
        if ready[2] {
            return Ok(End::Stopped);
        }
        if ready[1] {
            return Ok(End::VmmEnded);
        }
        if cannot_be_polled {
            pager.frames().uffd().never_wait()?;
        }
        match serve_waiting(pager, &mut events, &mut hand) {
            Err(error) if is_vmm_ended(&error) => return Ok(End::VmmEnded),
            result => result?,
        }
    }
}

/// Most reads that are served before the thread checks whether to stop: a VMM may raise faults
/// without end.
const READS_AT_MOST: usize = 64;

/// Serves the faults that wait, without sleeping in between.
fn serve_waiting(pager: &Pager, events: &mut Events, hand: &mut Hand) -> io::Result<()> {
    for _ in 0..READS_AT_MOST {
        let mut any = false;
        for fault in pager.frames().uffd().read(events)? {
            let began = Instant::now();
            if let Some(kind) = pager.faults().serve(fault, began, hand) {
                pager.counters().note_time(kind, began.elapsed());
            }
            any = true;
        }
        if !any {
            break;
        }
    }
    Ok(())
}
