//! One front end: what it has set up, and its requests (vhost-user protocol, "Front-end message
//! types").

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ebb_vhost::{Connection, Dma, Guest, Message, Parted, announce, vet};
use ebb_virtio_mem::Device;
use rustix::event::Timespec;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

use crate::ram::Ram;
use crate::ring::{Next, Places, Ring};

/// Number of queues of a device (section 5.15.2).
const QUEUES: u64 = 1;
/// Value of `VHOST_USER_MAX_CONFIG_SIZE`.
const CONFIG_BYTES_MAX: u32 = 256;
/// Fields of a `u64` that names a ring: the ring's number, and whether no file comes with it.
const RING_MASK: u64 = 0xff;
const NO_FILE: u64 = 1 << 8;

/// How the device accesses guest memory, and how often it was refused.
#[derive(Clone)]
pub(crate) struct Access {
    pub(crate) dma: Arc<dyn Dma>,
    pub(crate) faults: Arc<AtomicU64>,
}

/// State of one front end's connection.
pub(crate) struct Session<'a> {
    device: &'a Device,
    access: &'a Access,
    connection: Connection,
    /// Channel by which the front end learns of changes.
    channel: Option<UnixStream>,
    ram: Ram,
    ring: Ring,
}

/// Payload of an answer, unless it is an acknowledgement.
type Answer = Option<Vec<u8>>;

impl<'a> Session<'a> {
    pub(crate) fn new(device: &'a Device, access: &'a Access, stream: UnixStream) -> Session<'a> {
        Session {
            device,
            access,
            connection: Connection::new(stream),
            channel: None,
            ram: Ram::default(),
            ring: Ring::new(),
        }
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        self.connection.stream()
    }

    /// Returns the longest time after which [`Session::listen`] must be called, even without an
    /// event.
    pub(crate) fn patience(&self) -> Option<Timespec> {
        self.connection.patience()
    }

    /// Fails if a file of the guest's memory no longer has it: what was read there is invalid.
    pub(crate) fn check(&self) -> Result<(), Parted> {
        if self.ram.is_broken() { Err(Parted::Memory) } else { Ok(()) }
    }

    pub(crate) fn kick(&self) -> Option<&OwnedFd> {
        self.ring.kick()
    }

    /// Answers the driver's requests.
    pub(crate) fn serve(&mut self) -> Next {
        let Access { dma, faults } = self.access;
        let guest = Guest::new(self.ram.memory(), dma.clone(), faults.clone());
        self.ring.serve(&guest, self.device)
    }

    /// Tells the driver that the configuration space has changed. Without a channel, the driver
    /// sees that when it reads. If the queue does not run, the driver is notified once it does,
    /// because QEMU 11 does not survive a notification for a stopped device.
    pub(crate) fn announce(&mut self) {
        if self.ring.kick().is_none() {
            return;
        }
        if let Some(Err(why)) = self.channel.as_ref().map(announce) {
            tracing::warn!("virtio-mem: the driver does not hear of a change: {why}");
            self.channel = None;
        }
    }

    /// Handles all messages that the front end has sent so far.
    pub(crate) fn listen(&mut self) -> Result<(), Parted> {
        while let Some(mut message) = self.connection.receive()? {
            vet(&mut message)?;
            let request = message.request;
            match self.obey(&mut message) {
                Some(Some(answer)) => self.connection.send(&Message::reply(request, answer))?,
                Some(None) if message.needs_reply => self.acknowledge(request, true)?,
                Some(None) => {}
                None if message.needs_reply => self.acknowledge(request, false)?,
                // Otherwise the front end would go on as if this had been done.
                None => return Err(Parted::Request(request)),
            }
        }
        Ok(())
    }

    /// Sends an acknowledgement: vhost-user protocol, `VHOST_USER_PROTOCOL_F_REPLY_ACK`.
    fn acknowledge(&mut self, request: u32, done: bool) -> Result<(), Parted> {
        let answer = u64::from(!done).to_ne_bytes().to_vec();
        self.connection.send(&Message::reply(request, answer))
    }

    /// Handles one message. Returns `None` if it is invalid; then nothing was done.
    fn obey(&mut self, message: &mut Message) -> Option<Answer> {
        let number = |number: u64| Some(Some(number.to_ne_bytes().to_vec()));
        match FrontendReq::try_from(message.request).ok()? {
            FrontendReq::GET_FEATURES => return number(self.features()),
            FrontendReq::SET_FEATURES => self.set_features(message.u64(0)?)?,
            FrontendReq::GET_PROTOCOL_FEATURES => return number(protocol_features().bits()),
            FrontendReq::SET_PROTOCOL_FEATURES => {
                VhostUserProtocolFeatures::from_bits(message.u64(0)?)
                    .filter(|wanted| protocol_features().contains(*wanted))?;
            }
            FrontendReq::GET_QUEUE_NUM => return number(QUEUES),
            FrontendReq::SET_OWNER => {}
            FrontendReq::RESET_OWNER | FrontendReq::RESET_DEVICE => {
                self.ring.stop();
                self.device.reset();
            }
            FrontendReq::SET_MEM_TABLE => {
                self.ram = Ram::new(message)?;
                self.ring.moved();
            }
            FrontendReq::GET_CONFIG => return Some(Some(self.config(message)?)),
            // The driver writes nothing (section 5.15.4).
            FrontendReq::SET_CONFIG | FrontendReq::SET_LOG_BASE | FrontendReq::SET_LOG_FD => {}
            FrontendReq::SET_BACKEND_REQ_FD => {
                self.channel = Some(UnixStream::from(message.files.pop_front()?));
            }
            _ => return self.obey_on_ring(message),
        }
        Some(None)
    }

    fn obey_on_ring(&mut self, message: &mut Message) -> Option<Answer> {
        match FrontendReq::try_from(message.request).ok()? {
            FrontendReq::SET_VRING_NUM => self.ring.set_size(ring_value(message)?)?,
            FrontendReq::SET_VRING_ADDR => {
                ring_value(message)?;
                let gpa = |word| self.ram.gpa(message.u64(word)?);
                let places = Places { descriptors: gpa(1)?, used: gpa(2)?, available: gpa(3)? };
                self.ring.set_places(places)?;
            }
            FrontendReq::SET_VRING_BASE => self.ring.set_base(ring_value(message)?),
            FrontendReq::GET_VRING_BASE => {
                ring_value(message)?;
                // The driver may be waiting for requests that it has made. Those that cannot be
                // answered now stay in the queue.
                self.serve();
                let next = u32::from(self.ring.stop());
                return Some(Some([0, next].map(u32::to_ne_bytes).concat()));
            }
            // A ring without a kick would have to be polled all the time.
            FrontendReq::SET_VRING_KICK => self.ring.start(ring_file(message)??),
            FrontendReq::SET_VRING_CALL => self.ring.set_call(ring_file(message)?),
            FrontendReq::SET_VRING_ERR => drop(ring_file(message)?),
            FrontendReq::SET_VRING_ENABLE => {
                self.ring.set_enabled(ring_value(message)? == 1);
                // Announces changes that happened before the front end could be notified.
                self.announce();
            }
            _ => return None,
        }
        Some(None)
    }

    fn features(&self) -> u64 {
        let ours = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let transport = 1u64 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC;
        self.device.features() | transport | ours
    }

    fn set_features(&mut self, features: u64) -> Option<()> {
        if features & !self.features() != 0 {
            return None;
        }
        if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            // See the vhost-user protocol, "Ring states".
            self.ring.set_enabled(true);
        }
        self.device.negotiated(features);
        Some(())
    }

    /// Returns offset, size and flags, followed by the requested bytes.
    fn config(&self, message: &mut Message) -> Option<Vec<u8>> {
        let (offset, size) = (message.u32(0)?, message.u32(1)?);
        let (header, bytes) = message.body.split_at_mut_checked(12)?;
        if size > CONFIG_BYTES_MAX || bytes.len() != size as usize {
            return None;
        }
        self.device.read_config(offset, bytes);
        Some([header, bytes].concat())
    }
}

/// Returns the protocol features that a front end may use. Whoever asks for an acknowledgement gets
/// one, even without REPLY_ACK.
fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::CONFIG
}

/// Returns the value of a message about the only ring.
fn ring_value(message: &Message) -> Option<u32> {
    match message.u32(0)? {
        0 => message.u32(1),
        _ => None,
    }
}

/// Returns the file of a message about the only ring, if one comes with it.
fn ring_file(message: &mut Message) -> Option<Option<OwnedFd>> {
    let word = message.u64(0)?;
    match (word & RING_MASK, word & NO_FILE) {
        (0, 0) => message.files.pop_front().map(Some),
        (0, _) => Some(None),
        _ => None,
    }
}
