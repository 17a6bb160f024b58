//! The descriptors of a process, as `/proc/PID/fd` and its neighbours tell of them.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use super::{Process, file_of, is_no_process, line_of, link_of};

/// The most descriptors to look at. No VMM has more: its devices take a few each.
pub(super) const DESCRIPTORS_MAX: usize = if cfg!(test) { 1 << 12 } else { 1 << 16 };

/// The most bytes to read of what the kernel says about one descriptor.
const INFO_BYTES_MAX: u64 = 256 << 10;

impl Process {
    pub(super) fn has_open(&self, (name, file): (&str, (u64, u64))) -> io::Result<bool> {
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
                Err(error) if is_no_process(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
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

    /// Whether its descriptor `fd` and our `own` share one open file. `false` if it has no such
    /// descriptor.
    ///
    /// # Errors
    /// As kcmp(2).
    pub fn shares(&self, fd: i32, own: impl AsFd) -> io::Result<bool> {
        const FILE: libc::c_int = 0;
        let (me, own) = (rustix::process::getpid().as_raw_nonzero().get(), own.as_fd());
        // SAFETY: this call takes five integers and touches no memory of ours.
        let order =
            unsafe { libc::syscall(libc::SYS_kcmp, me, self.pid(), FILE, own.as_raw_fd(), fd) };
        match order {
            0.. => Ok(order == 0),
            _ => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::EBADF) => Ok(false),
                error => Err(error),
            },
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

    /// Whether its userfaultfd `fd` may watch memory. Before its handshake, it cannot.
    ///
    /// # Errors
    /// As [`Process::descriptor_info`]. `InvalidData`: the kernel does not tell.
    pub fn may_watch(&self, fd: i32) -> io::Result<bool> {
        let info = self.descriptor_info(fd)?;
        // `API:` is followed by version, features and ioctls, in hexadecimal digits. The handshake
        // adds a feature of the kernel's own.
        let features = line_of(info.as_bytes(), "API:")
            .and_then(|api| u64::from_str_radix(api.split(':').nth(1)?, 16).ok());
        Ok(features.ok_or(io::ErrorKind::InvalidData)? != 0)
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
}

/// Returns the inode number of a file. Asks no file system, so none can make the caller wait.
fn inode_of(path: &Path) -> io::Result<u64> {
    Ok(statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO)?.stx_ino)
}
