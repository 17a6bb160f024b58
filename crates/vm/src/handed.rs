//! What a QEMU inherits: it opens nothing by a path that only root may go.

use std::fs::{File, Permissions};
use std::io::{self, Seek};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use ebb_sys::confine::Child;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};

use crate::launch::{Launch, Memory, Node};

/// The directory, beside its record, of sockets that a VM's QEMU connects to.
const SOCKETS: &str = "sockets";

/// Where sockets are that the QEMU of a VM connects to: it inherits this directory, and all
/// others are closed to it. The VM's own directory for one that was started without.
pub fn socket_directory(vm: &Path) -> PathBuf {
    let sockets = vm.join(SOCKETS);
    if sockets.is_dir() { sockets } else { vm.to_owned() }
}

/// Makes that directory for a VM that is to be started.
///
/// # Errors
/// As mkdir(2): it is there already.
pub fn make_socket_directory(vm: &Path) -> io::Result<()> {
    let sockets = vm.join(SOCKETS);
    std::fs::create_dir(&sockets)?;
    // Beyond the VM's directory, which is root's alone, only who has a descriptor gets here.
    std::fs::set_permissions(&sockets, Permissions::from_mode(0o711))
}

/// Lets whoever reaches this socket connect to it.
///
/// # Errors
/// As chmod(2).
pub fn admit(socket: &Path) -> io::Result<()> {
    std::fs::set_permissions(socket, Permissions::from_mode(0o666))
}

/// The numbers and names by which a QEMU finds what it inherits.
pub(crate) struct Handed {
    /// Of each node its RAM, and what can be plugged.
    pub nodes: Vec<(RawFd, Option<RawFd>)>,
    /// A socket to listen at, for QMP.
    pub qmp: RawFd,
    /// One for the console.
    pub console: RawFd,
    /// The directory of sockets to connect to.
    pub sockets: RawFd,
    /// The kernel to boot.
    pub kernel: Option<PathBuf>,
    /// Its initial RAM disk.
    pub initrd: Option<PathBuf>,
}

impl Handed {
    /// Opens it all for the QEMU that is to be started.
    pub(crate) fn open(launch: &Launch<'_>, child: &mut Child) -> io::Result<Handed> {
        let each = |node: &Node, child: &mut Child| -> io::Result<_> {
            let ram = child.inherit(copy(&node.ram)?);
            let growth = node.growth.as_ref().map(copy).transpose()?;
            Ok((ram, growth.map(|growth| child.inherit(growth))))
        };
        let nodes = launch.nodes.iter().map(|node| each(node, child)).collect::<io::Result<_>>()?;
        let sockets = rustix::fs::open(
            socket_directory(launch.directory),
            rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )?;
        let mut readable = |file: &Path| match public(file) {
            Some(path) => Ok(path),
            None => Ok::<_, io::Error>(by_number(child.inherit(sealed(file)?))),
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

    /// The path by which it reaches a socket in their directory.
    pub(crate) fn socket(&self, socket: &Path) -> PathBuf {
        by_number(self.sockets).join(socket.file_name().unwrap_or_default())
    }
}

/// The path of a descriptor for the process that has it.
pub(crate) fn by_number(number: RawFd) -> PathBuf {
    format!("/proc/self/fd/{number}").into()
}

fn copy(memory: &Memory) -> io::Result<OwnedFd> {
    memory.file.as_fd().try_clone_to_owned()
}

/// A socket of this name. QEMU itself begins to listen there: who connects sees by that whose it is.
fn bound(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The path without links of a file that every user may read, as far as modes tell.
fn public(path: &Path) -> Option<PathBuf> {
    let path = path.canonicalize().ok()?;
    let mode = |path: &Path| path.metadata().map_or(0, |found| found.mode());
    let is_open = path.ancestors().skip(1).all(|above| mode(above) & 0o001 != 0);
    (mode(&path) & 0o004 != 0 && is_open).then_some(path)
}

/// A copy in memory, which cannot be changed.
fn sealed(path: &Path) -> io::Result<OwnedFd> {
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let mut from = File::open(path).map_err(named)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut copy = File::from(memfd_create("ebb-boot", flags)?);
    io::copy(&mut from, &mut copy).map_err(named)?;
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
    use std::io::Read;

    #[test]
    fn what_only_root_may_read_is_a_sealed_copy() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vmlinuz");
        std::fs::write(&path, "a kernel").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(public(&path), None);
        let mut copy = File::from(sealed(&path).unwrap());
        let mut text = String::new();
        copy.read_to_string(&mut text).unwrap();
        assert_eq!(text, "a kernel");
        assert!(copy.set_len(1).is_err());
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
    fn a_bound_socket_has_nobody_behind_it_yet() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sock");
        let _bound = bound(&path).unwrap();
        let error = std::os::unix::net::UnixStream::connect(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
