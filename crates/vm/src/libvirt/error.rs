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
    #[error("the connection to libvirt failed: {0}")]
    Io(#[from] io::Error),
    /// No answer came in time.
    #[error("libvirt does not answer in time: see `systemctl status libvirtd virtqemud`")]
    Late,
    /// The daemon has ended.
    #[error("libvirt has closed the connection; Ebb connects again")]
    Ended,
    /// An ordinary user listens there.
    #[error("user {0} listens on libvirt's socket; Ebb trusts only root there")]
    OtherUser(u32),
    /// The daemon does not let this user in without a login.
    #[error("libvirt asks for a login, but root needs none: run ebbd as root")]
    Login,
    /// The daemon refused one call.
    #[error("libvirt refuses: {0}")]
    Refused(String),
    /// The domain's QEMU is another process.
    #[error("process {pid} is not the QEMU of libvirt's domain {name}, or no longer")]
    OtherProcess {
        /// The domain's name.
        name: String,
        /// The process that Ebb manages.
        pid: i32,
    },
    /// What the daemon says is not of the protocol, or too long. The text names the part.
    #[error("Ebb does not understand what libvirt says: {0}")]
    Unclear(&'static str),
    /// Ebb has something to ask that the protocol has no room for. The text names it.
    #[error("Ebb cannot ask libvirt: {0}")]
    Unsendable(&'static str),
    /// Whoever asked has closed the connection.
    #[error("nobody waits for libvirt's answer any more")]
    Unwanted,
}
