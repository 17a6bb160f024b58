//! Why the RAM of a VMM cannot be managed.

use std::io;

use crate::qmp::QmpError;
use crate::ram::BadLayout;

/// How a VM is started with RAM that Ebb can manage.
const WITH_SHARED_MEMFD: &str = "start QEMU with -object \
     memory-backend-memfd,id=ram,size=...,share=on and -machine ...,memory-backend=ram (for nodes \
     and devices memdev=ram), or libvirt with <source type='memfd'/> and <access \
     mode='shared'/> in <memoryBacking>";

/// Why the RAM of a VMM cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// QMP failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The kernel's view of the process could not be read.
    #[error("cannot look into the VMM: {0}")]
    Io(#[from] io::Error),
    /// The answers contradict each other.
    #[error(transparent)]
    Contradiction(#[from] BadLayout),
    /// The RAM is not in a file that Ebb can map.
    #[error(
        "memory backend {0} is no shared memfd, so Ebb cannot reach it: {advice}",
        advice = WITH_SHARED_MEMFD
    )]
    NotShared(String),
    /// The RAM's file cannot be opened.
    #[error(
        "the VMM has closed the memfd with inode {0}, and still has its memory mapped: it cannot be \
         served any more"
    )]
    Closed(u64),
    /// No RAM was found.
    #[error("the VM has no RAM in a shared memfd: {advice}", advice = WITH_SHARED_MEMFD)]
    NoRam,
    /// An answer of QEMU was not understood.
    #[error("QEMU's answer is not understood: {0}")]
    Answer(String),
}
