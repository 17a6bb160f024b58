//! The request queue without a front end, and a front end without a server, served in the
//! calling thread: for tests and fuzzing.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ebb_units::Gpa;
use ebb_vhost::{Dma, Guest};
use ebb_virtio_mem::Device;
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::GuestMemoryMmap;

use crate::gate::Gate;
use crate::ring::{Next, Places, Ring};
use crate::session::{Access, Session};

/// A queue whose memory makes it look busy for ever is left after so many rounds.
const ROUNDS_MAX: u32 = 100;

/// Where the parts of a queue are, and how many descriptors it has.
#[derive(Clone, Copy, Debug)]
pub struct Rings {
    /// The descriptor table's guest-physical address.
    pub descriptors: u64,
    /// The available ring's.
    pub available: u64,
    /// The used ring's.
    pub used: u64,
    /// Descriptors: a power of two, 1024 at most.
    pub size: u16,
}

/// A device's queue in the caller's memory.
pub struct Solo {
    device: Arc<Device>,
    guest: Guest,
    ring: Ring,
}

impl Solo {
    /// `None`: no queue can be there, or no descriptor is to be had.
    pub fn new(
        device: Arc<Device>,
        memory: Arc<GuestMemoryMmap>,
        rings: Rings,
        dma: Arc<dyn Dma>,
    ) -> Option<Solo> {
        let gate = Arc::new(Gate::new(dma, device.guard().clone()));
        let guest = Guest::new(memory, gate, Arc::default());
        let mut ring = Ring::new();
        ring.set_size(u32::from(rings.size))?;
        ring.set_places(Places {
            descriptors: Gpa(rings.descriptors),
            available: Gpa(rings.available),
            used: Gpa(rings.used),
        })?;
        ring.set_enabled(true);
        ring.start(eventfd(0, EventfdFlags::CLOEXEC).ok()?);
        Some(Solo { device, guest, ring })
    }

    /// Answers all that is available.
    pub fn serve(&mut self) {
        for _ in 0..ROUNDS_MAX {
            if self.ring.serve(&self.guest, &self.device) == Next::Asked {
                return;
            }
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether it is still served.
    pub fn runs(&self) -> bool {
        self.ring.kick().is_some()
    }
}

/// Hears the front end at `stream` after each time that `speak` has said something there,
/// until it says nothing more (`false`), or what it says ends the connection.
pub fn converse(
    device: &Device,
    dma: Arc<dyn Dma>,
    stream: UnixStream,
    mut speak: impl FnMut() -> bool,
) {
    let gate = Arc::new(Gate::new(dma, device.guard().clone()));
    let access = Access { dma: gate, faults: Arc::default() };
    let mut session = Session::new(device, &access, stream);
    while speak() && session.listen().is_ok() {
        session.serve();
    }
}
