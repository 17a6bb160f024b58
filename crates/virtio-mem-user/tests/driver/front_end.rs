//! A front end of the vhost-user protocol, as far as this device needs one.

use std::io::Read;
use std::os::fd::AsRawFd;
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

use super::{Driver, RINGS};

/// Anything that takes longer is stuck.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// A connection whose queue runs.
pub struct FrontEnd {
    protocol: Frontend,
    channel: UnixStream,
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
    /// Connects and starts the queue.
    pub fn connect(socket: &Path, driver: &Driver) -> FrontEnd {
        let mut protocol = Frontend::from_stream(stream(socket), 1);
        protocol.set_owner().unwrap();
        let features = protocol.get_features().unwrap();
        assert_ne!(features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(), 0);
        protocol.set_features(features).unwrap();
        let wanted = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ;
        assert_eq!(protocol.get_protocol_features().unwrap(), wanted);
        protocol.set_protocol_features(wanted).unwrap();
        assert_eq!(protocol.get_queue_num().unwrap(), 1);
        let (channel, theirs) = UnixStream::pair().unwrap();
        protocol.set_backend_request_fd(&theirs.as_raw_fd()).unwrap();
        let regions = driver.vm.memory.iter();
        let regions: Vec<_> = regions
            .map(|region| VhostUserMemoryRegionInfo::from_guest_region(region).unwrap())
            .collect();
        // The order differs from that of the addresses.
        let regions: Vec<_> = regions.into_iter().rev().collect();
        protocol.set_mem_table(&regions).unwrap();
        let new = || EventFd::new(EFD_NONBLOCK).unwrap();
        let front_end = FrontEnd { protocol, channel, kick: new(), call: new() };
        front_end.start(driver);
        front_end
    }

    fn start(&self, driver: &Driver) {
        let host = |gpa| driver.vm.memory.get_host_address(GuestAddress(gpa)).unwrap() as u64;
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
        self.protocol.set_vring_base(0, driver.used()).unwrap();
        self.protocol.set_vring_addr(0, &addresses).unwrap();
        self.protocol.set_vring_call(0, &self.call).unwrap();
        self.protocol.set_vring_kick(0, &self.kick).unwrap();
        let mut protocol = self.protocol.clone();
        protocol.set_vring_enable(0, true).unwrap();
    }

    /// Signals that there is something in the queue.
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

    /// Waits until all requests are answered.
    pub fn finish(&self, driver: &Driver) {
        self.kick();
        while driver.used() != driver.next {
            self.wait();
        }
    }

    /// Waits for a notification that the configuration space has changed.
    pub fn notice(&mut self) {
        let mut bytes = [0; 12];
        self.channel.set_read_timeout(Some(DEADLINE)).unwrap();
        self.channel.read_exact(&mut bytes).unwrap();
        let [request, flags, length] =
            [0, 4, 8].map(|at| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap()));
        assert_eq!((request, flags, length), (2, 1, 0));
    }

    /// Stops the device as QEMU does, and disconnects. Returns the bytes of all notifications from
    /// `change` on.
    pub fn stop_and_go(self, change: impl FnOnce()) -> Vec<u8> {
        let FrontEnd { mut protocol, mut channel, .. } = self;
        protocol.set_vring_enable(0, false).unwrap();
        channel.set_nonblocking(true).unwrap();
        // The other end is still open, so this reads only earlier notifications.
        let _ = channel.read_to_end(&mut Vec::new());
        change();
        protocol.get_vring_base(0).unwrap();
        drop(protocol);
        channel.set_nonblocking(false).unwrap();
        let mut bytes = Vec::new();
        channel.read_to_end(&mut bytes).unwrap();
        bytes
    }

    /// Stops the queue. Returns where it stands.
    pub fn stop(&self) -> u16 {
        self.protocol.get_vring_base(0).unwrap() as u16
    }

    /// Returns usable, plugged and requested bytes.
    pub fn sizes(&mut self) -> [u64; 3] {
        let bytes = self.config(32, 24);
        let (words, _) = bytes.as_chunks::<8>();
        words.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<_>>().try_into().unwrap()
    }

    pub fn config(&mut self, offset: u32, bytes: u32) -> Vec<u8> {
        let flags = VhostUserConfigFlags::empty();
        let empty = vec![0; bytes as usize];
        self.protocol.get_config(offset, bytes, flags, &empty).unwrap().1
    }
}
