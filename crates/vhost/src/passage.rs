//! Stands between a front end and a library's server in this process, which waits for whatever
//! it is told next and takes every descriptor as it is: here a message has a deadline, and its
//! descriptors are looked at (`vet`).

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, getsockname, listen,
    socket_with,
};

use crate::connection::{Connection, Message, Parted};
use crate::vet::vet;

/// Both ends of one conversation.
pub struct Passage {
    front_end: Connection,
    server: Connection,
    /// What the front end has said, and the server has no room for yet.
    pending: Option<Message>,
}

impl Passage {
    /// Between the front end at this stream and whoever accepts at the listener.
    ///
    /// # Errors
    /// No socket is to be had.
    pub fn new(front_end: UnixStream) -> io::Result<(Passage, UnixListener)> {
        let (server, listener) = stream_to_listener()?;
        let (front_end, server) = (Connection::new(front_end), Connection::new(server));
        Ok((Passage { front_end, server, pending: None }, listener))
    }

    /// Passes on what they say, until one of them goes or one of `ends` is readable. `hear` is
    /// told of each message before the server is.
    ///
    /// # Errors
    /// Why a side has gone, or is let go.
    pub fn run(
        &mut self,
        ends: &[BorrowedFd<'_>],
        mut hear: impl FnMut(&Message),
    ) -> Result<(), Parted> {
        while !self.wait(ends)? {
            if self.pending.is_none()
                && let Some(mut message) = self.front_end.receive()?
            {
                vet(&mut message)?;
                hear(&message);
                self.pending = Some(message);
            }
            self.pass_on()?;
            while let Some(answer) = self.server.receive()? {
                self.front_end.send(&answer)?;
            }
        }
        Ok(())
    }

    /// `true`: it is to end.
    fn wait(&self, ends: &[BorrowedFd<'_>]) -> Result<bool, Parted> {
        let (hears, says) = match &self.pending {
            None => (PollFlags::IN, PollFlags::IN),
            Some(_) => (PollFlags::empty(), PollFlags::IN | PollFlags::OUT),
        };
        let mut events: Vec<_> = ends.iter().map(|end| PollFd::new(end, PollFlags::IN)).collect();
        events.push(PollFd::new(self.front_end.stream(), hears));
        events.push(PollFd::new(self.server.stream(), says));
        match poll(&mut events, self.front_end.patience().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // One that has gone is not heard while its last message waits for room.
        let left = events.get(ends.len()).map_or(PollFlags::empty(), PollFd::revents);
        if self.pending.is_some() && left.intersects(PollFlags::HUP | PollFlags::ERR) {
            return Err(Parted::Gone);
        }
        Ok(events.iter().take(ends.len()).any(|event| !event.revents().is_empty()))
    }

    /// A socket that has room has it for a whole message.
    fn pass_on(&mut self) -> Result<(), Parted> {
        let mut room = [PollFd::new(self.server.stream(), PollFlags::OUT)];
        let has_room = self.pending.is_some() && poll(&mut room, Some(&Default::default()))? > 0;
        match self.pending.take_if(|_| has_room) {
            Some(message) => self.server.send(&message),
            None => Ok(()),
        }
    }
}

/// A stream, and a listener at which its other end is the only one that waits. The name is the
/// kernel's choice and others can see it: the queue has room for one, so where ours is in it,
/// nobody else came before.
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
    fn nobody_else_waits_at_the_listener() {
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
