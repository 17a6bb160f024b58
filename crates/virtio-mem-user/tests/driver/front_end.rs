//! A front end as far as this device needs one.

use std::io::Read;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use testkit::front_end::{self, DEADLINE};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;

use super::Driver;

/// A connection whose queue runs, and the channel by which the device speaks first.
pub struct FrontEnd {
    inner: front_end::FrontEnd,
    channel: UnixStream,
}

impl Deref for FrontEnd {
    type Target = front_end::FrontEnd;

    fn deref(&self) -> &front_end::FrontEnd {
        &self.inner
    }
}

impl DerefMut for FrontEnd {
    fn deref_mut(&mut self) -> &mut front_end::FrontEnd {
        &mut self.inner
    }
}

impl FrontEnd {
    /// Connects and starts the queue.
    pub fn connect(socket: &Path, driver: &Driver) -> FrontEnd {
        let wanted = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ;
        let mut inner = front_end::FrontEnd::connect(socket, wanted, 0);
        assert_eq!(inner.protocol.get_protocol_features().unwrap(), wanted);
        assert_eq!(inner.protocol.get_queue_num().unwrap(), 1);
        let (channel, theirs) = UnixStream::pair().unwrap();
        inner.protocol.set_backend_request_fd(&theirs.as_raw_fd()).unwrap();
        inner.start(driver, driver.used());
        FrontEnd { inner, channel }
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
        let FrontEnd { mut inner, mut channel } = self;
        inner.protocol.set_vring_enable(0, false).unwrap();
        channel.set_nonblocking(true).unwrap();
        // The other end is still open, so this reads only earlier notifications.
        let _ = channel.read_to_end(&mut Vec::new());
        change();
        inner.protocol.get_vring_base(0).unwrap();
        drop(inner);
        channel.set_nonblocking(false).unwrap();
        let mut bytes = Vec::new();
        channel.read_to_end(&mut bytes).unwrap();
        bytes
    }

    /// Returns usable, plugged and requested bytes.
    pub fn sizes(&mut self) -> [u64; 3] {
        let bytes = self.config(32, 24);
        let (words, _) = bytes.as_chunks::<8>();
        words.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<_>>().try_into().unwrap()
    }
}
