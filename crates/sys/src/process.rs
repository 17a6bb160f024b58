//! Another process, seen from outside: its descriptors, its mappings, its end.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_units::Hva;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open, pidfd_send_signal,
};

use crate::process_stat::Stat;

/// The most descriptors to look at. No VMM has more: its devices take a few each.
const DESCRIPTORS_MAX: usize = if cfg!(test) { 1 << 12 } else { 1 << 16 };
/// The most bytes of a command line to read. execve(2) takes 6 MiB at most.
const COMMAND_LINE_MAX: u64 = 8 << 20;

/// The most bytes to read of what the kernel says about one descriptor.
const INFO_BYTES_MAX: u64 = 256 << 10;

/// A process, referred to by its pidfd, so that a reused PID cannot mislead.
pub struct Process {
    pid: i32,
    pidfd: OwnedFd,
}

/// One line of `/proc/PID/maps`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vma {
    /// First address.
    pub start: Hva,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether it is writable.
    pub writable: bool,
    /// Whether it is writable and shared.
    pub shared_write: bool,
    /// Whether its bytes may be executed.
    pub executable: bool,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// The file's inode number, 0 for none.
    pub inode: u64,
    /// The file's name, as the kernel prints it.
    pub name: String,
}

impl Vma {
    /// Whether this address lies in the mapping.
    pub fn contains(&self, address: u64) -> bool {
        address.checked_sub(self.start.0).is_some_and(|into| into < self.bytes)
    }
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
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let pid = name.to_str().and_then(|name| name.parse::<i32>().ok());
            let Some(pid) = pid.filter(|&pid| pid.unsigned_abs() != own) else { continue };
            let looked = Process::open(pid).and_then(|process| {
                Ok((is_meant(&process)? && process.has_open(wanted)?).then_some(process))
            });
            match looked {
                Ok(process) => found.extend(process),
                Err(error) if is_gone(&error) => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    fn has_open(&self, (name, file): (&str, (u64, u64))) -> io::Result<bool> {
        for (count, entry) in fs::read_dir(self.proc("fd"))?.enumerate() {
            if count == DESCRIPTORS_MAX {
                return Err(io::Error::other("the process has too many open files"));
            }
            let path = entry?.path();
            let found = link_of(&path).and_then(|link| {
                let link = link.to_string_lossy();
                // Some file systems tell nobody else about their files: only a file with this name
                // is asked.
                match link.strip_suffix(" (deleted)").unwrap_or(&link).ends_with(name) {
                    true => Ok(file_of(&path)? == file),
                    false => Ok(false),
                }
            });
            match found {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                // Closed since it was listed.
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
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

    /// Its open descriptors: (number, what `/proc/PID/fd` says that it is).
    ///
    /// # Errors
    /// As reading that directory.
    pub fn descriptors(&self) -> io::Result<Vec<(i32, String)>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(self.proc("fd"))? {
            let entry = entry?;
            if all.len() == DESCRIPTORS_MAX {
                return Err(io::Error::other("the process has too many open files"));
            }
            let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
            // A descriptor may be closed between the listing and the look.
            if let (Some(number), Ok(link)) = (number, fs::read_link(entry.path())) {
                all.push((number, link.to_string_lossy().into_owned()));
            }
        }
        Ok(all)
    }

    /// The inode numbers of the files behind those of its descriptors whose name in `/proc/PID/fd`
    /// begins with `prefix`. None is missed that is open from before this call until after it.
    ///
    /// # Errors
    /// As reading that directory. A descriptor that cannot be looked at is an error too: it may be
    /// one of them.
    pub fn open_inodes(&self, prefix: &str) -> io::Result<Vec<u64>> {
        let mut inodes = Vec::new();
        for (count, entry) in fs::read_dir(self.proc("fd"))?.enumerate() {
            if count == DESCRIPTORS_MAX {
                return Err(io::Error::other("the process has too many open files"));
            }
            let path = entry?.path();
            let found = link_of(&path).and_then(|link| {
                let is_one = link.to_string_lossy().starts_with(prefix);
                is_one.then(|| inode_of(&path)).transpose()
            });
            match found {
                // Closed since it was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                found => inodes.extend(found?),
            }
        }
        Ok(inodes)
    }

    /// The inode number of the file behind its descriptor `fd`. `None` if it has no such
    /// descriptor.
    ///
    /// # Errors
    /// As statx(2).
    pub fn descriptor_inode(&self, fd: i32) -> io::Result<Option<u64>> {
        match inode_of(&self.proc(&format!("fd/{fd}"))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            found => found.map(Some),
        }
    }

    /// The number of descriptors that it has open, by one system call. `None` on kernels before
    /// 6.2, which do not say.
    ///
    /// # Errors
    /// As stat(2) of `/proc/PID/fd`.
    pub fn descriptor_count(&self) -> io::Result<Option<u64>> {
        Ok(Some(fs::metadata(self.proc("fd"))?.len()).filter(|&count| count > 0))
    }

    /// The numbers of its userfaultfds.
    ///
    /// # Errors
    /// As [`Process::descriptors`].
    pub fn userfaultfds(&self) -> io::Result<Vec<i32>> {
        let all = self.descriptors()?.into_iter();
        Ok(all.filter(|(_, link)| link == crate::uffd::LINK).map(|(number, _)| number).collect())
    }

    /// Whether its descriptor `fd` is a userfaultfd.
    ///
    /// # Errors
    /// As readlink(2).
    pub fn is_userfaultfd(&self, fd: i32) -> io::Result<bool> {
        match link_of(&self.proc(&format!("fd/{fd}"))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            link => Ok(link?.as_os_str() == crate::uffd::LINK),
        }
    }

    /// The most descriptors that it may have: the numbers of all are lower.
    ///
    /// # Errors
    /// As reading `/proc/PID/limits`.
    pub fn descriptors_max(&self) -> io::Result<u64> {
        let limits = fs::read(self.proc("limits"))?;
        let soft = line_of(&limits, "Max open files").and_then(|line| line.split(' ').next());
        match soft {
            Some("unlimited") => Ok(u64::MAX),
            soft => {
                soft.and_then(|soft| soft.parse().ok()).ok_or(io::ErrorKind::InvalidData.into())
            }
        }
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

    /// What the kernel says about its descriptor `fd` in `/proc/PID/fdinfo`. Only the beginning of
    /// a long text.
    ///
    /// # Errors
    /// As reading that file. `ENOENT`: it was closed.
    pub fn descriptor_info(&self, fd: i32) -> io::Result<String> {
        let mut text = Vec::new();
        let file = File::open(self.proc(&format!("fdinfo/{fd}")))?;
        file.take(INFO_BYTES_MAX).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Whether its descriptor `fd` is a file, a block device or something else. Asks no file
    /// system, so none can make the caller wait.
    ///
    /// # Errors
    /// As statx(2). `ENOENT`: it was closed.
    pub fn descriptor_type(&self, fd: i32) -> io::Result<FileType> {
        let path = self.proc(&format!("fd/{fd}"));
        let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
        Ok(FileType::from_raw_mode(found.stx_mode.into()))
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
    /// As reading `/proc/PID/maps`.
    pub fn mappings(&self) -> io::Result<Vec<Vma>> {
        Ok(parse_mappings(&fs::read_to_string(self.proc("maps"))?))
    }

    /// Its command line, word by word. Only the beginning of a long one.
    ///
    /// # Errors
    /// As reading `/proc/PID/cmdline`.
    pub fn command_line(&self) -> io::Result<Vec<String>> {
        let mut bytes = Vec::new();
        File::open(self.proc("cmdline"))?.take(COMMAND_LINE_MAX).read_to_end(&mut bytes)?;
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
pub fn is_gone(error: &io::Error) -> bool {
    [rustix::io::Errno::NOENT, rustix::io::Errno::SRCH].iter().any(|&code| is(error, code))
}

fn is(error: &io::Error, code: rustix::io::Errno) -> bool {
    error.raw_os_error() == Some(code.raw_os_error())
}

/// Returns the inode number of a file. Asks no file system, so none can make the caller wait.
fn inode_of(path: &Path) -> io::Result<u64> {
    Ok(statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?.stx_ino)
}

/// Parses a text of `/proc/PID/maps`. Lines that make no sense are left out.
pub fn parse_mappings(text: &str) -> Vec<Vma> {
    text.lines().filter_map(parse_vma).collect()
}

/// Parses a line such as `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`.
fn parse_mount(line: &str) -> Option<(u64, String)> {
    let number = line.split(' ').next()?.parse().ok()?;
    let (_, after) = line.split_once(" - ")?;
    Some((number, after.split(' ').next()?.to_owned()))
}

fn parse_vma(line: &str) -> Option<Vma> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let flags = words.next()?.as_bytes();
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let inode = words.nth(1)?.parse().ok()?;
    let has = |index: usize, flag: u8| flags.get(index) == Some(&flag);
    Some(Vma {
        start: Hva(start),
        bytes: end.checked_sub(start)?,
        writable: has(1, b'w'),
        shared_write: has(1, b'w') && has(3, b's'),
        executable: has(2, b'x'),
        offset,
        inode,
        name: words.next().unwrap_or("").trim_start().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::fs::{Mode, OFlags, mkdirat, open, openat};

    use super::*;

    #[test]
    fn reads_a_line_of_maps() {
        let line = "7f1c4be00000-7f1ccbe00000 rw-s 00200000 00:01 1029                       /memfd:memory-backend-memfd (deleted)";
        let vma = parse_vma(line).unwrap();
        assert_eq!(vma.start, Hva(0x7f1c_4be0_0000));
        assert_eq!((vma.bytes, vma.offset, vma.inode), (2 << 30, 2 << 20, 1029));
        assert!(vma.shared_write);
        assert_eq!(vma.name, "/memfd:memory-backend-memfd (deleted)");
        assert_eq!(parse_vma("00400000-00401000 r--p 00000000 00:00 0").unwrap().name, "");
        assert!(parse_vma("no such line").is_none());
    }

    /// Any user can make such a path, step by step.
    #[test]
    fn a_descriptor_whose_path_is_longer_than_a_page_is_passed_over() {
        let home = tempfile::tempdir().unwrap();
        let wanted = home.path().join("wanted");
        fs::write(&wanted, "").unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut deep = open(home.path(), flags, Mode::empty()).unwrap();
        let name = "a".repeat(255);
        for _ in 0..17 {
            mkdirat(&deep, name.as_str(), Mode::RWXU).unwrap();
            deep = openat(&deep, name.as_str(), flags, Mode::empty()).unwrap();
        }
        let link = format!("/proc/self/fd/{}", deep.as_raw_fd());
        let error = fs::read_link(link).unwrap_err();
        assert!(is(&error, rustix::io::Errno::NAMETOOLONG), "{error}");
        let (own, id) = (Process::own().unwrap(), file_of(&wanted).unwrap());
        assert!(!own.has_open(("wanted", id)).unwrap());
        let _opened = File::open(&wanted).unwrap();
        assert!(own.has_open(("wanted", id)).unwrap());
        assert_eq!(own.open_inodes("/no such").unwrap(), [0; 0]);
    }

    /// Any user can make both.
    #[test]
    fn a_name_of_any_bytes_and_a_deep_program_are_no_error() {
        use std::io::Write;
        use std::process::{Command, Stdio};
        let home = tempfile::tempdir().unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut deep = open(home.path(), flags, Mode::empty()).unwrap();
        for _ in 0..17 {
            let name = "a".repeat(255);
            mkdirat(&deep, name.as_str(), Mode::RWXU).unwrap();
            deep = openat(&deep, name.as_str(), flags, Mode::empty()).unwrap();
        }
        let program = PathBuf::from(format!("/proc/self/fd/{}", deep.as_raw_fd()))
            .join(OsStr::from_bytes(b"\xff\xfe"));
        // Another process makes the copy: a program that another test starts meanwhile would
        // inherit the open file, and a file that is open for writing cannot be executed (ETXTBSY).
        let cat = home.path().join("cat");
        assert!(Command::new("cp").arg("/bin/cat").arg(&cat).status().unwrap().success());
        fs::rename(&cat, &program).unwrap();
        let piped = Stdio::piped;
        let mut child = Command::new(&program).stdin(piped()).stdout(piped()).spawn().unwrap();
        // execve(2) lets the parent go on before the process has its new name. Output of the
        // program shows that it has.
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let process = Process::open(child.id() as i32).unwrap();
        let status = fs::read(process.proc("status")).unwrap();
        let found = (process.user(), process.program());
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(std::str::from_utf8(&status).is_err());
        assert_eq!(found.0.unwrap(), Process::own().unwrap().user().unwrap());
        assert_eq!(found.1.unwrap(), PathBuf::new());
    }

    /// The bound is lower in tests: not every user may open that many.
    #[test]
    fn who_is_not_meant_has_as_many_descriptors_as_he_likes() {
        use std::io::{BufRead, BufReader};
        use std::process::{Command, Stdio};
        let home = tempfile::tempdir().unwrap();
        let me = std::env::current_exe().unwrap();
        let test = "process::tests::opens_more_than_any_vmm";
        let mut child = Command::new(me)
            .args([test, "--exact", "--ignored", "--nocapture"])
            .current_dir(home.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains("all are open")));
        let pid = child.id() as i32;
        let others = Process::all_with(home.path(), |process| Ok(process.pid() != pid)).unwrap();
        assert!(others.is_empty());
        let error = Process::all_with(home.path(), |process| Ok(process.pid() == pid));
        let error = error.err().expect("too many to look at");
        assert!(error.to_string().contains("too many"), "{error}");
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }

    #[test]
    #[ignore = "who_is_not_meant_has_as_many_descriptors_as_he_likes runs it in a process of its own"]
    fn opens_more_than_any_vmm() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
        let one = File::open("/dev/null").unwrap();
        let copy = |_| one.try_clone().unwrap();
        let mut all: Vec<File> = (0..DESCRIPTORS_MAX).map(copy).collect();
        all.push(File::open(".").unwrap());
        println!("all are open");
        io::stdin().read_to_end(&mut Vec::new()).unwrap();
    }

    #[test]
    fn a_mount_is_known_by_its_number_and_type() {
        let line = "36 35 98:0 / /a\\040-\\040b rw,noatime master:1 - fuse.sshfs host: rw";
        assert_eq!(parse_mount(line), Some((36, "fuse.sshfs".into())));
        assert_eq!(parse_mount("36 35 98:0 / /a rw"), None);
    }

    #[test]
    fn sees_this_very_process() {
        let me = Process::open(std::process::id() as i32).unwrap();
        assert!(!me.has_ended().unwrap());
        assert!(me.start_ticks().unwrap() > 0);
        assert!(me.mappings().unwrap().len() > 3);
        let counted = me.descriptor_count().unwrap();
        assert!(counted.is_none_or(|count| count >= 3), "{counted:?}");
        let file = crate::ram_file::RamFile::create("process-test", 4096).unwrap();
        let (inode, fd) = (file.identity().unwrap().1, file.as_fd().as_raw_fd());
        assert!(me.open_inodes("/memfd:process-test").unwrap().contains(&inode));
        assert_eq!(me.descriptor_inode(fd).unwrap(), Some(inode));
        assert_eq!(me.descriptor_inode(i32::MAX).unwrap(), None);
        let copy = me.descriptor(0);
        assert!(copy.is_ok(), "{copy:?}");
    }
}
