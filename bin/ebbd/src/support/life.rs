//! Whether a VMM that is on record still runs. What a VM leaves behind is removed on proof of
//! its end alone: an error proves nothing.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use ebb_sys::process::Process;

/// Who does not end within this time after SIGKILL waits for a disk, or is frozen.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// What starts others as long as it is looked at is given up after so many looks.
const END_ROUNDS: u32 = 16;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Proof that a VMM has ended. Whoever removes what a VM left asks for it; only this file
/// makes one.
#[derive(Debug)]
pub struct Dead(());

/// What can be said of a VMM.
pub enum Life {
    /// It runs. As long as the process is held its number means no other.
    Lives(Process),
    /// It has ended.
    Dead(Dead),
    /// Nobody can tell now, and why: it may run.
    Unknown(io::Error),
}

/// Which process is meant: a number is used again, and so is a time after a reboot.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'r> {
    /// Its number.
    pub pid: i32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
    /// The boot in which it did; empty: not on record.
    pub boot: &'r str,
}

/// This boot of the host.
///
/// # Errors
/// As read(2).
pub fn boot() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

impl Life {
    /// Looks for the process. One that has ended and waits to be reaped does not run.
    pub fn of(identity: Identity<'_>) -> Life {
        look(identity).unwrap_or_else(Life::Unknown)
    }

    /// Of a VM that was let go: nothing of it is on record, but a VMM that Ebb started listens
    /// at its console as long as it runs.
    ///
    /// # Errors
    /// Nobody can tell now.
    pub fn of_listener(socket: &Path) -> io::Result<Option<Dead>> {
        match ebb_vm::dial(socket, Instant::now()).map_err(|error| (error.kind(), error)) {
            // Who has no room for one more listens, too.
            Ok(_) | Err((io::ErrorKind::WouldBlock, _)) => Ok(None),
            Err((io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused, _)) => {
                Ok(Some(Dead(())))
            }
            Err((_, error)) => Err(error),
        }
    }

    /// Ends every process that `is_meant` means and that has this directory open, whatever it does;
    /// their numbers.
    ///
    /// # Errors
    /// Nobody can tell now whether there are any; `TimedOut`: one does not end, or they start
    /// others without end.
    pub fn end_all_with(
        directory: &Path,
        is_meant: impl Fn(&Process) -> io::Result<bool>,
    ) -> io::Result<(Dead, Vec<i32>)> {
        let mut ended = Vec::new();
        // What one of them starts before it ends has it open, too.
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

    /// Of a process that is held.
    ///
    /// # Errors
    /// As poll(2): nobody can tell now.
    pub fn of_held(process: &Process) -> io::Result<Option<Dead>> {
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
        // The number is of a thread, maybe of another process: its start time tells.
        Err(error) if pid > 0 && is_thread(&error) => {
            return match Process::start_ticks_of(pid)? == start_ticks {
                true => Err(error),
                false => Ok(dead()),
            };
        }
        opened => opened?,
    };
    let ticks = process.start_ticks()?;
    // Whoever had the number when it was opened has it still, so the time is its own.
    match process.has_ended()? || ticks != start_ticks {
        true => Ok(dead()),
        false => Ok(Life::Lives(process)),
    }
}

fn is(error: &io::Error, errno: rustix::io::Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// As pidfd_open(2) says of a number that is no process's but a thread's.
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
        assert!(Life::of_held(&process).unwrap().is_none());
        child.kill().unwrap();
        // Killed, and not reaped yet.
        while Life::of_held(&process).unwrap().is_none() {}
        assert!(matches!(life(pid, ticks, &boot), Life::Dead(_)));
        child.wait().unwrap();
        assert!(matches!(life(pid, ticks, &boot), Life::Dead(_)));
    }

    #[test]
    fn a_number_that_is_a_threads_by_now_is_no_vmms() {
        let (to, done) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_pid()).unwrap();
            let _ = done.recv();
        });
        let tid = told.recv().unwrap();
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
        // Nothing can be opened any more: by a process of its own, since that is for all threads.
        let me = std::env::current_exe().unwrap();
        let test = "support::life::tests::without_descriptors_nobody_can_tell";
        let ran = Command::new(me).args([test, "--exact", "--ignored"]).output().unwrap();
        let told = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && told.contains("1 passed"), "{told}");
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
