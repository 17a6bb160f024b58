//! A failure between Ebb and a QMP socket.

use std::io;
use std::time::Duration;

use crate::libvirt::LibvirtError;

/// What can go wrong between Ebb and a QMP socket.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket failed, or QEMU did not answer in time.
    #[error("QMP: {0}")]
    Io(#[from] io::Error),
    /// The other side sent something else than QMP.
    #[error("QMP: the other side does not speak it: {0}")]
    Protocol(String),
    /// The connection was accepted, but no greeting came.
    #[error(
        "it did not greet as QMP within {} s: is it the socket of a monitor in control mode (-qmp)?",
        .0.as_secs()
    )]
    Silent(Duration),
    /// The greeting is not QMP's.
    #[error("it does not greet as QMP: is it the socket of a monitor in control mode (-qmp)?")]
    NoGreeting,
    /// Others have connected before, and QEMU serves one client after the other.
    #[error(
        "it serves one client at a time, and another one may use it: disconnect that one, or give \
         QEMU a second monitor (-qmp)"
    )]
    Taken,
    /// The socket belongs to another process than it should.
    #[error("the socket belongs to process {owner}, not to {pid}")]
    OtherProcess {
        /// PID of the process that listens there.
        owner: i32,
        /// PID of the process that should.
        pid: i32,
    },
    /// libvirt, which passes everything on, does not, or not this.
    #[error("{0}")]
    Libvirt(String),
    /// QEMU refused the command.
    #[error("QEMU refused {command}: {reason}")]
    Refused {
        /// The command's name.
        command: String,
        /// QEMU's reason.
        reason: String,
    },
}

/// Why a request was refused, by who refused it.
pub(super) enum Refusal {
    Qemu(String),
    Libvirt(String),
}

impl Refusal {
    /// The error of the command that was refused.
    pub(super) fn of(self, command: &str) -> QmpError {
        match self {
            Refusal::Qemu(reason) => QmpError::Refused { command: command.into(), reason },
            Refusal::Libvirt(why) => QmpError::Libvirt(why),
        }
    }
}

impl From<LibvirtError> for QmpError {
    fn from(error: LibvirtError) -> QmpError {
        QmpError::Libvirt(error.to_string())
    }
}
