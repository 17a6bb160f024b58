//! A failure between Ebb and libvirt's daemon.

use std::io;
use std::path::PathBuf;

/// What can go wrong between Ebb and libvirt's daemon.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// Nobody listens there.
    #[error("libvirt does not answer on {path} ({source}): start libvirtd, or virtqemud")]
    Connect {
        /// Path of the daemon's socket.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The connection failed.
    #[error("the connection to libvirt: {0}")]
    Io(#[from] io::Error),
    /// No answer came in time.
    #[error("libvirt does not answer in time: see `systemctl status libvirtd` or `virtqemud`")]
    Late,
    /// The daemon has ended.
    #[error("libvirt has closed the connection; Ebb connects again")]
    Ended,
    /// An ordinary user listens there.
    #[error("user {0} listens on libvirt's socket, who is not root")]
    OtherUser(u32),
    /// The daemon does not let this user in without a login.
    #[error("libvirt asks for a login, which it does not ask root for: run ebbd as root")]
    Login,
    /// The daemon refused.
    #[error("libvirt refuses: {0}")]
    Refused(String),
    /// The domain's QEMU is another process.
    #[error("libvirt's domain {name} is not process {pid}, or not any more")]
    OtherProcess {
        /// The domain's name.
        name: String,
        /// The process that Ebb manages.
        pid: i32,
    },
    /// The other side does not speak the protocol, or says too much.
    #[error("libvirt's answer is not understood: {0}")]
    Unclear(&'static str),
    /// Nobody wants an answer any more.
    #[error("nobody asks libvirt any more")]
    Unwanted,
}
