//! Makes a VMM's userfaultfd: by its own right, or by a device that it is lent.

use std::io;
use std::os::fd::AsFd;

use ebb_sys::process::Process;
use ebb_sys::uffd_node;
use ebb_vm::Qmp;

use crate::helpers::injector;

/// Makes a userfaultfd in the process. Returns its number there.
///
/// # Errors
/// Those of [`injector::make`].
pub fn make(process: &Process, qmp: Option<&mut Qmp>) -> io::Result<i32> {
    let error = match injector::make(process) {
        Err(error) if error.kind() != io::ErrorKind::TimedOut => error,
        made => return made,
    };
    let lent = qmp.map(|qmp| by_loan(process, qmp));
    match lent {
        Some(Ok(number)) => Ok(number),
        Some(Err(why)) => {
            tracing::debug!("no userfaultfd by a device that is lent, either: {why}");
            Err(error)
        }
        None => Err(error),
    }
}

/// Makes it by `/dev/userfaultfd`, opened here and lent to the VMM by its monitor. libvirt gives its
/// QEMUs a /dev and a device control group in which they open no node.
fn by_loan(process: &Process, qmp: &mut Qmp) -> io::Result<i32> {
    let device = uffd_node::open_device()?;
    let lent = qmp.lend(device.as_fd()).map_err(io::Error::other)?;
    let made = injector::make_by(process, lent.number);
    if let Err(error) = qmp.end_loan(&lent) {
        tracing::warn!("QEMU keeps /dev/userfaultfd open: {error}");
    }
    made
}
