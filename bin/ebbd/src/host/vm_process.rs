//! The process of one VM (`ebbd vm`): how `ebbd` starts it, finds it again, and notices its end.

use std::fs::{self, Metadata};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use ebb_api::VmName;
use ebb_sys::process::Process;
use ebb_sys::session;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::apart::apart;
use crate::model::task::{COMMAND, Task, TaskResult, Work};
use crate::support::failpoint;
use crate::system::process_lock;

/// Its name among processes, to tell it from the daemon.
const NAME: &str = "ebbd-vm";

/// Largest answer: a line with a reason.
const ANSWER_MOST_BYTES: u64 = 64 << 10;
/// Longest time in which a VM is started or attached, beside that in which its memory is filled.
const BEGIN_LIMIT: Duration = Duration::from_secs(15 * 60);
/// Least memory that is filled in a second, in bytes.
const FILL_RATE: u64 = 256 << 20;
/// Stack of a thread that only waits.
const STACK_BYTES: usize = 64 << 10;
/// Interval of looking for the end of a process, if no thread can wait for it.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The process of a VM. It lives on when this is dropped.
pub struct VmProcess {
    process: Process,
    /// Set if this process is its parent.
    child: Option<Child>,
}

impl VmProcess {
    /// Starts a process and waits for its answer. `follows`: an earlier one of this daemon has
    /// failed.
    ///
    /// # Errors
    /// Those of fork(2), or how the process ended without an answer.
    pub async fn start(task: Task, follows: bool) -> io::Result<(VmProcess, TaskResult)> {
        apart(move || start(&task, follows)).await?
    }

    /// The process that an earlier daemon started for the VM of this directory.
    ///
    /// # Errors
    /// Those of [`process_lock::holder`].
    pub fn running(directory: &Path) -> io::Result<Option<VmProcess>> {
        let holder = process_lock::holder(directory)?;
        Ok(holder.map(|process| VmProcess { process, child: None }))
    }

    /// Waits until the process of the VM `name` has ended. Returns how it ended, if that is known.
    pub async fn ended(mut self, name: &VmName) -> String {
        let (ended, end) = oneshot::channel();
        let pidfd = self.process.as_fd().try_clone_to_owned();
        let waiting = pidfd.and_then(|pidfd| {
            let wait = move || {
                wait(&pidfd);
                // Nobody may be waiting any more.
                let _ = ended.send(());
            };
            thread::Builder::new().name("waiting".into()).stack_size(STACK_BYTES).spawn(wait)
        });
        match waiting {
            Ok(_) => drop(end.await),
            Err(error) => {
                tracing::warn!("{name}: waiting for its process: {error}");
                while !self.process.has_ended().unwrap_or(false) {
                    sleep(LOOK_EVERY).await;
                }
            }
        }
        match self.child.take().map(|mut child| child.wait()) {
            Some(Ok(status)) => format!("its process ended ({status})"),
            _ => "its process ended".into(),
        }
    }

    /// Kills the process, whatever it does.
    pub fn kill(&self) {
        // [`VmProcess::ended`] waits for its end.
        let _ = self.process.kill(Duration::ZERO);
    }

    /// Whether the next process can open the swap file that this one has open, by its name.
    pub fn shares_swap(&self, swap: &Path) -> bool {
        let Ok(descriptors) = self.process.descriptors() else { return false };
        // A process that serves no faults yet has evicted nothing: the next one loses nothing.
        let serves = descriptors.iter().any(|(_, link)| link == "anon_inode:[userfaultfd]");
        let Ok(wanted) = swap.metadata() else { return !serves };
        let number = |found: &Metadata| match found.file_type().is_block_device() {
            true => (0, found.rdev()),
            false => (found.dev(), found.ino()),
        };
        let is = |number_of: i32| {
            let path = format!("/proc/{}/fd/{number_of}", self.process.pid());
            fs::metadata(path).is_ok_and(|found| number(&found) == number(&wanted))
        };
        !serves || descriptors.iter().any(|(number_of, _)| is(*number_of))
    }

    /// Whether the process has ended.
    ///
    /// # Errors
    /// Those of poll(2).
    pub fn has_ended(&self) -> io::Result<bool> {
        self.process.has_ended()
    }
}

fn wait(pidfd: &OwnedFd) {
    let mut ended = [PollFd::new(pidfd, PollFlags::IN)];
    while let Err(error) = poll(&mut ended, None) {
        if error != Errno::INTR {
            thread::sleep(LOOK_EVERY);
        }
    }
}

fn start(task: &Task, follows: bool) -> io::Result<(VmProcess, TaskResult)> {
    let mut command = Command::new("/proc/self/exe");
    if follows {
        command.env_remove(failpoint::VARIABLE);
    }
    command
        .arg0(NAME)
        .arg(COMMAND)
        .arg(task.name.as_str())
        // Only for lists of processes: the task has the run directory.
        .arg(&task.site.run_dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    session::of_its_own(&mut command);
    let mut child = command.spawn()?;
    let process = Process::open(child.id() as i32);
    match process.and_then(|process| Ok((process, ask(&mut child, task)?))) {
        Ok((process, result)) => Ok((VmProcess { process, child: Some(child) }, result)),
        Err(error) => Err(how_it_ended(child, error)),
    }
}

fn ask(child: &mut Child, task: &Task) -> io::Result<TaskResult> {
    let none = || io::Error::other("no pipe");
    let mut to = child.stdin.take().ok_or_else(none)?;
    serde_json::to_writer(&mut to, task)?;
    to.flush()?;
    // The process reads its task up to the end of file.
    drop(to);
    let mut line = String::new();
    let answer = child.stdout.take().ok_or_else(none)?;
    await_answer(&answer, limit(&task.work))?;
    BufReader::new(answer.take(ANSWER_MOST_BYTES)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

/// Longest wait for the answer; none: a guest waits for its memory, however long that takes.
fn limit(work: &Work) -> Option<Duration> {
    match work {
        Work::Run(request) => {
            Some(BEGIN_LIMIT + Duration::from_secs(request.memory_bytes / FILL_RATE))
        }
        Work::Attach(_) => Some(BEGIN_LIMIT),
        Work::Recover => None,
    }
}

/// Waits until a process answers, or ends.
fn await_answer(answer: &ChildStdout, limit: Option<Duration>) -> io::Result<()> {
    let Some(limit) = limit else { return Ok(()) };
    let most = Timespec::try_from(limit).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut come = [PollFd::new(answer, PollFlags::IN)];
    match rustix::io::retry_on_intr(|| poll(&mut come, Some(&most)))? {
        0 => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("it did not manage the VM within {} s, and was given up", limit.as_secs()),
        )),
        _ => Ok(()),
    }
}

/// How a process ended that did not answer. If it has not ended, it is of no use, and is killed.
fn how_it_ended(mut child: Child, error: io::Error) -> io::Error {
    let _ = child.kill();
    match child.wait() {
        Ok(status) if error.kind() != io::ErrorKind::TimedOut => {
            io::Error::other(format!("its process ended without an answer ({status})"))
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_does_not_begin_is_given_up() {
        let mut child = Command::new("sleep").arg("1000").stdout(Stdio::piped()).spawn().unwrap();
        let answer = child.stdout.take().unwrap();
        let error = await_answer(&answer, Some(Duration::ZERO)).unwrap_err();
        let why = how_it_ended(child, error).to_string();
        assert!(why.contains("given up"), "{why}");
        assert_eq!(limit(&Work::Recover), None);
    }
}
