//! For tests and fuzzing: the request queue without a front end, and a front end without a server.
//! The calling thread serves both.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ebb_units::Gpa;
use ebb_vhost::{Dma, Guest};
use ebb_virtio_mem::Device;
use rustix::event::{EventfdFlags, eventfd};
use testkit::virtqueue::Rings;
use vm_memory::GuestMemoryMmap;

use crate::gate::Gate;
use crate::ring::{Next, Places, Ring};
use crate::session::{Access, Session};

/// Most rounds of serving a queue. Its memory may make it look busy for ever.
const ROUNDS_MAX: u32 = 100;

/// A device's queue in the caller's memory.
pub struct Solo {
    device: Arc<Device>,
    guest: Guest,
    ring: Ring,
}

impl Solo {
    /// Makes a queue at `rings`. Returns `None` if no queue can be there, or no descriptor can be
    /// had.
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

    /// Answers all available requests.
    pub fn serve(&mut self) {
        for _ in 0..ROUNDS_MAX {
            if self.ring.serve(&self.guest, &self.device) == Next::Asked {
                return;
            }
        }
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the queue is still served.
    pub fn runs(&self) -> bool {
        self.ring.kick().is_some()
    }
}

/// Handles messages of the front end at `stream`, each time after `speak` has sent some, until
/// `speak` returns `false` or a message ends the connection.
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
