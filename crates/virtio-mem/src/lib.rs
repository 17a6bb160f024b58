//! A virtio-mem device (virtio 1.2, section 5.15) without a transport: memory that a running VM
//! plugs and unplugs in blocks.
//!
//! A VMM, or a process beside it, makes a [`Device`] for a part of guest-physical memory (its
//! [`Geometry`]). It passes each request from the driver's queue to [`Device::handle`], serves the
//! driver's reads of the configuration space with [`Device::read_config`], and sets the size that
//! the guest should have with [`Device::request_bytes`].
//!
//! The device decides what is plugged. A [`BlockMemory`] gives blocks their memory and takes it, a
//! [`Record`] lets the device survive its process, and a [`Guard`] tells which touches of the
//! region are forbidden.
//!
//! ```
//! use ebb_units::Gpa;
//! use ebb_virtio_mem::*;
//!
//! # struct Nothing;
//! # impl BlockMemory for Nothing {
//! #     fn plug(&mut self, _: ebb_units::FrameRange, _: bool) -> std::io::Result<()> { Ok(()) }
//! #     fn unplug(&mut self, _: ebb_units::FrameRange) -> std::io::Result<()> { Ok(()) }
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let geometry = Geometry {
//!     start: Gpa(4 << 30),
//!     region_bytes: 16 << 30,
//!     block_bytes: 2 << 20,
//!     node: Some(0),
//! };
//! let parts = DeviceParts {
//!     memory: Box::new(Nothing), // or a `FileMemory`
//!     record: Box::new(NotSaved), // or a `StateFile`
//!     notify: Box::new(|| { /* tell the driver: the configuration has changed */ }),
//! };
//! let device = Device::start(Saved::new(geometry)?, Options::default(), parts)?;
//! device.request_bytes(1 << 30)?;
//! let request = Request::Plug(Named { start: geometry.start, count: 512 });
//! assert_eq!(device.handle(&request.to_bytes())?, Response::Ack.to_bytes());
//! assert_eq!(device.sizes().plugged_bytes, 1 << 30);
//! # Ok(())
//! # }
//! ```
//!
//! The device checks everything that comes from the guest. The guest cannot have more memory than
//! was requested for it, and nothing that it sends stops the device. `docs/virtio-mem.md` says
//! which section each rule is from, and draws the saved state.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod block_map;
mod config;
mod device;
mod geometry;
mod guard;
mod memory;
mod record;
mod request;
mod saved;

pub use config::{CONFIG_BYTES, F_ACPI_PXM, F_UNPLUGGED_INACCESSIBLE, Sizes};
pub use device::{Device, DeviceParts, Options, SizeError, StartError, Stopped};
pub use geometry::{BLOCKS_MAX, Geometry, GeometryError};
pub use guard::{Guard, Touch};
pub use memory::{BlockMemory, FileMemory};
pub use record::{NotSaved, Record, StateFile, StateFileError};
pub use request::{BlockState, Named, REQUEST_BYTES, RESPONSE_BYTES, Request, Response};
pub use saved::{Saved, SavedError};
