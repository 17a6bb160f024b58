//! A guest's disk: a vhost-user-blk device (virtio 1.2, section 5.2; vhost-user protocol, QEMU
//! documentation interop/vhost-user) for raw images. Its blocks are 4 KiB, so a block of the disk
//! and a frame of memory have the same size.
//!
//! [`Image`] opens and locks an image, [`Backend`] serves it at a socket. A [`Dma`] gives the
//! device access to guest memory, and an [`Observer`] sees which block moved to which frame.
//!
//! All input from the guest is read once and checked. Input that makes no sense ends with an I/O
//! error.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod backend;
mod block_locks;
mod config;
mod counters;
mod device;
mod ended;
mod format;
mod hashes;
mod image;
mod job;
mod observer;
mod patience;
mod pause;
mod probe;
mod queue;
mod request;
#[cfg(feature = "testing")]
pub mod solo;
mod used_rings;

pub use backend::{Backend, Options, QUEUES_MAX, StartError};
pub use config::SECTOR_BYTES;
pub use counters::Counts;
pub use ebb_vhost::{Access, AllResident, Dma, DmaFault, Segment};
pub use hashes::Hashes;
pub use image::{Identity, Image, OpenError, OpenErrorKind, Reader};
pub use observer::{Block, Direction, Nobody, Observer};
pub use probe::SmallSectors;
