//! One queue without a front end, served in the calling thread: for tests and fuzzing.

use std::io;
use std::sync::Arc;

use ebb_vhost::{Dma, Kept};
use rustix::event::{PollFd, PollFlags, poll};
use testkit::virtqueue::Rings;
use vhost_user_backend::{VringMutex, VringT};
use virtio_queue::{Error as QueueError, QueueT};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};

use crate::backend::disk;
use crate::config;
use crate::counters::Counts;
use crate::image::Image;
use crate::job::Disk;
use crate::observer::Observer;
use crate::pause::wait_for;
use crate::queue::Worker;

/// Most rounds in a queue whose memory makes it look busy for ever.
const ROUNDS_MAX: u32 = 1000;

/// A disk with one queue.
pub struct Solo {
    disk: Arc<Disk>,
    worker: Worker,
    vring: VringMutex,
}

impl Solo {
    /// Makes a disk with all features negotiated and the write cache on.
    ///
    /// # Errors
    /// No descriptor is to be had, or the rings are not aligned.
    pub fn new(
        image: Image,
        memory: GuestMemoryMmap,
        rings: Rings,
        dma: Arc<dyn Dma>,
        observer: Arc<dyn Observer>,
        use_ring: bool,
    ) -> io::Result<Solo> {
        let memory = GuestMemoryAtomic::new(memory);
        let disk = Arc::new(disk(image, dma, observer, 1, true));
        disk.config.negotiated(config::features(disk.image.is_readonly()));
        let worker = Worker::new(disk.clone(), memory.clone(), Arc::new(Kept::new()?), use_ring)?;
        let failed = |error: QueueError| io::Error::other(error.to_string());
        let vring = VringMutex::new(memory, 1024).map_err(failed)?;
        vring.set_queue_size(rings.size);
        vring.set_queue_info(rings.descriptors, rings.available, rings.used).map_err(failed)?;
        vring.set_queue_event_idx(true);
        vring.set_queue_ready(true);
        vring.set_enabled(true);
        Ok(Solo { disk, worker, vring })
    }

    /// Serves all available requests.
    pub fn serve(&mut self) {
        for _ in 0..ROUNDS_MAX {
            self.worker.serve(&self.vring, true);
            if self.worker.is_idle() {
                return;
            }
            match self.worker.pause() {
                Some(pause) => drop(wait_for(self.worker.wake(), pause)),
                // If interrupted, it looks again.
                None => drop(poll(&mut [PollFd::new(self.worker.wake(), PollFlags::IN)], None)),
            }
        }
    }

    /// Whether the queue is still served: its rings and chains make sense.
    pub fn runs(&self) -> bool {
        self.worker.runs()
    }

    /// Returns the number of requests taken, modulo 2^16.
    pub fn taken(&self) -> u16 {
        self.vring.get_ref().get_queue().next_avail()
    }

    /// Returns the counters of this disk.
    pub fn counts(&self) -> Counts {
        self.disk.counters.counts()
    }

    /// Writes a field of the configuration space for the driver. Whether that is allowed.
    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> bool {
        self.disk.config.write(offset, bytes).is_some()
    }
}
