//! Processes, recognized by a path of the test's on their command lines or among their open files.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::wait::{patiently, until};

/// All processes with `path` in an argument, and QEMUs with a file below it open. Each comes with
/// the base name of its program.
pub fn with_path(path: &Path) -> Vec<(i32, String)> {
    let needle = path.as_os_str().as_bytes();
    let entries = fs::read_dir("/proc").expect("/proc is mounted");
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|&pid| pid != std::process::id() as i32)
        .filter_map(|pid: i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let named = line.windows(needle.len()).any(|window| window == needle);
            let program = program(&line);
            // A QEMU that inherits its descriptors has no such path in its arguments.
            let found = named || program.starts_with("qemu-system") && has_open(pid, path);
            found.then_some((pid, program))
        })
        .collect()
}

/// As [`with_path`], without processes that are about to execute their program: until then, a child
/// has the command line of its parent.
pub fn executed(path: &Path) -> Vec<(i32, String)> {
    let mut all = with_path(path);
    all.retain(|(pid, _)| !is_copy(*pid));
    all
}

fn is_copy(pid: i32) -> bool {
    let line = |pid: i32| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state and the parent follow the name.
    let parent = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(1));
    let parent: Option<i32> = parent.and_then(|word| word.parse().ok());
    let own = line(pid);
    !own.is_empty() && parent.is_some_and(|parent| line(parent) == own)
}

fn has_open(pid: i32, directory: &Path) -> bool {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.any(|link| link.starts_with(directory))
}

fn program(command_line: &[u8]) -> String {
    let first = command_line.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(first).rsplit('/').next().unwrap_or_default().to_owned()
}

/// Whether the process runs. One that has ended and waits to be reaped does not; one with any
/// thread left does.
pub fn runs(pid: i32) -> bool {
    let Some(pid) = Pid::from_raw(pid) else { return false };
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return false };
    let mut ended = [PollFd::new(&process, PollFlags::IN)];
    poll(&mut ended, Some(&Timespec::default())) == Ok(0)
}

/// Stops all threads of a process, or has them go on.
pub fn freeze(pid: i32, frozen: bool) {
    let signal = if frozen { Signal::STOP } else { Signal::CONT };
    kill_process(Pid::from_raw(pid).expect("a pid"), signal).expect("it runs");
    until(format_args!("process {pid} stops or goes on"), || {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
        let mut stats = threads.filter_map(|one| fs::read_to_string(one.path().join("stat")).ok());
        // The state follows the name.
        stats.all(|stat| stat.rsplit(") ").next().unwrap().starts_with('T') == frozen).then_some(())
    });
}

/// Kills the process and waits for its end.
pub fn kill(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        // It may have ended by itself meanwhile.
        let _ = kill_process(pid, Signal::KILL);
    }
    if !patiently(|| !runs(pid)) {
        eprintln!("process {pid} was killed and does not end");
    }
}
