//! The virtio-mem device of [`ebb_virtio_mem`] as a process beside the VMM, by vhost-user
//! (protocol: QEMU documentation interop/vhost-user): the request queue, the configuration
//! space and its change notices.
//!
//! [`Backend`] serves one device at a socket, to one front end after the other, in one
//! thread. The region's memory is the VMM's own; how blocks get theirs is up to an
//! [`ebb_virtio_mem::Memory`], and how the device gets at the queue to an [`ebb_vhost::Dma`].
//!
//! What comes from the guest and from the front end is checked, read once and bounded. A
//! front end that makes no sense loses its connection, a queue that makes none is served no
//! more until it is set up anew.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod backend;
mod gate;
mod ram;
mod ring;
mod session;
#[doc(hidden)]
pub mod solo;

pub use backend::{Backend, Setup, StartError};
