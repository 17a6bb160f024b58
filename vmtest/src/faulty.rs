//! A disk that fails on request: a file system by FUSE, served by the test itself.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};
use rustix::fs::{FallocateFlags, fallocate};
use tempfile::TempDir;
use testkit::{Undo, undo};

const BLOCK_BYTES: u32 = 4096;
/// Names and attributes are asked for each time.
const NEVER_OLD: Duration = Duration::ZERO;
const THREADS: usize = 4;

/// What the disk does from now on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failing {
    /// It works.
    Nothing,
    /// Reads fail: EIO.
    Reads,
    /// Writes fail: EIO.
    Writes,
    /// There is no room: ENOSPC.
    Full,
    /// Each read and write takes this much longer.
    Slow(Duration),
}

/// A directory on a disk of its own, mounted until this is dropped.
pub struct FaultyDisk {
    mount: TempDir,
    state: Arc<Mutex<State>>,
    // Dropped first: it ends the mount.
    session: Option<BackgroundSession>,
    /// For a process that ends before this is dropped.
    _unmounted: Undo,
}

struct State {
    failing: Failing,
    names: BTreeMap<OsString, u64>,
    files: Vec<Arc<File>>,
}

impl FaultyDisk {
    /// An empty disk that works.
    ///
    /// # Errors
    /// This host has no FUSE.
    pub fn new() -> Result<FaultyDisk, String> {
        let mount = tempfile::tempdir().map_err(|error| error.to_string())?;
        let state = State { failing: Failing::Nothing, names: BTreeMap::new(), files: Vec::new() };
        let state = Arc::new(Mutex::new(state));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("faulty".into())];
        config.n_threads = Some(THREADS);
        let session = fuser::spawn_mount(Served(Arc::clone(&state)), mount.path(), &config);
        let session = session.map_err(|error| format!("no file system by FUSE: {error}"))?;
        let at = mount.path().to_owned();
        let unmounted = Undo::new(move || {
            // It fails where the session has ended: then there is nothing to undo.
            let _ = undo::helper("umount").arg("--lazy").arg(&at).output();
        });
        Ok(FaultyDisk { mount, state, session: Some(session), _unmounted: unmounted })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.mount.path()
    }

    /// Sets how the disk fails, or that it works again.
    pub fn set(&self, failing: Failing) {
        lock(&self.state).failing = failing;
    }
}

impl Drop for FaultyDisk {
    fn drop(&mut self) {
        self.set(Failing::Nothing);
        if let Some(session) = self.session.take()
            && let Err(error) = session.umount_and_join()
        {
            eprintln!("{}: {error}", self.mount.path().display());
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Served(Arc<Mutex<State>>);

impl Served {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    fn find(&self, name: &OsStr) -> Option<(u64, Arc<File>)> {
        let state = self.state();
        let number = *state.names.get(name)?;
        Some((number, Arc::clone(&state.files[number as usize])))
    }

    fn file(&self, inode: INodeNo) -> Result<Arc<File>, Errno> {
        let index = u64::from(inode).checked_sub(FIRST).ok_or(Errno::EISDIR)?;
        self.state().files.get(index as usize).cloned().ok_or(Errno::ENOENT)
    }

    /// Delays or fails a read or write, as set now.
    fn meet(&self, writes: bool) -> Result<(), Errno> {
        let failing = self.state().failing;
        match failing {
            Failing::Reads if !writes => Err(Errno::EIO),
            Failing::Writes if writes => Err(Errno::EIO),
            Failing::Full if writes => Err(Errno::ENOSPC),
            Failing::Slow(time) => {
                thread::sleep(time);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Inode number of the first file; the root has 1.
const FIRST: u64 = 2;

fn root() -> FileAttr {
    attributes(1, FileType::Directory, 0, 0)
}

fn attributes(inode: u64, kind: FileType, size: u64, blocks: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(inode),
        size,
        blocks,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: 0o700,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        flags: 0,
        blksize: BLOCK_BYTES,
    }
}

fn of_file(index: u64, file: &File) -> Result<FileAttr, Errno> {
    let found = file.metadata()?;
    Ok(attributes(index + FIRST, FileType::RegularFile, found.len(), found.blocks()))
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.find(name).ok_or(Errno::ENOENT);
        match found.and_then(|(index, file)| of_file(index, &file)) {
            Ok(attributes) => reply.entry(&NEVER_OLD, &attributes, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        if u64::from(inode) < FIRST {
            return reply.attr(&NEVER_OLD, &root());
        }
        match self.file(inode).and_then(|file| of_file(u64::from(inode) - FIRST, &file)) {
            Ok(attributes) => reply.attr(&NEVER_OLD, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if u64::from(inode) < FIRST {
            return reply.attr(&NEVER_OLD, &root());
        }
        let set = self.file(inode).and_then(|file| {
            size.map_or(Ok(()), |size| file.set_len(size))?;
            of_file(u64::from(inode) - FIRST, &file)
        });
        match set {
            Ok(attributes) => reply.attr(&NEVER_OLD, &attributes),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn create(
        &self,
        _: &Request,
        _: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let made = tempfile::tempfile().map_err(Errno::from).and_then(|file| {
            let mut state = self.state();
            let index = state.files.len() as u64;
            let attributes = of_file(index, &file)?;
            state.files.push(Arc::new(file));
            state.names.insert(name.to_owned(), index);
            Ok(attributes)
        });
        let flags = FopenFlags::FOPEN_DIRECT_IO;
        match made {
            Ok(made) => reply.created(&NEVER_OLD, &made, Generation(0), FileHandle(0), flags),
            Err(error) => reply.error(error),
        }
    }

    fn unlink(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        match self.state().names.remove(name) {
            Some(_) => reply.ok(),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut bytes = vec![0; size as usize];
        let read = self.meet(false).and_then(|()| self.file(inode));
        match read.and_then(|file| Ok(file.read_at(&mut bytes, offset)?)) {
            Ok(count) => reply.data(&bytes[..count]),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.meet(true).and_then(|()| self.file(inode));
        match written.and_then(|file| Ok(file.write_all_at(data, offset)?)) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn fallocate(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let mode = FallocateFlags::from_bits_truncate(mode as u32);
        let grows = !mode.contains(FallocateFlags::PUNCH_HOLE);
        let met = if grows { self.meet(true) } else { Ok(()) };
        let file = met.and_then(|()| self.file(inode));
        let done = file.and_then(|file| {
            fallocate(&*file, mode, offset, length)
                .map_err(|error| Errno::from_i32(error.raw_os_error()))
        });
        match done {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        match self.meet(true) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let free = if self.state().failing == Failing::Full { 0 } else { 1 << 20 };
        reply.statfs(1 << 20, free, free, 1000, 1000, BLOCK_BYTES, 255, BLOCK_BYTES);
    }
}
