//! May this process be held? Every "no" is one clear line, before anything
//! has been changed.

use std::io;
use std::path::{Path, PathBuf};

use ebb_sys::process::Process;
use rustix::io::Errno;

use crate::qmp::{Qmp, QmpError};
use crate::reach::{self, Device, Reach};

/// Why a process is not taken over.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Nobody has this number.
    #[error("there is no process {0}")]
    NoProcess(i32),
    /// The kernel says no.
    #[error("process {pid} may not be looked into ({source}): run ebbd as root")]
    NotPermitted {
        /// The process.
        pid: i32,
        /// The kernel's words.
        source: io::Error,
    },
    /// Not a QEMU, or one without a control socket.
    #[error(
        "process {pid} ({command}) shows no QMP socket: give it with --qmp SOCK; a process that \
         is no QEMU cannot be held"
    )]
    NoQmp {
        /// The process.
        pid: i32,
        /// What it runs.
        command: String,
    },
    /// The socket is another QEMU's.
    #[error("the QMP socket {path} belongs to process {owner}, not to {pid}")]
    OtherQmp {
        /// The socket.
        path: PathBuf,
        /// Whose it is.
        owner: i32,
        /// Who was asked for.
        pid: i32,
    },
    /// QMP failed.
    #[error("the QMP socket {path} does not answer ({source}): is another client connected to it?")]
    Qmp {
        /// The socket.
        path: PathBuf,
        /// What failed.
        source: QmpError,
    },
    /// Memory that a device reaches by itself.
    #[error("process {pid} cannot be held because of {device}")]
    Device {
        /// The process.
        pid: i32,
        /// The device.
        device: Device,
    },
    /// Somebody else serves its faults.
    #[error("process {0} has a userfaultfd already: another pager, or another ebbd, holds it")]
    OtherUserfaultfd(i32),
}

/// Takes hold of a process that is free to be held.
///
/// # Errors
/// [`Refusal`].
pub fn open(pid: i32) -> Result<Process, Refusal> {
    let process = Process::open(pid).map_err(|source| match source.raw_os_error() {
        Some(code) if code == Errno::SRCH.raw_os_error() => Refusal::NoProcess(pid),
        _ => Refusal::NotPermitted { pid, source },
    })?;
    let descriptors = process.descriptors();
    let descriptors = descriptors.map_err(|source| Refusal::NotPermitted { pid, source })?;
    may_be_held(pid, &reach::of_descriptors(descriptors.iter().map(|(_, link)| link.as_str())))?;
    match descriptors.iter().any(|(_, link)| link == "anon_inode:[userfaultfd]") {
        true => Err(Refusal::OtherUserfaultfd(pid)),
        false => Ok(process),
    }
}

/// Whether these devices leave anything to be taken.
///
/// # Errors
/// [`Refusal::Device`], with the one in the way.
pub fn may_be_held(pid: i32, devices: &[Device]) -> Result<(), Refusal> {
    let in_the_way = reach::narrowest(devices).filter(|found| found.kind.reach() == Reach::Nothing);
    in_the_way.map_or(Ok(()), |found| Err(Refusal::Device { pid, device: found.clone() }))
}

/// Connects to the QEMU's QMP socket: the one given, else the one its command
/// line names.
///
/// # Errors
/// [`Refusal`].
pub fn connect(process: &Process, given: Option<&Path>) -> Result<(PathBuf, Qmp), Refusal> {
    let pid = process.pid();
    let words = process.command_line().unwrap_or_default();
    let path = match given {
        Some(path) => path.to_owned(),
        None => {
            let command = words.first().cloned().unwrap_or_default();
            let named = qmp_of_command_line(&words);
            let named = named.ok_or(Refusal::NoQmp { pid, command })?;
            // A relative path is meant from where QEMU was started.
            Path::new(&format!("/proc/{pid}/cwd")).join(named)
        }
    };
    let qmp = Qmp::connect(&path);
    let qmp = qmp.map_err(|source| Refusal::Qmp { path: path.clone(), source })?;
    match qmp.peer_pid() {
        Ok(owner) if owner != pid => Err(Refusal::OtherQmp { path, owner, pid }),
        _ => Ok((path, qmp)),
    }
}

/// `-qmp unix:PATH,...`, or `-chardev socket,id=X,path=PATH` with
/// `-mon chardev=X,mode=control`.
fn qmp_of_command_line(words: &[String]) -> Option<String> {
    let values = |option: &'static str| {
        words.windows(2).filter(move |pair| pair[0] == option).map(|pair| pair[1].as_str())
    };
    if let Some(path) = values("-qmp").find_map(|value| value.strip_prefix("unix:")) {
        return Some(path.split(',').next()?.to_owned());
    }
    let key = |value: &str, key: &str| {
        value.split(',').find_map(|part| part.strip_prefix(key).map(str::to_owned))
    };
    let control = values("-mon").find(|value| value.contains("mode=control"))?;
    let chardev = key(control, "chardev=")?;
    values("-chardev")
        .find(|v| key(v, "id=").as_ref() == Some(&chardev))
        .and_then(|v| key(v, "path="))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn finds_the_socket_in_both_spellings() {
        let short = words("qemu -qmp unix:/run/q.sock,server=on,wait=off");
        assert_eq!(qmp_of_command_line(&short).as_deref(), Some("/run/q.sock"));
        let long = words(
            "qemu -chardev socket,id=con,path=/c -chardev socket,id=m,path=/run/m.sock,server=on \
             -mon chardev=m,mode=control",
        );
        assert_eq!(qmp_of_command_line(&long).as_deref(), Some("/run/m.sock"));
        assert_eq!(qmp_of_command_line(&words("sleep 60")), None);
    }

    #[test]
    fn a_number_that_nobody_has_is_said_so() {
        let error = open(i32::MAX).err().unwrap();
        assert_eq!(error.to_string(), "there is no process 2147483647");
    }
}
