//! What a VM's pager and the devices that Ebb serves the VM know of each other: access to the
//! guest's memory ([`PagerDma`]), and disks whose blocks may equal the content of frames
//! ([`SharedDisks`]).
//!
//! It serves no device itself. While a VM has no pager, before it is managed and after it is
//! detached, its devices wait.
#![forbid(unsafe_code)]

mod disks;
mod dma;
mod pins;
mod places;
mod port;
mod source;

pub use disks::SharedDisks;
pub use dma::PagerDma;
pub use port::Port;
pub use source::Source;
