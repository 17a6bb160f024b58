//! A front end of the vhost-user protocol (QEMU documentation, interop/vhost-user), as much of it
//! as a device with one queue needs.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::virtqueue::Queue;

/// Longest wait for a device.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// A connection to a device.
pub struct FrontEnd {
    /// What speaks the protocol.
    pub protocol: Frontend,
    kick: EventFd,
    call: EventFd,
}

/// Connects as soon as somebody listens.
pub fn stream(socket: &Path) -> UnixStream {
    let end = Instant::now() + DEADLINE;
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < end, "{}: {error}", socket.display()),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

impl FrontEnd {
    /// Connects, and accepts `wanted` and all features of the device but `without`.
    pub fn connect(socket: &Path, wanted: VhostUserProtocolFeatures, without: u64) -> FrontEnd {
        let mut protocol = Frontend::from_stream(stream(socket), 1);
        protocol.set_owner().unwrap();
        let features = protocol.get_features().unwrap();
        assert_ne!(features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(), 0);
        protocol.set_features(features & !without).unwrap();
        assert!(protocol.get_protocol_features().unwrap().contains(wanted));
        protocol.set_protocol_features(wanted).unwrap();
        let new = || EventFd::new(EFD_NONBLOCK).unwrap();
        FrontEnd { protocol, kick: new(), call: new() }
    }

    /// Shares the queue's memory, and starts the queue at request `base`.
    pub fn start(&self, queue: &Queue, base: u16) {
        let regions = queue.memory.iter();
        let regions: Vec<_> = regions
            .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
            .collect();
        // The order differs from that of the addresses.
        let regions: Vec<_> = regions.into_iter().rev().collect();
        self.protocol.set_mem_table(&regions).unwrap();
        let rings = queue.rings();
        let host = |gpa| queue.memory.get_host_address(GuestAddress(gpa)).unwrap() as u64;
        let addresses = VringConfigData {
            queue_max_size: rings.size,
            queue_size: rings.size,
            flags: 0,
            desc_table_addr: host(rings.descriptors),
            used_ring_addr: host(rings.used),
            avail_ring_addr: host(rings.available),
            log_addr: None,
        };
        self.protocol.set_vring_num(0, rings.size).unwrap();
        self.protocol.set_vring_base(0, base).unwrap();
        self.protocol.set_vring_addr(0, &addresses).unwrap();
        self.protocol.set_vring_call(0, &self.call).unwrap();
        self.protocol.set_vring_kick(0, &self.kick).unwrap();
        let mut protocol = self.protocol.clone();
        protocol.set_vring_enable(0, true).unwrap();
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

    /// Kicks the queue and waits until all requests are used.
    pub fn finish(&self, queue: &Queue) {
        self.kick();
        while queue.used() != queue.next {
            self.wait();
        }
    }

    /// Stops the queue, and returns its next request.
    pub fn stop(&self) -> u16 {
        self.protocol.get_vring_base(0).unwrap() as u16
    }

    /// Reads from the configuration space.
    pub fn config(&mut self, offset: u32, bytes: u32) -> Vec<u8> {
        let flags = VhostUserConfigFlags::empty();
        let empty = vec![0; bytes as usize];
        self.protocol.get_config(offset, bytes, flags, &empty).unwrap().1
    }

    /// Writes to the configuration space, for the driver.
    pub fn set_config(&mut self, offset: u32, bytes: &[u8]) {
        self.protocol.set_config(offset, VhostUserConfigFlags::WRITABLE, bytes).unwrap();
    }
}
