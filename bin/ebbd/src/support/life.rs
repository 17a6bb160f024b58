//! Whether a VMM on record still runs. What a VM leaves is removed only on proof of its end: an
//! error proves nothing.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use ebb_sys::process::Process;

/// Longest wait for the end of a process after SIGKILL. One that takes longer waits for a disk, or
/// is frozen.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Most looks for processes to end. Beyond that, they are taken to start others without end.
const END_ROUNDS: u32 = 16;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Proof that a VMM has ended, needed to remove what a VM left. Only this file makes one.
#[derive(Debug)]
pub struct Dead(());

/// Whether a VMM runs.
pub enum Life {
    /// It runs. As long as this handle is open, its number means no other process.
    Lives(Process),
    /// It has ended.
    Dead(Dead),
    /// It is not known now, and why: the VMM may run.
    Unknown(io::Error),
}

/// Identity of a process. Numbers are used again, and start times too after a reboot.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'r> {
    /// The process number.
    pub pid: i32,
    /// When the process started, in clock ticks since boot.
    pub start_ticks: u64,
    /// The boot in which it started; empty: not on record.
    pub boot: &'r str,
}

/// The current boot of the host.
///
/// # Errors
/// Those of read(2).
pub fn boot() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

impl Life {
    /// Looks for the process. A process that has ended and waits to be reaped does not run.
    pub fn of(identity: Identity<'_>) -> Life {
        look(identity).unwrap_or_else(Life::Unknown)
    }

    /// Whether a detached VM has ended, which has nothing on record. A VMM that Ebb started listens
    /// at its control socket as long as it runs.
    ///
    /// # Errors
    /// It is not known now.
    pub fn of_listener(socket: &Path) -> io::Result<Option<Dead>> {
        match ebb_vm::dial(socket, Instant::now()).map_err(|error| (error.kind(), error)) {
            // A listener without room for one more connection also listens.
            Ok(_) | Err((io::ErrorKind::WouldBlock, _)) => Ok(None),
            Err((io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused, _)) => {
                Ok(Some(Dead(())))
            }
            Err((_, error)) => Err(error),
        }
    }

    /// Kills every process for which `is_meant` holds and that has this directory open. Returns
    /// their numbers.
    ///
    /// # Errors
    /// It is not known now whether there are any. `TimedOut`: one does not end, or they start
    /// others without end.
    pub fn end_all_with(
        directory: &Path,
        is_meant: impl Fn(&Process) -> io::Result<bool>,
    ) -> io::Result<(Dead, Vec<i32>)> {
        let mut ended = Vec::new();
        // A process that one of them starts before it ends has the directory open, too.
        for _ in 0..END_ROUNDS {
            let mut any = false;
            for process in Process::all_with(directory, &is_meant)? {
                process.kill(END_TIMEOUT)?;
                ended.push(process.pid());
                any = true;
            }
            if !any {
                return Ok((Dead(()), ended));
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Whether the process of this handle has ended.
    ///
    /// # Errors
    /// Those of poll(2): it is not known now.
    pub fn of_handle(process: &Process) -> io::Result<Option<Dead>> {
        Ok(process.has_ended()?.then_some(Dead(())))
    }
}

fn look(Identity { pid, start_ticks, boot: on_record }: Identity<'_>) -> io::Result<Life> {
    let dead = || Life::Dead(Dead(()));
    if !on_record.is_empty() && on_record != boot()? {
        return Ok(dead());
    }
    let process = match Process::open(pid) {
        Err(error) if is(&error, rustix::io::Errno::SRCH) => return Ok(dead()),
        // The number belongs to a thread, maybe of another process. Its start time tells.
        Err(error) if pid > 0 && is_thread(&error) => {
            return match Process::start_ticks_of(pid)? == start_ticks {
                true => Err(error),
                false => Ok(dead()),
            };
        }
        opened => opened?,
    };
    let ticks = process.start_ticks()?;
    // The process has had the number since it was opened, so the start time is its own.
    match process.has_ended()? || ticks != start_ticks {
        true => Ok(dead()),
        false => Ok(Life::Lives(process)),
    }
}

fn is(error: &io::Error, errno: rustix::io::Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Whether pidfd_open(2) says that the number belongs to a thread, not to a process.
fn is_thread(error: &io::Error) -> bool {
    is(error, rustix::io::Errno::INVAL) || is(error, rustix::io::Errno::NOENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn sleeper() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    fn life(pid: u32, start_ticks: u64, boot: &str) -> Life {
        Life::of(Identity { pid: pid as i32, start_ticks, boot })
    }

    #[test]
    fn one_that_runs_lives_and_one_that_ended_is_dead() {
        let (mut child, boot) = (sleeper(), boot().unwrap());
        let pid = child.id();
        let process = Process::open(pid as i32).unwrap();
        let ticks = process.start_ticks().unwrap();
        assert!(matches!(life(pid, ticks, &boot), Life::Lives(_)));
        assert!(matches!(life(pid, ticks, ""), Life::Lives(_)));
        assert!(matches!(life(pid, ticks + 1, &boot), Life::Dead(_)));
        assert!(matches!(life(pid, ticks, "another boot"), Life::Dead(_)));
        assert!(Life::of_handle(&process).unwrap().is_none());
        child.kill().unwrap();
        // Killed, and not reaped yet.
        while Life::of_handle(&process).unwrap().is_none() {}
        assert!(matches!(life(pid, ticks, &boot), Life::Dead(_)));
        child.wait().unwrap();
        assert!(matches!(life(pid, ticks, &boot), Life::Dead(_)));
    }

    #[test]
    fn a_number_that_is_a_threads_by_now_is_no_vmms() {
        let (to, done) = std::sync::mpsc::channel::<()>();
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            sender.send(rustix::thread::gettid().as_raw_pid()).unwrap();
            let _ = done.recv();
        });
        let tid = receiver.recv().unwrap();
        let ticks = Process::start_ticks_of(tid).unwrap();
        assert!(matches!(life(tid as u32, ticks + 1, ""), Life::Dead(_)));
        assert!(matches!(life(tid as u32, ticks, ""), Life::Unknown(_)));
        drop(to);
        thread.join().unwrap();
    }

    #[test]
    fn an_error_is_no_death() {
        assert!(matches!(life(0, 1, ""), Life::Unknown(_)));
        assert!(matches!(life(u32::MAX, 1, ""), Life::Unknown(_)));
        // A process of its own, since it cannot open anything any more, in any thread.
        let me = std::env::current_exe().unwrap();
        let test = "support::life::tests::without_descriptors_nobody_can_tell";
        let ran = Command::new(me).args([test, "--exact", "--ignored"]).output().unwrap();
        let output = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && output.contains("1 passed"), "{output}");
    }

    #[test]
    #[ignore = "an_error_is_no_death runs it in a process of its own"]
    fn without_descriptors_nobody_can_tell() {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let me = Process::own().unwrap();
        let (pid, ticks) = (me.pid() as u32, me.start_ticks().unwrap());
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
        assert!(matches!(life(pid, ticks, ""), Life::Unknown(_)));
        assert!(matches!(life(pid, ticks + 1, ""), Life::Unknown(_)));
        assert!(matches!(life(pid, ticks, "another boot"), Life::Unknown(_)));
    }
}
