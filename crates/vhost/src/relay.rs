//! Stands between a front end and a device's process, so that the front end does not notice when
//! that process dies. It keeps what was set up, and tells it to the next process.
//!
//! It is for front ends that do not set up a back-end again: QEMU's generic vhost-user device
//! (`vhost-user-test-device`) ends QEMU when its back-end comes back. It is independent of the
//! device, and passes messages on as they are.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::message::FrontendReq as Request;

use crate::connection::{Connection, Message, Parted};
use crate::socket::tired;

/// Time between two tries to connect to the device.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// Bits of a ring's number, in a `u64` that comes with a file and in a `u32`.
const RING_MASK: u64 = 0xff;

/// The messages that a back-end must get, in the order in which they are sent: rings start last.
const KEPT: [Request; 13] = [
    Request::SET_PROTOCOL_FEATURES,
    Request::SET_OWNER,
    Request::SET_FEATURES,
    Request::SET_BACKEND_REQ_FD,
    Request::SET_MEM_TABLE,
    Request::SET_VRING_NUM,
    Request::SET_VRING_BASE,
    Request::SET_VRING_ADDR,
    Request::SET_VRING_ERR,
    Request::SET_VRING_CALL,
    Request::SET_VRING_KICK,
    Request::SET_VRING_ENABLE,
    Request::SET_STATUS,
];

/// Passes messages between front ends at `listener` and the device at `device`, for one front end
/// after the other.
pub fn run(listener: &UnixListener, device: &Path) -> ! {
    loop {
        // If interrupted, it finds nobody.
        let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], None);
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                tired(&error);
                continue;
            }
        };
        let mut relay = Relay::new(stream, device);
        let why = relay.serve();
        tracing::info!("{}: the front end: {why}", device.display());
    }
}

/// Serves one front end, which must connect `within` this time. Returns why it was disconnected.
///
/// # Errors
/// `TimedOut`: no front end connected. Otherwise as poll(2) and accept(2).
pub fn run_once(listener: &UnixListener, device: &Path, within: Duration) -> io::Result<Parted> {
    let timeout = Timespec::try_from(within).map_err(|_| io::ErrorKind::InvalidInput)?;
    if poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&timeout))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let (stream, _) = listener.accept()?;
    Ok(Relay::new(stream, device).serve())
}

/// One front end, and its device while there is one.
struct Relay {
    front_end: Connection,
    path: PathBuf,
    device: Option<Connection>,
    kept: Kept,
    /// A message of the front end that was not passed on yet.
    message: Option<Message>,
    /// A message that was passed on and needs an answer, by the next device if this one gives none.
    asked: Option<Message>,
    /// Why no device could be connected to, as it was last logged.
    logged: Option<io::ErrorKind>,
}

impl Relay {
    fn new(stream: UnixStream, device: &Path) -> Relay {
        Relay {
            front_end: Connection::new(stream),
            path: device.into(),
            device: None,
            kept: Kept::default(),
            message: None,
            asked: None,
            logged: None,
        }
    }

    /// Serves until the front end closes or is disconnected, and returns why.
    fn serve(&mut self) -> Parted {
        loop {
            let done = self.wait().and_then(|spoke| if spoke { self.hear() } else { Ok(()) });
            if let Err(why) = done.and_then(|()| self.serve_device()) {
                return why;
            }
        }
    }

    /// Whether to read from the front end: it has sent something, or closed. It is not read before
    /// its last message is done.
    fn wait(&self) -> Result<bool, Parted> {
        let is_free = self.message.is_none() && self.asked.is_none();
        let interest = if is_free { PollFlags::IN } else { PollFlags::empty() };
        let mut events = vec![PollFd::new(self.front_end.stream(), interest)];
        let device = self.device.as_ref().map(Connection::stream);
        events.extend(device.map(|stream| PollFd::new(stream, PollFlags::IN)));
        let look = self.device.is_none().then_some(LOOK_EVERY);
        let heard = self.device.iter().chain(is_free.then_some(&self.front_end));
        let patience = heard.filter_map(Connection::patience);
        let timeout = patience.chain(look).min();
        match poll(&mut events, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let spoke = events.first().is_some_and(|event| !event.revents().is_empty());
        // A front end that does not end its message must be read too, to refuse it.
        Ok(spoke || is_free && self.front_end.patience().is_some())
    }

    fn hear(&mut self) -> Result<(), Parted> {
        if let Some(message) = self.front_end.receive()? {
            self.message = Some(message);
        }
        Ok(())
    }

    /// Passes messages to and from the device, or connects to the next one. Only a failure of the
    /// front end is an error.
    fn serve_device(&mut self) -> Result<(), Parted> {
        if self.device.is_none() {
            self.device = self.connect()?;
        }
        let Some(mut device) = self.device.take() else { return Ok(()) };
        match self.pass_on(&mut device) {
            Ok(Ok(())) => self.device = Some(device),
            Ok(Err(why)) => tracing::info!("{}: the device: {why}", self.path.display()),
            Err(why) => return Err(why),
        }
        Ok(())
    }

    /// Connects to a device and sends it all that the last one got, and what came since.
    fn connect(&mut self) -> Result<Option<Connection>, Parted> {
        let stream = match UnixStream::connect(&self.path) {
            Ok(stream) => stream,
            Err(error) => {
                if let Some(why) = self.connect_failure(&error) {
                    tracing::error!("{}: {why}", self.path.display());
                }
                return Ok(None);
            }
        };
        self.logged = None;
        // The new device must not begin what the front end has ended meanwhile.
        while self.asked.is_none() {
            let said = match self.message.take() {
                Some(message) => Some(message),
                None => self.front_end.receive()?,
            };
            let Some(message) = said else { break };
            self.remember(message);
        }
        let mut device = Connection::new(stream);
        let sent = self.kept.messages().try_for_each(|message| device.send(message));
        let asked = self.asked.as_ref().map_or(Ok(()), |message| device.send(message));
        Ok(sent.and(asked).ok().map(|()| device))
    }

    /// Returns what to log about a device that cannot be connected to. It is logged once, since the
    /// connection is tried again and again. A device that is not there yet is not logged.
    fn connect_failure(&mut self, error: &io::Error) -> Option<String> {
        use io::ErrorKind as Kind;
        let kind = error.kind();
        if matches!(kind, Kind::NotFound | Kind::ConnectionRefused | Kind::Interrupted)
            || self.logged.replace(kind) == Some(kind)
        {
            return None;
        }
        let advice = match kind {
            Kind::PermissionDenied => {
                ": the relay has no privilege, and its user must be allowed to enter the directories \
                 above and to write to the socket"
            }
            _ => "",
        };
        Some(format!("the device cannot be connected to: {error}{advice}; it is tried again"))
    }

    /// Passes messages on. The outer error is the front end's failure, the inner one the device's.
    fn pass_on(&mut self, device: &mut Connection) -> Result<Result<(), Parted>, Parted> {
        loop {
            let answer = match device.receive() {
                Ok(answer) => answer,
                Err(why) => return Ok(Err(why)),
            };
            if let Some(answer) = answer {
                self.answer(&answer)?;
                continue;
            }
            if self.asked.is_some() {
                return Ok(Ok(()));
            }
            let Some(message) = self.message.take() else { return Ok(Ok(())) };
            let sent = device.send(&message);
            self.remember(message);
            if let Err(why) = sent {
                return Ok(Err(why));
            }
        }
    }

    fn remember(&mut self, message: Message) {
        let copy = copy(&message);
        if is_answered(&message) {
            self.asked = Some(message);
        }
        // A copy fails if the process has no descriptor left: then a successor lacks the message.
        match copy {
            Some(copy) => self.kept.keep(copy),
            None => tracing::error!("{}: no descriptor is to be had", self.path.display()),
        }
    }

    /// Passes an answer on. It drops one that nobody asked for.
    fn answer(&mut self, answer: &Message) -> Result<(), Parted> {
        let is_it = |asked: &Message| answer.is_reply && asked.request == answer.request;
        let Some(asked) = self.asked.take_if(|asked| is_it(asked)) else { return Ok(()) };
        self.kept.forget(&asked);
        self.front_end.send(answer)
    }
}

/// The last message of each kind that sets something, by kind and ring.
#[derive(Default)]
struct Kept(BTreeMap<(usize, u32), Message>);

impl Kept {
    fn keep(&mut self, mut message: Message) {
        let Some(request) = request(&message) else { return };
        let ring = ring(request, &message);
        if let Some(kind) = KEPT.iter().position(|kept| *kept == request) {
            // Nobody needs a successor's acknowledgement.
            message.needs_reply = false;
            self.0.insert((kind, ring), message);
        }
    }

    /// Forgets what is void once `message` is answered: the start of a ring that was stopped
    /// (vhost-user protocol, "Ring states").
    fn forget(&mut self, message: &Message) {
        if request(message) == Some(Request::GET_VRING_BASE) {
            let ring = ring(Request::GET_VRING_BASE, message);
            let kick = KEPT.iter().position(|kept| *kept == Request::SET_VRING_KICK);
            self.0.retain(|key, _| Some(key.0) != kick || key.1 != ring);
        }
    }

    fn messages(&self) -> impl Iterator<Item = &Message> {
        self.0.values()
    }
}

fn request(message: &Message) -> Option<Request> {
    Request::try_from(message.request).ok()
}

/// Returns the ring that a message is about, 0 if it is about none.
fn ring(request: Request, message: &Message) -> u32 {
    let ring = match request {
        Request::SET_VRING_KICK | Request::SET_VRING_CALL | Request::SET_VRING_ERR => {
            message.u64(0).map(|word| (word & RING_MASK) as u32)
        }
        Request::SET_VRING_NUM
        | Request::SET_VRING_ADDR
        | Request::SET_VRING_BASE
        | Request::GET_VRING_BASE
        | Request::SET_VRING_ENABLE => message.u32(0),
        _ => None,
    };
    // No device has more rings than that, and all would be kept here.
    ring.map_or(0, |ring| ring & RING_MASK as u32)
}

fn is_answered(message: &Message) -> bool {
    use Request as R;
    let asks = |request| {
        matches!(
            request,
            R::GET_FEATURES
                | R::GET_PROTOCOL_FEATURES
                | R::GET_QUEUE_NUM
                | R::GET_VRING_BASE
                | R::GET_CONFIG
                | R::GET_INFLIGHT_FD
                | R::GET_MAX_MEM_SLOTS
                | R::GET_STATUS
        )
    };
    message.needs_reply || request(message).is_some_and(asks)
}

/// Returns a copy of a message, with files of its own.
fn copy(message: &Message) -> Option<Message> {
    let files = message.files.iter().map(OwnedFd::try_clone).collect::<Result<_, _>>().ok()?;
    let Message { request, is_reply, needs_reply, .. } = *message;
    Some(Message { request, is_reply, needs_reply, body: message.body.clone(), files })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_connection_is_reported_once() {
        let (stream, _front_end) = UnixStream::pair().unwrap();
        let mut relay = Relay::new(stream, Path::new("/device"));
        let mut message = |kind: io::ErrorKind| relay.connect_failure(&kind.into());
        assert_eq!(message(io::ErrorKind::NotFound), None);
        let closed = message(io::ErrorKind::PermissionDenied).unwrap();
        assert!(closed.contains("no privilege") && !closed.contains('\n'), "{closed}");
        // Once, even if the reason comes and goes.
        for kind in [io::ErrorKind::PermissionDenied, io::ErrorKind::NotFound] {
            assert_eq!(message(kind), None);
        }
        assert_eq!(message(io::ErrorKind::PermissionDenied), None);
        assert!(message(io::ErrorKind::NotADirectory).is_some());
    }

    #[test]
    fn a_device_that_is_there_again_ends_the_failure() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("device");
        let (stream, _front_end) = UnixStream::pair().unwrap();
        let mut relay = Relay::new(stream, &path);
        // Its parent is not a directory.
        relay.path = "/dev/null/device".into();
        assert!(relay.connect().is_ok_and(|device| device.is_none()));
        assert_eq!(relay.logged, Some(io::ErrorKind::NotADirectory));
        relay.path = path.clone();
        let _device = UnixListener::bind(&path).unwrap();
        assert!(relay.connect().is_ok_and(|device| device.is_some()));
        assert_eq!(relay.logged, None);
    }
}
