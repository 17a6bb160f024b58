//! A VM whose worker has yet to begin.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Receiver;

use ebb_units::FRAME_BYTES;

use super::context::VmContext;
use super::context::mailbox::{Command, Inlet};
use super::context::service::FaultService;
use super::limit;
use super::publisher::Publisher;
use super::worker::{Farewell, Worker};
use crate::system::calibration::Calibrated;
use crate::system::last_words;

/// Counts what a worker does: commands and ticks that it begins, and the batches of long work.
pub type Progress = Box<dyn Fn() -> u64 + Send + Sync>;

/// Evicted content that has yet to come back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct YetToReturn {
    /// In the store.
    pub saved_bytes: u64,
    /// Disk-backed.
    pub on_disk_bytes: u64,
}

/// Tells how far a detach is; none: the worker detaches nothing.
pub type Detaching = Box<dyn Fn() -> Option<YetToReturn> + Send + Sync>;

/// Notes whether the pilot wants to know what the guest needs.
pub type Watching = Box<dyn Fn(bool) + Send + Sync>;

/// A VM whose faults are served, and whose worker can begin.
pub struct Ready {
    cx: VmContext,
    commands: Receiver<Command>,
}

impl Ready {
    /// Serves the VM's faults.
    ///
    /// # Errors
    /// Threads cannot be made; the VM comes back with the error.
    pub fn new(
        (mut cx, commands): (VmContext, Receiver<Command>),
    ) -> Result<Ready, (io::Error, Box<VmContext>)> {
        let directory = cx.record.directory().to_owned();
        // The worker may be busy for long, and until then a guest would wait.
        cx.pager.on_panic(move |why| last_words::end_process(&directory, &why));
        limit::slow_faults(&cx);
        let vmm = cx.process.as_fd().try_clone_to_owned();
        match vmm.and_then(|vmm| FaultService::start(&cx.pager, vmm, &cx.mailbox)) {
            Ok(service) => cx.service = Some(service),
            Err(error) => return Err((error, Box::new(cx))),
        }
        cx.pager.frames().wake_all().unwrap_or_else(|error| tracing::debug!("wake: {error}"));
        Ok(Ready { cx, commands })
    }

    /// Returns where commands of clients go.
    pub fn commands(&self) -> Inlet {
        self.cx.mailbox.inlet()
    }

    /// Returns a count of what the worker does. It stands still only while the worker does.
    pub fn progress(&self) -> Progress {
        let (mailbox, pager) = (self.cx.mailbox.clone(), Arc::clone(&self.cx.pager));
        Box::new(move || mailbox.begun() + pager.counters().worker_batches.load(Relaxed))
    }

    /// Returns what tells how far a detach is, while the worker answers nobody.
    pub fn detaching(&self) -> Detaching {
        let (mailbox, pager) = (self.cx.mailbox.clone(), Arc::clone(&self.cx.pager));
        Box::new(move || {
            let bytes = |frames: &AtomicU64| frames.load(Relaxed) * FRAME_BYTES;
            mailbox.is_detaching().then(|| YetToReturn {
                saved_bytes: bytes(&pager.counters().saved_frames),
                on_disk_bytes: bytes(&pager.counters().on_disk_frames),
            })
        })
    }

    /// Returns what notes whether the pilot wants to know what the guest needs.
    pub fn watching(&self) -> Watching {
        let mailbox = self.cx.mailbox.clone();
        Box::new(move |is_watched| mailbox.note_watched(is_watched))
    }

    /// Runs the worker until the VM is not managed any more. Returns what is to be said then.
    pub fn run(self, calibrated: Arc<Calibrated>, publisher: Publisher) -> Option<Farewell> {
        let Ready { cx, commands } = self;
        Worker::new(cx, calibrated, publisher).run(&commands)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::context::machine;

    /// The touches that waited for this process all go on at once.
    #[test]
    fn a_limit_has_its_marks_before_the_first_fault_is_served() {
        let Some((mut cx, machine)) = machine::context() else { return };
        cx.record.note(|record| record.limit_bytes = Some(60 << 20));
        let Ok(ready) = Ready::new((cx, machine.commands)) else { panic!("threads can be made") };
        let marks = ready.cx.marks().expect("it has a limit");
        assert_eq!(ready.cx.pager.room().marks(), marks.pressure());
    }
}
