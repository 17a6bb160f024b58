//! What errors of the userfaultfd mean.

use std::io;

use rustix::io::Errno;

/// Whether the VMM does not map our RAM at the address that an ioctl was for.
pub(crate) fn is_unmapped(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::NOENT.raw_os_error())
}

/// Whether the VMM has ended: ESRCH from the userfaultfd.
pub(crate) fn is_vmm_ended(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}
