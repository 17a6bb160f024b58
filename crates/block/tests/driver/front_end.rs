//! A front end of the vhost-user protocol, as much of it as a disk with one queue needs.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{RINGS, Ring};

/// Anything that takes longer is stuck.
const DEADLINE: Duration = Duration::from_secs(120);
const EVENT_IDX: u64 = 1 << 29;

/// A connection whose queue runs.
pub struct FrontEnd {
    protocol: Frontend,
    kick: EventFd,
    call: EventFd,
}

/// Makes memory that another process can map.
pub fn shared_memory(bytes: u64) -> GuestMemoryMmap {
    memory_with(MemfdFlags::CLOEXEC, bytes)
}

/// Makes memory that can be sealed, as QEMU does.
pub fn sealable_memory(bytes: u64) -> GuestMemoryMmap {
    memory_with(MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING, bytes)
}

fn memory_with(flags: MemfdFlags, bytes: u64) -> GuestMemoryMmap {
    let fd = memfd_create("ram", flags).unwrap();
    ftruncate(&fd, bytes).unwrap();
    let file = FileOffset::new(File::from(fd), 0);
    let ranges = [(GuestAddress(0), bytes as usize, Some(file))];
    GuestMemoryMmap::from_ranges_with_files(ranges).unwrap()
}

impl FrontEnd {
    /// Connects as soon as somebody listens, and starts the queue at request `base`.
    pub fn connect(socket: &Path, ring: &Ring, base: u16) -> FrontEnd {
        let end = Instant::now() + DEADLINE;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < end, "{}: {error}", socket.display()),
            }
            thread::sleep(Duration::from_millis(1));
        };
        let mut protocol = Frontend::from_stream(stream, 1);
        protocol.set_owner().unwrap();
        let features = protocol.get_features().unwrap();
        assert_ne!(features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(), 0);
        protocol.set_features(features & !EVENT_IDX).unwrap();
        let wanted = VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::MQ;
        assert!(protocol.get_protocol_features().unwrap().contains(wanted));
        protocol.set_protocol_features(wanted).unwrap();
        let region = ring.memory.iter().next().unwrap();
        let region = VhostUserMemoryRegionInfo::from_guest_region(region).unwrap();
        protocol.set_mem_table(&[region]).unwrap();
        let new = || EventFd::new(EFD_NONBLOCK).unwrap();
        let front_end = FrontEnd { protocol, kick: new(), call: new() };
        front_end.start(ring, base);
        front_end
    }

    fn start(&self, ring: &Ring, base: u16) {
        let host = |gpa| ring.memory.get_host_address(GuestAddress(gpa)).unwrap() as u64;
        let addresses = VringConfigData {
            queue_max_size: RINGS.size,
            queue_size: RINGS.size,
            flags: 0,
            desc_table_addr: host(RINGS.descriptors),
            used_ring_addr: host(RINGS.used),
            avail_ring_addr: host(RINGS.available),
            log_addr: None,
        };
        self.protocol.set_vring_num(0, RINGS.size).unwrap();
        self.protocol.set_vring_base(0, base).unwrap();
        self.protocol.set_vring_addr(0, &addresses).unwrap();
        self.protocol.set_vring_call(0, &self.call).unwrap();
        self.protocol.set_vring_kick(0, &self.kick).unwrap();
        let mut protocol = self.protocol.clone();
        protocol.set_vring_enable(0, true).unwrap();
        self.kick();
    }

    /// Tells the device that there are requests in the queue.
    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// Waits for the device's signal.
    pub fn wait(&self) {
        let end = Instant::now() + DEADLINE;
        while self.call.read().is_err() {
            assert!(Instant::now() < end, "no signal came in {DEADLINE:?}");
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// Stops the queue and returns its next request.
    pub fn stop(&self) -> u16 {
        self.protocol.get_vring_base(0).unwrap() as u16
    }

    /// Turns the cache on or off, for the driver.
    pub fn set_writeback(&mut self, on: bool) {
        let flags = VhostUserConfigFlags::WRITABLE;
        self.protocol.set_config(32, flags, &[u8::from(on)]).unwrap();
    }

    /// Whether the cache is on, as the device says.
    pub fn is_writeback(&mut self) -> bool {
        let flags = VhostUserConfigFlags::empty();
        let (_, bytes) = self.protocol.get_config(32, 1, flags, &[0]).unwrap();
        bytes == [1]
    }
}
