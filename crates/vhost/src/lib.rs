//! What the devices that Ebb serves by vhost-user have in common (vhost-user protocol, QEMU
//! documentation interop/vhost-user):
//!
//! - access to guest memory ([`Dma`], [`Guest`])
//! - the descriptors of one request ([`Chain`])
//! - the socket at which a front end connects ([`socket`]), and its messages ([`Message`])
//! - a relay, for a front end that cannot bear to lose its device ([`relay`])
//!
//! All input from the guest is read once and checked.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod chain;
mod connection;
mod dma;
mod guest;
mod kept;
mod passage;
pub mod relay;
pub mod socket;
mod vet;

pub use chain::{Chain, DESCRIPTORS_MAX, Malformed, walk};
pub use connection::{Connection, Message, Parted, announce};
pub use dma::{Access, AllResident, Dma, DmaFault, Pinned, Segment, bytes_of, slice, whole_frames};
pub use guest::Guest;
pub use kept::{Kept, use_small_pages};
pub use passage::Passage;
pub use vet::{changes_memory, vet};
