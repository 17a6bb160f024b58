//! Stands between a front end and a library's server in this process. The server waits without
//! end for its next message, and takes every descriptor as it is. Here a message has a deadline,
//! and its descriptors are checked (`vet`).
//!
//! A front end that has lost its back-end should introduce itself to the next one. Some QEMUs do not
//! if the back-end died while the guest had no driver for the device, as during a reboot: the device
//! believes to be connected, and goes on with what it has negotiated (`vhost_user_async_close` of
//! QEMU 7.2 to 9.0, `hw/virtio/vhost-user.c`). The server would not acknowledge its messages then,
//! and all of the VM would wait. So such a front end is introduced here.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, getsockname, listen,
    socket_with,
};

use vhost::vhost_user::message::FrontendReq as Request;

use crate::connection::{Connection, Message, Parted};
use crate::vet::vet;

/// Longest time that a message waits for what it needs.
const ADMITTED_WITHIN: Duration = Duration::from_secs(10);
/// Time until the next try to admit a message.
const TRY_AGAIN_AFTER: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Passes messages between a front end and a server.
pub struct Passage {
    front_end: Connection,
    server: Connection,
    /// A message of the front end that the server has not got yet.
    pending: Option<Pending>,
    /// `VHOST_USER_*_PROTOCOL_F_*` bits that the server offers.
    protocol_features: u64,
    stage: Stage,
}

/// How far a front end is known to the server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It has sent no message yet.
    New,
    /// It was introduced to the server, whose answer is for nobody.
    Introduced,
    Known,
}

struct Pending {
    message: Message,
    since: Instant,
    /// Whether the server may have it.
    is_admitted: bool,
}

impl Passage {
    /// Makes a passage between the front end at this stream and the server that accepts at the
    /// returned listener, and that offers these protocol features.
    ///
    /// # Errors
    /// No socket could be made.
    pub fn new(
        front_end: UnixStream,
        protocol_features: u64,
    ) -> io::Result<(Passage, UnixListener)> {
        let (server, listener) = stream_to_listener()?;
        let (front_end, server) = (Connection::new(front_end), Connection::new(server));
        let (pending, stage) = (None, Stage::New);
        Ok((Passage { front_end, server, pending, protocol_features, stage }, listener))
    }

    /// Passes messages on until one side closes or one of `ends` is readable. It asks `admit` for
    /// each message, again and again until the server may have it.
    ///
    /// # Errors
    /// Why a side has closed, or is disconnected. A message that is not admitted within 10 s
    /// disconnects the front end, and so does an error of `admit`.
    pub fn run(
        &mut self,
        ends: &[BorrowedFd<'_>],
        mut admit: impl FnMut(&Message) -> Result<bool, Parted>,
    ) -> Result<(), Parted> {
        while !self.wait(ends)? {
            if self.pending.is_none()
                && let Some(mut message) = self.front_end.receive()?
            {
                vet(&mut message)?;
                if self.stage == Stage::New {
                    self.stage = self.introduce(&message)?;
                }
                let since = Instant::now();
                self.pending = Some(Pending { message, since, is_admitted: false });
            }
            if let Some(pending) = self.pending.as_mut().filter(|pending| !pending.is_admitted) {
                pending.is_admitted = admit(&pending.message)?;
                if !pending.is_admitted && pending.since.elapsed() > ADMITTED_WITHIN {
                    return Err(Parted::NotAdmitted(pending.message.request));
                }
            }
            self.pass_on()?;
            self.pass_back()?;
        }
        // The server may have answered just before its end.
        self.pass_back()
    }

    /// Passes back what the server has answered by now.
    fn pass_back(&mut self) -> Result<(), Parted> {
        while let Some(answer) = self.server.receive()? {
            match self.stage {
                Stage::Introduced => self.stage = Stage::Known,
                _ => self.front_end.send(&answer)?,
            }
        }
        Ok(())
    }

    /// Introduces a front end that does not do so with its first message. It has negotiated with
    /// an earlier server: it acknowledges features, and uses those that both sides have.
    fn introduce(&mut self, first: &Message) -> Result<Stage, Parted> {
        use Request as R;
        let introductions =
            [R::GET_FEATURES, R::SET_OWNER, R::GET_PROTOCOL_FEATURES, R::SET_PROTOCOL_FEATURES];
        if introductions.iter().any(|request| u32::from(*request) == first.request) {
            return Ok(Stage::Known);
        }
        let features = self.protocol_features.to_ne_bytes().to_vec();
        for (request, body) in [
            (R::GET_FEATURES, Vec::new()),
            (R::SET_PROTOCOL_FEATURES, features),
            (R::SET_OWNER, Vec::new()),
        ] {
            self.server.send(&Message::new(request.into(), body))?;
        }
        tracing::info!("a front end goes on with what it has negotiated before");
        Ok(Stage::Introduced)
    }

    /// Waits for something to do. `true`: one of `ends` is readable.
    fn wait(&self, ends: &[BorrowedFd<'_>]) -> Result<bool, Parted> {
        let (hears, says, patience) = match &self.pending {
            None => (PollFlags::IN, PollFlags::IN, self.front_end.patience()),
            Some(Pending { is_admitted: false, .. }) => {
                (PollFlags::empty(), PollFlags::IN, Some(TRY_AGAIN_AFTER))
            }
            Some(_) => (PollFlags::empty(), PollFlags::IN | PollFlags::OUT, None),
        };
        let mut events: Vec<_> = ends.iter().map(|end| PollFd::new(end, PollFlags::IN)).collect();
        events.push(PollFd::new(self.front_end.stream(), hears));
        events.push(PollFd::new(self.server.stream(), says));
        match poll(&mut events, patience.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // A closed front end must be noticed here: it is not read while its last message waits.
        let left = events.get(ends.len()).map_or(PollFlags::empty(), PollFd::revents);
        if self.pending.is_some() && left.intersects(PollFlags::HUP | PollFlags::ERR) {
            return Err(Parted::Closed);
        }
        Ok(events.iter().take(ends.len()).any(|event| !event.revents().is_empty()))
    }

    /// Passes the pending message on if there is room. A socket with room has it for a whole
    /// message.
    fn pass_on(&mut self) -> Result<(), Parted> {
        let mut room = [PollFd::new(self.server.stream(), PollFlags::OUT)];
        let is_admitted = self.pending.as_ref().is_some_and(|pending| pending.is_admitted);
        let has_room = is_admitted && poll(&mut room, Some(&Default::default()))? > 0;
        match self.pending.take_if(|_| has_room) {
            Some(pending) => self.server.send(&pending.message),
            None => Ok(()),
        }
    }
}

/// Makes a stream, and a listener at which the stream's other end is the only one that waits. The
/// kernel chooses the name, which others can see. The queue has room for one: if our stream is in
/// it, nobody else came before.
fn stream_to_listener() -> io::Result<(UnixStream, UnixListener)> {
    let socket = |flags| {
        socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | flags, None)
    };
    let listener = socket(SocketFlags::empty())?;
    bind(&listener, &SocketAddrUnix::new_unnamed())?;
    listen(&listener, 0)?;
    let stream = socket(SocketFlags::NONBLOCK)?;
    connect(&stream, &getsockname(&listener)?)?;
    Ok((stream.into(), listener.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_other_client_can_wait_at_the_listener() {
        let (ours, listener) = stream_to_listener().unwrap();
        let address = getsockname(&listener).unwrap();
        let socket = || {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
        };
        assert_eq!(connect(socket(), &address), Err(Errno::AGAIN));
        let (theirs, _) = listener.accept().unwrap();
        drop(ours);
        assert_eq!(io::Read::read(&mut &theirs, &mut [0]).unwrap(), 0);
    }
}
