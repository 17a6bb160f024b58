//! The way to a QEMU's monitor.

use std::path::PathBuf;
use std::time::Duration;

use crate::libvirt::{self, Domain};
use crate::qmp::{Qmp, QmpError};

/// The way to a QEMU's monitor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Monitor {
    /// A socket of QEMU's own.
    Socket(PathBuf),
    /// libvirt, which holds the only monitor.
    Libvirt(Domain),
}

impl Monitor {
    /// Connects to the monitor of the process `pid`, and waits for `most` at most.
    ///
    /// # Errors
    /// As [`Qmp::connect_to`]; [`QmpError::Libvirt`].
    pub fn connect(&self, pid: i32, most: Duration) -> Result<Qmp, QmpError> {
        match self {
            Monitor::Socket(path) => Qmp::connect_to(pid, path, most),
            Monitor::Libvirt(domain) => Ok(libvirt::connect(pid, domain, most)?),
        }
    }
}
