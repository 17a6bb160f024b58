//! The virtio-mem device of [`ebb_virtio_mem`] as a process beside the VMM, by vhost-user
//! (protocol: QEMU documentation interop/vhost-user): the request queue, the configuration space
//! and its change notifications.
//!
//! [`Backend`] serves one device at a socket, to one front end after the other, in one thread. The
//! region's memory is the VMM's own. An [`ebb_virtio_mem::BlockMemory`] gives blocks their memory,
//! and an [`ebb_vhost::Dma`] gives the device access to the queue.
//!
//! Everything from the guest and from the front end is checked, read once and bounded. A front end
//! that sends invalid messages loses its connection. An invalid queue is not served any more until
//! it is set up again.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod backend;
mod gate;
mod ram;
mod ring;
mod session;
#[cfg(feature = "testing")]
pub mod solo;

pub use backend::{Backend, Setup, StartError};
