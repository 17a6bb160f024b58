//! Whether a process may be managed. Each refusal is one clear line, given before anything has been
//! changed.

use std::io;
use std::path::{Path, PathBuf};

use ebb_sys::process::Process;
use rustix::io::Errno;

use crate::command_line::{CommandLine, key, parts};
use crate::dial::{UnixSocket, has_client};
use crate::libvirt;
use crate::monitor::Monitor;
use crate::qmp::{ANSWER_TIMEOUT, Qmp, QmpError};
use crate::reach::{self, MemoryUser, Reach};

/// Why a process cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum AttachRefusal {
    /// No process has this PID.
    #[error("there is no process {0}")]
    NoProcess(i32),
    /// The kernel does not permit Ebb to inspect the process.
    #[error("Ebb may not inspect process {pid} ({source}): run ebbd as root")]
    NotPermitted {
        /// The process's PID.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The process is not QEMU, or is one without a control socket.
    #[error(
        "process {pid} ({command}) shows no QMP socket: give it with --qmp SOCK; a process that \
         is no QEMU cannot be managed"
    )]
    NoQmp {
        /// The process's PID.
        pid: i32,
        /// The program that it runs.
        command: String,
    },
    /// QMP is on a TCP port.
    #[error(
        "process {0} has its QMP on TCP, and Ebb needs a UNIX socket: start QEMU with -qmp \
         unix:PATH,server=on,wait=off, beside what it has"
    )]
    Tcp(i32),
    /// libvirt is connected to the socket, and is not the one of this host that can be asked.
    #[error(
        "libvirt holds {path}, which serves one client at a time, and Ebb can ask only the libvirt \
         of this host's qemu:///system: give process {pid} a second monitor, in the domain's XML by \
         <qemu:commandline> with <qemu:arg value='-qmp'/> and \
         <qemu:arg value='unix:PATH,server=on,wait=off'/>, and start the domain again"
    )]
    Libvirt {
        /// Path of the socket.
        path: PathBuf,
        /// PID of the process.
        pid: i32,
    },
    /// libvirt has the only monitor, and does not have Ebb ask there.
    #[error("libvirt holds the only monitor of process {pid}, and cannot be asked: {why}")]
    ByLibvirt {
        /// PID of the process.
        pid: i32,
        /// What libvirt says, or what it does not.
        why: String,
    },
    /// The socket belongs to another process.
    #[error("the QMP socket {path} belongs to process {owner}, not to {pid}")]
    OtherQmp {
        /// Path of the socket.
        path: PathBuf,
        /// PID of the process that the socket belongs to.
        owner: i32,
        /// PID of the process that was asked for.
        pid: i32,
    },
    /// QMP failed.
    #[error("the QMP socket {path}: {source}")]
    Qmp {
        /// Path of the socket.
        path: PathBuf,
        /// The QMP error.
        source: QmpError,
    },
    /// A device reaches the memory by itself, so that all of it must stay.
    #[error("process {pid} cannot be managed because of {device}")]
    Device {
        /// The process's PID.
        pid: i32,
        /// The device that is in the way.
        device: MemoryUser,
    },
    /// Another process serves the faults, or the VMM itself does.
    #[error(
        "process {0} has a userfaultfd already: another pager or another ebbd uses it, or QEMU \
         itself does until its postcopy migration or background snapshot is over"
    )]
    OtherUserfaultfd(i32),
}

/// Opens a process that may be managed.
///
/// # Errors
/// [`AttachRefusal`].
pub fn open(pid: i32) -> Result<Process, AttachRefusal> {
    let process = Process::open(pid).map_err(|source| match source.raw_os_error() {
        Some(code) if code == Errno::SRCH.raw_os_error() => AttachRefusal::NoProcess(pid),
        _ => AttachRefusal::NotPermitted { pid, source },
    })?;
    let descriptors = process.descriptors();
    let descriptors = descriptors.map_err(|source| AttachRefusal::NotPermitted { pid, source })?;
    may_be_managed(pid, &reach::of_descriptors(descriptors.iter().map(|(_, link)| link.as_str())))?;
    match descriptors.iter().any(|(_, link)| link == "anon_inode:[userfaultfd]") {
        true => Err(AttachRefusal::OtherUserfaultfd(pid)),
        false => Ok(process),
    }
}

/// Checks that these devices leave some memory that may be reclaimed.
///
/// # Errors
/// [`AttachRefusal::Device`], with the device that is in the way.
pub fn may_be_managed(pid: i32, devices: &[MemoryUser]) -> Result<(), AttachRefusal> {
    let blocking = reach::narrowest(devices).filter(|found| found.kind.reach() == Reach::Nothing);
    blocking.map_or(Ok(()), |found| Err(AttachRefusal::Device { pid, device: found.clone() }))
}

/// Connects to QEMU's monitor: the given socket, or else the monitor that its command line names.
///
/// # Errors
/// [`AttachRefusal`].
pub fn connect(process: &Process, given: Option<&Path>) -> Result<(Monitor, Qmp), AttachRefusal> {
    let pid = process.pid();
    let monitor = match given {
        Some(path) => Monitor::Socket(path.to_owned()),
        None => {
            let words = process.command_line().unwrap_or_default();
            monitor(pid, &CommandLine::new(words))?
        }
    };
    match monitor.connect(pid, ANSWER_TIMEOUT) {
        Ok(qmp) => Ok((monitor, qmp)),
        Err(source) => Err(refused(pid, monitor, source)),
    }
}

/// The monitor that a command line names, if it can be used. Does not connect.
///
/// # Errors
/// [`AttachRefusal`].
pub fn free_monitor(pid: i32, line: &CommandLine) -> Result<Monitor, AttachRefusal> {
    let monitor = monitor(pid, line)?;
    let obstacle = match &monitor {
        Monitor::Socket(path) => has_client(pid, path).then_some(QmpError::Taken),
        Monitor::Libvirt(domain) => domain.is_asked_in_vain().map(QmpError::from),
    };
    obstacle.map_or(Ok(monitor.clone()), |source| Err(refused(pid, monitor, source)))
}

/// The monitor that a command line names. A socket of libvirt's own is left to libvirt also while
/// nobody is connected there: libvirt would wait for it as long as Ebb has it.
fn monitor(pid: i32, line: &CommandLine) -> Result<Monitor, AttachRefusal> {
    let path = control_socket(pid, line)?;
    let domain = is_libvirts(&path).then(|| libvirt::domain_of(pid, line)).flatten();
    Ok(domain.map_or(Monitor::Socket(path), Monitor::Libvirt))
}

/// The QMP socket that a command line names.
///
/// # Errors
/// [`AttachRefusal::NoQmp`] and [`AttachRefusal::Tcp`].
fn control_socket(pid: i32, line: &CommandLine) -> Result<PathBuf, AttachRefusal> {
    let named = match qmp_of(line) {
        Some(Control::Path(path)) => Some(path.into()),
        Some(Control::Inherited(number)) => socket_path(pid, number),
        Some(Control::Tcp) => return Err(AttachRefusal::Tcp(pid)),
        None => None,
    };
    let named = named.ok_or_else(|| AttachRefusal::NoQmp { pid, command: line.program() })?;
    // A relative path begins where QEMU was started.
    Ok(Path::new(&format!("/proc/{pid}/cwd")).join(named))
}

/// Why a monitor cannot be used. For libvirt's own socket, the refusal tells what libvirt offers
/// instead.
fn refused(pid: i32, monitor: Monitor, source: QmpError) -> AttachRefusal {
    let path = match monitor {
        Monitor::Socket(path) => path,
        Monitor::Libvirt(_) => return AttachRefusal::ByLibvirt { pid, why: source.to_string() },
    };
    match source {
        QmpError::Taken if is_libvirts(&path) => AttachRefusal::Libvirt { path, pid },
        QmpError::OtherProcess { owner, pid } => AttachRefusal::OtherQmp { path, owner, pid },
        source => AttachRefusal::Qmp { path, source },
    }
}

/// Whether a socket is libvirt's by its path.
fn is_libvirts(path: &Path) -> bool {
    let is_below = path.components().any(|part| part.as_os_str() == "libvirt");
    // A domain's second monitor may have its socket there, too.
    is_below && path.file_name().is_some_and(|name| name == "monitor.sock")
}

/// How a command line names QEMU's control socket.
#[derive(PartialEq, Eq, Debug)]
enum Control {
    Path(String),
    /// The number of an inherited descriptor.
    Inherited(i32),
    /// A TCP port.
    Tcp,
}

/// Finds `-qmp unix:PATH,...`, or `-chardev socket,id=X,path=PATH` with `-mon
/// chardev=X,mode=control`. In the second form, `fd=NUMBER` or `port=NUMBER` may replace the path.
fn qmp_of(line: &CommandLine) -> Option<Control> {
    if let Some(path) = line.values("qmp").find_map(|value| value.strip_prefix("unix:")) {
        return parts(path).into_iter().next().map(Control::Path);
    }
    let of_monitor = |monitor: &str| {
        let chardev = key(monitor, "chardev=")?;
        let socket = line.values("chardev").find(|v| key(v, "id=").as_ref() == Some(&chardev))?;
        let number = || key(socket, "fd=")?.parse().ok().map(Control::Inherited);
        let port = || key(socket, "port=").map(|_| Control::Tcp);
        key(socket, "path=").map(Control::Path).or_else(number).or_else(port)
    };
    let is_tcp = |value: &str| value.starts_with("tcp:") || value.starts_with("telnet:");
    let short = line.values("qmp").any(is_tcp).then_some(Control::Tcp);
    let monitors = line.values("mon").filter(|value| value.contains("mode=control"));
    let all: Vec<Control> = monitors.filter_map(of_monitor).chain(short).collect();
    let (tcp, usable): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| *one == Control::Tcp);
    usable.into_iter().chain(tcp).next()
}

/// The path of the socket behind a descriptor of the process.
fn socket_path(pid: i32, number: i32) -> Option<PathBuf> {
    let link = std::fs::read_link(format!("/proc/{pid}/fd/{number}")).ok()?;
    let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
    let all = std::fs::read(format!("/proc/{pid}/net/unix")).ok()?;
    let mut sockets = all.split(|&byte| byte == b'\n').filter_map(UnixSocket::parse);
    sockets.find(|socket| socket.inode == inode.as_bytes()).map(|socket| socket.path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libvirt::{Domain, LibvirtError};
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    fn words(line: &str) -> CommandLine {
        CommandLine::new(line.split(' ').map(str::to_owned).collect())
    }

    fn odd<const N: usize>(words: [&str; N]) -> CommandLine {
        CommandLine::new(words.map(str::to_owned).into())
    }

    #[test]
    fn finds_the_socket_in_both_spellings() {
        let short = words("qemu -qmp unix:/run/q.sock,server=on,wait=off");
        let path = |path: &str| Some(Control::Path(path.into()));
        assert_eq!(qmp_of(&short), path("/run/q.sock"));
        let long = words(
            "qemu -chardev socket,id=con,path=/c -chardev socket,id=m,path=/run/m.sock,server=on \
             -mon chardev=m,mode=control",
        );
        assert_eq!(qmp_of(&long), path("/run/m.sock"));
        let ours = words("qemu -chardev socket,id=m,fd=7,server=on -mon chardev=m,mode=control");
        assert_eq!(qmp_of(&ours), Some(Control::Inherited(7)));
        assert_eq!(qmp_of(&words("sleep 60")), None);
        let spaced = odd(["qemu", "-qmp", "unix:/a b/c,,d.sock,server=on"]);
        assert_eq!(qmp_of(&spaced), path("/a b/c,d.sock"));
        let spaced = ["-chardev", "socket,id=m,path=/a b/,,c", "-mon", "chardev=m,mode=control"];
        assert_eq!(qmp_of(&odd(spaced)), path("/a b/,c"));
    }

    #[test]
    fn a_port_is_reported_where_there_is_no_socket() {
        let long = "-chardev socket,id=t,host=::1,port=4444,server=on -mon chardev=t,mode=control";
        for line in ["qemu -qmp tcp:localhost:4444,server=on,wait=off", long] {
            assert_eq!(qmp_of(&words(line)), Some(Control::Tcp), "{line}");
            for more in [
                "-qmp unix:/run/q.sock",
                "-chardev socket,id=m,path=/run/q.sock -mon chardev=m,mode=control",
            ] {
                let found = qmp_of(&words(&format!("{line} {more}")));
                assert_eq!(found, Some(Control::Path("/run/q.sock".into())), "{line} {more}");
            }
        }
        assert!(AttachRefusal::Tcp(7).to_string().contains("needs a UNIX socket"));
    }

    #[test]
    fn libvirts_own_monitor_is_reported_as_such() {
        let message =
            |path: &str, source| refused(7, Monitor::Socket(path.into()), source).to_string();
        let path = "/var/lib/libvirt/qemu/domain-1-web/monitor.sock";
        let libvirts = message(path, QmpError::Taken);
        for word in ["libvirt holds", path, "<qemu:commandline>"] {
            assert!(libvirts.contains(word) && !libvirts.contains('\n'), "{libvirts}");
        }
        assert!(message("/run/q.sock", QmpError::Taken).contains("second monitor"));
        assert!(message(path, QmpError::NoGreeting).contains("does not greet"));
        let domain = Domain { socket: "/run/libvirt/libvirt-sock".into(), uuid: String::new() };
        let asked = refused(7, Monitor::Libvirt(domain), LibvirtError::Late.into()).to_string();
        assert!(asked.contains("cannot be asked: libvirt does not answer"), "{asked}");
    }

    #[test]
    fn an_inherited_socket_is_found_by_its_inode() {
        use std::os::fd::AsRawFd;
        let directory = tempfile::tempdir().unwrap();
        for name in ["qmp.sock", "a b", " a  b ", "a,\t:\\ b", "\u{e9} x"] {
            let path = directory.path().join(name);
            let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
            let found = socket_path(std::process::id() as i32, socket.as_raw_fd());
            assert_eq!(found, Some(path));
        }
        // Other paths are not valid UTF-8.
        let path = directory.path().join(OsStr::from_bytes(b"\xff b"));
        let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(socket_path(std::process::id() as i32, socket.as_raw_fd()), Some(path));
        assert_eq!(socket_path(std::process::id() as i32, 0), None);
    }

    #[test]
    fn a_pid_without_a_process_is_reported() {
        let error = open(i32::MAX).err().unwrap();
        assert_eq!(error.to_string(), "there is no process 2147483647");
    }
}
