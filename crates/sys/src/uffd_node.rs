//! Nodes of `/dev/userfaultfd`, by which a process without privilege gets a userfaultfd.

use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::thread::CapabilitySet;

use crate::uffd::Uffd;
use crate::user_namespace::UserNamespace;

/// The major number of `/dev/userfaultfd`.
const MISC_MAJOR: u32 = 10;
/// Lists the minor number of `/dev/userfaultfd`. Each boot assigns a new one, and the device with
/// that number on another host may be any.
const MISC: &str = "/proc/misc";
const NAME: &str = "userfaultfd";
const HOSTS: &str = "/dev/userfaultfd";
/// The host's setting. `1`: every process gets a userfaultfd without a node.
const OPEN_TO_ALL: &str = "/proc/sys/vm/unprivileged_userfaultfd";

/// What to do in a user namespace.
pub const NAMESPACE_ADVICE: &str =
    "set vm.unprivileged_userfaultfd=1 on the host, or run ebbd in no user namespace";

/// A node that exists for a moment, and that one user and nobody else may open. If the process that
/// makes one is killed, the process that started it removes what is left.
pub struct Node {
    directory: PathBuf,
}

impl Node {
    /// Returns the node of the process with this PID.
    pub fn of(pid: u32) -> Node {
        Node { directory: Path::new("/dev").join(format!("ebb-{pid}")) }
    }

    /// Makes the node of this process, for `user`.
    ///
    /// # Errors
    /// `ENODEV`: this kernel has no such device. Otherwise as mkdir(2), mknod(2) and chown(2);
    /// [`why_closed`] explains them.
    pub fn make(user: u32) -> io::Result<Node> {
        let minor = minor_in(&fs::read_to_string(MISC)?).ok_or(Errno::NODEV)?;
        let node = Node::of(std::process::id());
        fs::create_dir(&node.directory)?;
        fs::set_permissions(&node.directory, Permissions::from_mode(0o711))?;
        let device = makedev(MISC_MAJOR, minor);
        mknodat(CWD, node.path(), FileType::CharacterDevice, Mode::empty(), device)?;
        fs::set_permissions(node.path(), Permissions::from_mode(0o600))?;
        chown(node.path(), Some(user), None)?;
        Ok(node)
    }

    /// Its path.
    ///
    /// # Errors
    /// None in practice.
    pub fn name(&self) -> io::Result<CString> {
        CString::new(self.path().into_os_string().into_encoded_bytes()).map_err(io::Error::other)
    }

    /// Opens it, as a VMM does.
    ///
    /// # Errors
    /// As open(2); [`why_closed`] explains them.
    pub fn open(&self) -> io::Result<File> {
        File::options().read(true).write(true).open(self.path())
    }

    fn path(&self) -> PathBuf {
        self.directory.join("userfaultfd")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        match fs::remove_dir_all(&self.directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                eprintln!("{}: {error}", self.directory.display());
            }
            _ => {}
        }
    }
}

/// Parses the minor number in lines such as ` 257 userfaultfd`.
fn minor_in(misc: &str) -> Option<u32> {
    let mut words = misc.lines().map(|line| line.split_ascii_whitespace());
    words.find_map(|mut words| {
        let minor = words.next()?.parse().ok()?;
        (words.next()? == NAME).then_some(minor)
    })
}

/// Makes a userfaultfd over this process's own memory, even where it may not call userfaultfd(2): a
/// container's filter of system calls may deny that to root.
///
/// # Errors
/// As [`Uffd::new`], or why the device is closed, with what to do.
pub fn own_uffd() -> io::Result<Uffd> {
    Uffd::new().or_else(by_device)
}

/// Opens `/dev/userfaultfd` itself, for a process that cannot.
///
/// # Errors
/// As open(2); [`why_closed`] explains them.
pub fn open_device() -> io::Result<File> {
    open_own(Path::new(HOSTS))
}

fn by_device(denied: io::Error) -> io::Result<Uffd> {
    if denied.raw_os_error() != Some(Errno::PERM.raw_os_error()) {
        return Err(denied);
    }
    let device = open_device().map_err(|error| {
        let (why, advice) = why_closed(&error);
        io::Error::new(error.kind(), format!("{why}: {advice}"))
    })?;
    Uffd::of_device(&device)
}

/// Lets one thread at a time make the node: all would make the same.
static ONE: Mutex<()> = Mutex::new(());

/// Opens the host's own node if that is possible here, otherwise one made for the moment.
fn open_own(host: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(host).or_else(|_| {
        let _alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        Node::make(geteuid().as_raw())?.open()
    })
}

/// Whether every process gets a userfaultfd without a node.
pub fn is_needless() -> bool {
    fs::read_to_string(OPEN_TO_ALL).is_ok_and(|text| text.trim() == "1")
}

/// Says why no node can be made or opened, and what to do.
pub fn why_closed(error: &io::Error) -> (String, &'static str) {
    let is_whole = UserNamespace::own().is_ok_and(|namespace| namespace.is_whole());
    let has =
        rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |has| has.effective);
    explain(error, !is_whole, has.contains(CapabilitySet::MKNOD))
}

fn explain(error: &io::Error, in_namespace: bool, may_make: bool) -> (String, &'static str) {
    let is_any = |errnos: &[Errno]| {
        errnos.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
    };
    let (why, advice) = match in_namespace {
        true if is_any(&[Errno::PERM, Errno::ACCESS]) => {
            ("no node of /dev/userfaultfd can be made in a user namespace", NAMESPACE_ADVICE)
        }
        _ if is_any(&[Errno::PERM, Errno::ACCESS]) && !may_make => (
            "ebbd lacks CAP_MKNOD, so it cannot make a node of /dev/userfaultfd",
            "run it as root; in a container with --cap-add MKNOD or --privileged",
        ),
        _ if is_any(&[Errno::PERM]) => (
            "a device control group, as containers have one, keeps /dev/userfaultfd closed",
            "start the container with --device /dev/userfaultfd, the device rule c 10:N rwm, where \
             /proc/misc has N userfaultfd, or --privileged",
        ),
        _ if is_any(&[Errno::ACCESS]) => (
            "/dev is mounted so that no device can be opened there",
            "mount it without nodev, or set vm.unprivileged_userfaultfd=1",
        ),
        _ if is_any(&[Errno::NXIO, Errno::NODEV]) => (
            "the kernel has no /dev/userfaultfd, which came with 6.1",
            "boot a newer one, or set vm.unprivileged_userfaultfd=1",
        ),
        _ if is_any(&[Errno::NOENT]) => (
            "the process has a /dev of its own, in which no node can be put",
            "set vm.unprivileged_userfaultfd=1",
        ),
        _ => ("a node of /dev/userfaultfd", "set vm.unprivileged_userfaultfd=1"),
    };
    (format!("{why} ({error})"), advice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uffd::feature;

    fn reason(errno: Errno, in_namespace: bool, may_make: bool) -> String {
        let (why, advice) = explain(&errno.into(), in_namespace, may_make);
        format!("{why}: {advice}")
    }

    #[test]
    fn a_closed_device_names_its_rule() {
        let line = reason(Errno::PERM, false, true);
        for word in ["device control group", "--device /dev/userfaultfd", "c 10:N rwm"] {
            assert!(line.contains(word), "{word}: {line}");
        }
        assert!(!line.contains('\n'));
    }

    #[test]
    fn the_number_is_this_boots() {
        let misc = "259 cpu_dma_latency\n 61 userfaultfd\n256 vga_arbiter\n";
        assert_eq!(minor_in(misc), Some(61));
        assert_eq!(minor_in("256 vga_arbiter\n61 userfaultfds\nx\n\n"), None);
    }

    #[test]
    fn each_reason_has_its_own_advice() {
        assert!(reason(Errno::PERM, true, true).contains("user namespace"));
        for denied in [Errno::PERM, Errno::ACCESS] {
            assert!(reason(denied, false, false).contains("CAP_MKNOD"), "{denied}");
        }
        assert!(reason(Errno::ACCESS, false, true).contains("nodev"));
        assert!(reason(Errno::NODEV, false, true).contains("6.1"));
        assert!(reason(Errno::NOENT, false, true).contains("/dev of its own"));
        assert!(reason(Errno::NOSPC, false, true).contains("No space"));
    }

    #[test]
    fn a_node_is_removed_when_it_is_dropped() {
        let _alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        match Node::make(0) {
            Ok(node) => {
                let directory = node.directory.clone();
                assert!(directory.join("userfaultfd").exists());
                drop(node);
                assert!(!directory.exists());
            }
            Err(error) => eprintln!("SKIPPED: no node can be made here: {error}"),
        }
    }

    #[test]
    fn a_process_denied_the_call_uses_the_device() {
        let error = by_device(Errno::NOSYS.into()).err().expect("no kernel has it");
        assert_eq!(error.raw_os_error(), Some(Errno::NOSYS.raw_os_error()));
        match by_device(Errno::PERM.into()) {
            Ok(uffd) => assert!(uffd.handshake(feature::needed()).is_ok()),
            Err(error) => eprintln!("SKIPPED: {error}"),
        }
    }

    #[test]
    fn threads_that_make_a_node_at_once_are_not_in_each_others_way() {
        let opened: Vec<_> = std::thread::scope(|scope| {
            let open = || (0..50).map(|_| open_own(Path::new("/dev/none"))).collect::<Vec<_>>();
            let threads = [(); 4].map(|()| scope.spawn(open));
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        for opened in opened {
            match opened.map(|device| Uffd::of_device(&device).map(drop)) {
                Ok(made) => made.unwrap(),
                Err(error) => {
                    let kind = error.kind();
                    let expected = [io::ErrorKind::AlreadyExists, io::ErrorKind::NotFound];
                    assert!(!expected.contains(&kind), "{error}");
                    eprintln!("SKIPPED: no node can be made here: {error}");
                }
            }
        }
    }
}
