//! Another process, seen from outside: its descriptors, its mappings, its end.

mod descriptors;
#[cfg(test)]
mod tests;
mod vma;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open, pidfd_send_signal,
};

use crate::memory_fs;
use crate::process_stat::Stat;

pub(crate) use vma::is_shared;
pub use vma::{Vma, parse_mappings};

/// The most bytes of a command line to read. execve(2) takes 6 MiB at most.
const COMMAND_LINE_MAX: u64 = 8 << 20;
/// The most bytes of a list of mappings to read: those of some million mappings.
const MAPS_MAX: u64 = 256 << 20;

/// A process, referred to by its pidfd, so that a reused PID cannot mislead.
pub struct Process {
    pid: i32,
    pidfd: OwnedFd,
}

impl AsFd for Process {
    /// Readable once the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Process {
    /// Opens the process with this PID.
    ///
    /// # Errors
    /// `ESRCH`: there is none. Otherwise as pidfd_open(2).
    pub fn open(pid: i32) -> io::Result<Process> {
        let number = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw);
        let number = number.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Process { pid, pidfd: pidfd_open(number, PidfdFlags::empty())? })
    }

    /// Opens this process itself.
    ///
    /// # Errors
    /// As pidfd_open(2).
    pub fn own() -> io::Result<Process> {
        Process::open(rustix::process::getpid().as_raw_nonzero().get())
    }

    /// Returns the PIDs of all processes.
    ///
    /// # Errors
    /// As reading `/proc`.
    pub fn numbers() -> io::Result<Vec<i32>> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            numbers.extend(name.to_str().and_then(|name| name.parse::<i32>().ok()));
        }
        Ok(numbers)
    }

    /// Returns all other processes that `is_meant` accepts and that have this file or directory
    /// open, or had it open a moment ago.
    ///
    /// Processes that this one may not look into are left out: they have privileges that this one
    /// lacks. Only the descriptors of processes that `is_meant` accepts are listed, because any
    /// process may have very many.
    ///
    /// # Errors
    /// As reading `/proc`, as `is_meant`, and as looking at the descriptors of a process that
    /// `is_meant` accepts and that has not ended: it may have the file open.
    pub fn all_with(
        file: &Path,
        is_meant: impl Fn(&Process) -> io::Result<bool>,
    ) -> io::Result<Vec<Process>> {
        let name = file.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
        let (wanted, own) = ((name.as_ref(), file_of(file)?), std::process::id());
        let mut found = Vec::new();
        for pid in Process::numbers()?.into_iter().filter(|pid| pid.unsigned_abs() != own) {
            let looked = Process::open(pid).and_then(|process| {
                Ok((is_meant(&process)? && process.has_open(wanted)?).then_some(process))
            });
            match looked {
                Ok(process) => found.extend(process),
                Err(error) if is_no_process(&error) => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Path of the program that it runs, as `/proc/PID/exe` names it, even if that was removed.
    /// Empty if the path is longer than a page.
    ///
    /// # Errors
    /// As readlink(2).
    pub fn program(&self) -> io::Result<PathBuf> {
        let link = link_of(&self.proc("exe"))?;
        let bytes = link.as_os_str().as_bytes();
        let name = bytes.strip_suffix(b" (deleted)").unwrap_or(bytes);
        Ok(PathBuf::from(OsStr::from_bytes(name)))
    }

    /// Kills the process with SIGKILL, and waits until it has ended.
    ///
    /// # Errors
    /// As pidfd_send_signal(2) and poll(2). `TimedOut`: it has not ended within this time.
    pub fn kill(&self, within: Duration) -> io::Result<()> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            sent => sent?,
        }
        let within = Timespec::try_from(within).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        match rustix::io::retry_on_intr(|| poll(&mut fds, Some(&within)))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    /// Another handle of the same process.
    ///
    /// # Errors
    /// As dup(2).
    pub fn try_clone(&self) -> io::Result<Process> {
        Ok(Process { pid: self.pid, pidfd: self.pidfd.try_clone()? })
    }

    /// Its PID.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// A copy of its descriptor `fd`, which shares the open file.
    ///
    /// # Errors
    /// As pidfd_getfd(2): `EPERM` without the privilege, `EBADF` if there is no such descriptor.
    pub fn descriptor(&self, fd: i32) -> io::Result<OwnedFd> {
        Ok(pidfd_getfd(&self.pidfd, fd, PidfdGetfdFlags::empty())?)
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// As poll(2).
    pub fn has_ended(&self) -> io::Result<bool> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        Ok(poll(&mut fds, Some(&Timespec::default()))? > 0)
    }

    /// Its start time, in clock ticks since boot. PID and start time identify a process.
    ///
    /// # Errors
    /// As reading `/proc/PID/stat`.
    pub fn start_ticks(&self) -> io::Result<u64> {
        Process::start_ticks_of(self.pid)
    }

    /// Start time of the process or thread that has this number now, in clock ticks since boot.
    ///
    /// # Errors
    /// As reading `/proc/PID/stat`.
    pub fn start_ticks_of(pid: i32) -> io::Result<u64> {
        Ok(Stat::of(pid)?.start_ticks)
    }

    /// The numbers of its threads, the first thread first.
    ///
    /// # Errors
    /// As reading `/proc/PID/task`.
    pub fn threads(&self) -> io::Result<Vec<i32>> {
        let mut threads = vec![self.pid];
        for entry in fs::read_dir(self.proc("task"))? {
            let name = entry?.file_name();
            let number = name.to_str().and_then(|name| name.parse::<i32>().ok());
            threads.extend(number.filter(|&thread| thread != self.pid));
        }
        Ok(threads)
    }

    /// The user by whose rights the kernel judges its access to files.
    ///
    /// # Errors
    /// As reading `/proc/PID/status`.
    pub fn user(&self) -> io::Result<u32> {
        let status = fs::read(self.proc("status"))?;
        // The fields are the real, effective, saved and file-system user.
        let user = line_of(&status, "Uid:")
            .and_then(|users| users.split_ascii_whitespace().nth(3)?.parse().ok());
        user.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// The file systems that it has mounted: (number, as in [`Self::descriptor_info`]; type).
    ///
    /// # Errors
    /// As reading `/proc/PID/mountinfo`.
    pub fn mounts(&self) -> io::Result<Vec<(u64, String)>> {
        let text = fs::read(self.proc("mountinfo"))?;
        Ok(String::from_utf8_lossy(&text).lines().filter_map(parse_mount).collect())
    }

    /// Its mappings, in address order.
    ///
    /// # Errors
    /// As reading `/proc/PID/maps`. `FileTooLarge`: the list has more than 256 MiB.
    pub fn mappings(&self) -> io::Result<Vec<Vma>> {
        self.mappings_within(MAPS_MAX)
    }

    /// As [`Self::mappings`], of a process that may have made very many mappings on purpose.
    ///
    /// # Errors
    /// As [`Self::mappings`], for a list of more than `most` bytes.
    pub fn mappings_within(&self, most: u64) -> io::Result<Vec<Vma>> {
        let mut bytes = Vec::new();
        File::open(self.proc("maps"))?.take(most + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > most {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        Ok(parse_mappings(&String::from_utf8_lossy(&bytes)))
    }

    /// Its control group in the unified hierarchy, as `/proc/PID/cgroup` names it. Empty: none.
    ///
    /// # Errors
    /// As reading `/proc/PID/cgroup`.
    pub fn cgroup(&self) -> io::Result<String> {
        let text = fs::read(self.proc("cgroup"))?;
        Ok(line_of(&text, "0::").unwrap_or_default().to_owned())
    }

    /// Its memory, for reading at its addresses. The file stays with this process, even if its
    /// number is used again. Reading a page that is not mapped maps it.
    ///
    /// # Errors
    /// As open(2) of `/proc/PID/mem`.
    pub fn memory(&self) -> io::Result<File> {
        File::open(self.proc("mem"))
    }

    /// The file that it has mapped here, for reading. Takes no part in the mapping. `None`: the file
    /// is not in memory. It is not opened then, as open(2) of some devices has effects.
    ///
    /// # Errors
    /// `ENOENT`: it has no such mapping. Otherwise as open(2) of a link in `/proc/PID/map_files`.
    pub fn mapped_file(&self, vma: &Vma) -> io::Result<Option<File>> {
        let (start, end) = (vma.start.0, vma.start.0 + vma.bytes);
        let path = self.proc(&format!("map_files/{start:x}-{end:x}"));
        if !memory_fs::is_of_memory(rustix::fs::statfs(&path)?.f_type as u64) {
            return Ok(None);
        }
        File::open(path).map(Some)
    }

    /// Its private memory that takes host memory, in bytes: what it shares with nobody by a file.
    ///
    /// # Errors
    /// As reading `/proc/PID/status`.
    pub fn anonymous_bytes(&self) -> io::Result<u64> {
        let status = fs::read(self.proc("status"))?;
        let kib = line_of(&status, "RssAnon:").and_then(|line| line.strip_suffix("kB"));
        let kib = kib.and_then(|kib| kib.trim().parse::<u64>().ok());
        kib.and_then(|kib| kib.checked_mul(1024)).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Its command line, word by word. Only the beginning of a long one.
    ///
    /// # Errors
    /// As reading `/proc/PID/cmdline`.
    pub fn command_line(&self) -> io::Result<Vec<String>> {
        self.command_line_within(COMMAND_LINE_MAX)
    }

    /// As [`Self::command_line`], but no more than the first `most` bytes.
    ///
    /// # Errors
    /// As [`Self::command_line`].
    pub fn command_line_within(&self, most: u64) -> io::Result<Vec<String>> {
        let mut bytes = Vec::new();
        File::open(self.proc("cmdline"))?.take(most).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.split_terminator('\0').map(str::to_owned).collect())
    }

    fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.pid))
    }
}

/// Returns the device and inode number of a file. Asks no file system.
fn file_of(path: &Path) -> io::Result<(u64, u64)> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?;
    Ok((makedev(found.stx_dev_major, found.stx_dev_minor), found.stx_ino))
}

/// Returns the target of a link such as those in `/proc/PID/fd`. Empty if the path is longer than a
/// page: no caller looks for such a path.
fn link_of(entry: &Path) -> io::Result<PathBuf> {
    match fs::read_link(entry) {
        Err(error) if is(&error, rustix::io::Errno::NAMETOOLONG) => Ok(PathBuf::new()),
        link => link,
    }
}

/// Returns what follows `word` at the beginning of a line of such a text. Other lines may hold any
/// bytes, because each process names itself.
pub(crate) fn line_of<'t>(text: &'t [u8], word: &str) -> Option<&'t str> {
    let mut lines = text.split(|&byte| byte == b'\n');
    let rest = lines.find_map(|line| line.strip_prefix(word.as_bytes()))?;
    Some(std::str::from_utf8(rest).ok()?.trim())
}

/// Whether the error says that a process, or a descriptor, no longer exists.
pub fn is_no_process(error: &io::Error) -> bool {
    [rustix::io::Errno::NOENT, rustix::io::Errno::SRCH].iter().any(|&code| is(error, code))
}

fn is(error: &io::Error, code: rustix::io::Errno) -> bool {
    error.raw_os_error() == Some(code.raw_os_error())
}

/// Parses a line such as `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`.
fn parse_mount(line: &str) -> Option<(u64, String)> {
    let number = line.split(' ').next()?.parse().ok()?;
    let (_, after) = line.split_once(" - ")?;
    Some((number, after.split(' ').next()?.to_owned()))
}
