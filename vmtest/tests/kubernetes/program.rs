//! A program that runs beside the test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, kill_process};
use vmtest::{Undo, until};

/// A program. It is killed when this is dropped.
pub struct Program {
    child: Arc<Mutex<Child>>,
    log: PathBuf,
    _undo: Undo,
}

impl Program {
    /// Starts a program. What it says is added to a file.
    pub fn start(mut command: Command, log: &Path) -> Program {
        let file = File::options().append(true).create(true).open(log).expect("a log");
        command.stdin(Stdio::null()).stdout(file.try_clone().expect("a log")).stderr(file);
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let child = Arc::new(Mutex::new(child));
        let its = Arc::clone(&child);
        let undo = Undo::processes(move || {
            let mut child = lock(&its);
            // It may have ended by itself.
            let _ = child.kill();
            child.wait().expect("it is a child");
        });
        Program { child, log: log.into(), _undo: undo }
    }

    /// What it has said so far.
    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).expect("a log")
    }

    /// Whether it has not ended.
    pub fn runs(&self) -> bool {
        lock(&self.child).try_wait().expect("it is a child").is_none()
    }

    /// Asks it to end, and returns its exit code.
    pub fn terminate(&self) -> Option<i32> {
        kill_process(Pid::from_child(&lock(&self.child)), Signal::TERM).expect("it runs");
        until("its end", || lock(&self.child).try_wait().expect("it is a child")).code()
    }
}

fn lock(child: &Mutex<Child>) -> MutexGuard<'_, Child> {
    child.lock().unwrap_or_else(PoisonError::into_inner)
}
