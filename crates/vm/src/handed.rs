//! What QEMU inherits, so that it opens nothing by a path that only root may use.

use std::fs::{File, Permissions};
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use ebb_sys::confine::Child;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};

use crate::launch::{Launch, LaunchMemory, Node};

/// Name of the directory, beside the VM's record, with the sockets that its QEMU connects to.
const SOCKETS: &str = "sockets";
const TOO_LARGE: &str = "it is larger than the VM's memory: give the VM more by --memory";

/// The directory with the sockets that a VM's QEMU connects to. QEMU inherits this directory, and
/// all others are closed to it. For a VM that was started without one, it is the VM's own
/// directory.
pub fn socket_directory(vm: &Path) -> PathBuf {
    let sockets = vm.join(SOCKETS);
    if sockets.is_dir() { sockets } else { vm.to_owned() }
}

/// Makes the socket directory of a VM that is to be started.
///
/// # Errors
/// As mkdir(2), also if it exists.
pub fn make_socket_directory(vm: &Path) -> io::Result<()> {
    let sockets = vm.join(SOCKETS);
    std::fs::create_dir(&sockets)?;
    // Only root may enter the VM's directory above it. Anybody else needs a descriptor to get here.
    std::fs::set_permissions(&sockets, Permissions::from_mode(0o711))
}

/// Lets everybody who can reach this socket connect to it.
///
/// # Errors
/// As chmod(2).
pub fn admit(socket: &Path) -> io::Result<()> {
    std::fs::set_permissions(socket, Permissions::from_mode(0o666))
}

/// The numbers and names by which QEMU finds what it inherits.
pub(crate) struct Handed {
    /// RAM of each node, and the memory that it can plug.
    pub nodes: Vec<(RawFd, Option<RawFd>)>,
    /// The socket to listen on for QMP.
    pub qmp: RawFd,
    /// The socket to listen on for the console.
    pub console: RawFd,
    /// The directory with the sockets to connect to.
    pub sockets: RawFd,
    /// Path of the kernel to boot.
    pub kernel: Option<PathBuf>,
    /// Path of its initial RAM disk.
    pub initrd: Option<PathBuf>,
}

impl Handed {
    /// Opens all of it for the QEMU that is to be started.
    pub(crate) fn open(launch: &Launch<'_>, child: &mut Child) -> io::Result<Handed> {
        let each = |node: &Node, child: &mut Child| -> io::Result<_> {
            let ram = child.inherit(copy(&node.ram)?);
            let growth = node.growth.as_ref().map(copy).transpose()?;
            Ok((ram, growth.map(|growth| child.inherit(growth))))
        };
        let nodes = launch.nodes.iter().map(|node| each(node, child)).collect::<io::Result<_>>()?;
        let sockets = rustix::fs::open(
            socket_directory(launch.directory),
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let room = launch.nodes.iter().map(|node| node.ram.bytes).sum();
        let mut readable = |file: &Path| {
            let opened = boot_file(file, room).map_err(|error| named(file, &error))?;
            match public(file) {
                Some(path) => Ok(path),
                None => {
                    let copy = sealed(&opened, room).map_err(|error| named(file, &error))?;
                    Ok::<_, io::Error>(by_number(child.inherit(copy)))
                }
            }
        };
        let kernel = launch.kernel.map(&mut readable).transpose()?;
        let initrd = launch.initrd.map(&mut readable).transpose()?;
        Ok(Handed {
            nodes,
            qmp: child.inherit(bound(&launch.qmp_path())?),
            console: child.inherit(bound(&launch.directory.join("console.qemu"))?),
            sockets: child.inherit(sockets),
            kernel,
            initrd,
        })
    }

    /// Same as [`Handed::open`], with nothing opened.
    pub(crate) fn outline(launch: &Launch<'_>) -> Handed {
        Handed {
            nodes: launch.nodes.iter().map(|node| (0, node.growth.as_ref().map(|_| 0))).collect(),
            qmp: 0,
            console: 0,
            sockets: 0,
            kernel: launch.kernel.map(Path::to_owned),
            initrd: launch.initrd.map(Path::to_owned),
        }
    }

    /// The path by which QEMU reaches a socket in that directory.
    pub(crate) fn socket(&self, socket: &Path) -> PathBuf {
        by_number(self.sockets).join(socket.file_name().unwrap_or_default())
    }
}

/// The path of a descriptor for the process that has it.
pub(crate) fn by_number(number: RawFd) -> PathBuf {
    format!("/proc/self/fd/{number}").into()
}

fn copy(memory: &LaunchMemory) -> io::Result<OwnedFd> {
    memory.file.as_fd().try_clone_to_owned()
}

/// A socket bound to this path. QEMU itself begins to listen on it, so a client sees whose it is.
fn bound(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// An error about this file. Its kind is `Other`, so that it is not taken for one about QEMU
/// itself.
fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::other(format!("{}: {error}", path.display()))
}

/// The path without links of a file that every user may read, as far as modes tell. `None` for
/// other files.
fn public(path: &Path) -> Option<PathBuf> {
    let path = path.canonicalize().ok()?;
    let mode = |path: &Path| path.metadata().map_or(0, |found| found.mode());
    let is_open = path.ancestors().skip(1).all(|above| mode(above) & 0o001 != 0);
    (mode(&path) & 0o004 != 0 && is_open).then_some(path)
}

/// Opens a kernel or an initial RAM disk for a guest with `room` bytes of memory. Opens regular
/// files only: opening another one may wait, have a side effect, or give data without end.
fn boot_file(path: &Path, room: u64) -> io::Result<File> {
    let no = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    let place = File::from(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
    let found = place.metadata()?;
    if !found.is_file() {
        return no("it is no regular file: give the kernel or RAM disk itself");
    }
    if found.len() > room {
        return no(TOO_LARGE);
    }
    // This opens the same file, whatever has its name by now.
    File::open(by_number(place.as_raw_fd()))
}

/// Copies at most `most` bytes into memory that cannot be changed.
fn sealed(from: &File, most: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut copy = File::from(memfd_create("ebb-boot", flags)?);
    // The file may grow, or its file system may not tell its size.
    if io::copy(&mut from.take(most.saturating_add(1)), &mut copy)? > most {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, TOO_LARGE));
    }
    copy.rewind()?;
    fcntl_add_seals(
        &copy,
        SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    Ok(copy.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_for_root_alone_becomes_a_sealed_copy() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmlinuz");
        std::fs::write(&path, "a kernel").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(public(&path), None);
        let mut copy = File::from(sealed(&boot_file(&path, 8).unwrap(), 8).unwrap());
        let mut text = String::new();
        copy.read_to_string(&mut text).unwrap();
        assert_eq!(text, "a kernel");
        assert!(copy.set_len(1).is_err());
    }

    #[test]
    fn a_boot_file_of_another_kind_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR).unwrap();
        // An open(2) that waits for a writer would never return.
        for path in [path.as_path(), Path::new("/dev/zero"), directory.path()] {
            let error = boot_file(path, u64::MAX).unwrap_err();
            assert!(error.to_string().contains("no regular file"), "{error}");
        }
    }

    #[test]
    fn a_boot_file_that_does_not_fit_into_the_guest_is_not_copied() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("initrd");
        std::fs::write(&path, [0; 4097]).unwrap();
        let error = boot_file(&path, 4096).unwrap_err();
        assert!(error.to_string().contains("--memory"), "{error}");
        // The file was still short when it was opened.
        let opened = boot_file(&path, 4097).unwrap();
        assert!(sealed(&opened, 4096).unwrap_err().to_string().contains("--memory"));
        assert!(sealed(&opened, 4097).is_ok());
    }

    #[test]
    fn a_public_file_below_a_closed_directory_is_not_public() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmlinuz");
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o700)).unwrap();
        assert_eq!(public(&path), None);
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o711)).unwrap();
        assert_eq!(public(&path), path.canonicalize().ok());
    }

    #[test]
    fn a_bound_socket_has_no_server_yet() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sock");
        let _bound = bound(&path).unwrap();
        let error = std::os::unix::net::UnixStream::connect(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
