//! A connection to libvirt's daemon: calls, and events between them. The protocol is libvirt's own,
//! the same since its version 0.10 (`src/rpc/virnetprotocol.x`, `src/remote/*.x` there). The other
//! side may say anything: every message is bounded, and every wait ends.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, send, sendmsg,
};

use super::error::LibvirtError;
use super::xdr::{Decoder, Encoder};
use crate::shown::{REASON_MAX, shown};

/// Version of both programs.
const VERSION: u32 = 1;
/// Bytes of a message's length and header.
const HEADER_BYTES: usize = 28;
/// Most bytes of a message. libvirt bounds a text by 4 MiB, also a QEMU's answer.
const MESSAGE_BYTES: usize = (4 << 20) + (64 << 10);
/// Most bytes of a domain's name.
const NAME_BYTES: usize = 256;
const PIECE_BYTES: usize = 16 << 10;
/// Where libvirt's daemons find their driver for QEMU.
const URI: &str = "qemu:///system";
/// The events that Ebb asks libvirt for.
const EVENTS: [&str; 2] = ["RESET", "SHUTDOWN"];

/// A procedure of libvirt's: number of its program, and its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Procedure(pub u32, pub u32);

/// libvirt's programs.
const REMOTE: u32 = 0x2000_8086;
const QEMU: u32 = 0x2000_8087;

impl Procedure {
    pub const OPEN: Procedure = Procedure(REMOTE, 1);
    pub const LOOK_UP_BY_UUID: Procedure = Procedure(REMOTE, 24);
    pub const WAYS_TO_LOG_IN: Procedure = Procedure(REMOTE, 66);
    pub const LIBRARY_VERSION: Procedure = Procedure(REMOTE, 157);
    pub const MONITOR_COMMAND: Procedure = Procedure(QEMU, 1);
    pub const REGISTER_EVENT: Procedure = Procedure(QEMU, 4);
    pub const EVENT: Procedure = Procedure(QEMU, 6);
    pub const MONITOR_COMMAND_WITH_FILES: Procedure = Procedure(QEMU, 7);
}

/// What a message is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Call = 0,
    Reply = 1,
    Event = 2,
    CallWithFiles = 4,
}

/// A message without its length.
#[derive(Debug)]
pub struct Message {
    pub procedure: Procedure,
    pub kind: u32,
    pub serial: u32,
    pub status: u32,
    pub body: Vec<u8>,
}

/// When a wait ends.
#[derive(Clone, Copy)]
pub enum Until<'a> {
    /// At this time.
    Time(Instant),
    /// When the other side of this socket closes.
    Gone(&'a UnixStream),
}

/// A domain as libvirt names it in calls.
#[derive(Clone, Debug)]
pub struct Found {
    pub name: String,
    /// Encoded as in calls.
    pub encoded: Vec<u8>,
}

/// A connection.
pub struct Connection {
    stream: UnixStream,
    /// Bytes that were received and not parsed yet.
    come: Vec<u8>,
    /// Number of the last call.
    serial: u32,
}

impl Connection {
    /// Speaks the protocol on this stream.
    pub fn over(stream: UnixStream) -> Connection {
        Connection { stream, come: Vec::new(), serial: 0 }
    }

    /// The stream, to wait for what comes.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Makes sure that this user needs no login.
    pub fn log_in(&mut self, until: Until<'_>) -> Result<(), LibvirtError> {
        /// `REMOTE_AUTH_NONE`.
        const NONE: u32 = 0;
        let answer = self.call(Procedure::WAYS_TO_LOG_IN, Encoder::default(), None, until)?;
        let mut ways = Decoder(&answer);
        let count = ways.number().ok_or(LibvirtError::Unclear("its ways to log in"))?;
        let is_free = count == 0 || (0..count).map_while(|_| ways.number()).any(|way| way == NONE);
        is_free.then_some(()).ok_or(LibvirtError::Login)
    }

    /// Opens the driver for QEMU.
    pub fn open(&mut self, until: Until<'_>) -> Result<(), LibvirtError> {
        let what = Encoder::default().some_text(URI).number(0);
        self.call(Procedure::OPEN, what, None, until).map(drop)
    }

    /// Finds a domain.
    pub fn look_up(&mut self, uuid: &[u8; 16], until: Until<'_>) -> Result<Found, LibvirtError> {
        let which = Encoder::default().fixed(uuid);
        let answer = self.call(Procedure::LOOK_UP_BY_UUID, which, None, until)?;
        let name = Decoder(&answer).text().filter(|name| name.len() <= NAME_BYTES);
        let name = name.ok_or(LibvirtError::Unclear("its domain"))?.to_owned();
        Ok(Found { name, encoded: answer })
    }

    /// Has libvirt send the domain's events from now on.
    pub fn hear_events(&mut self, of: &Found, until: Until<'_>) -> Result<(), LibvirtError> {
        for event in EVENTS {
            let which = Encoder::default().number(1).fixed(&of.encoded).some_text(event).number(0);
            self.call(Procedure::REGISTER_EVENT, which, None, until)?;
        }
        Ok(())
    }

    /// Calls a procedure, and returns its answer. Events that come meanwhile are dropped.
    fn call(
        &mut self,
        procedure: Procedure,
        arguments: Encoder,
        fd: Option<BorrowedFd<'_>>,
        until: Until<'_>,
    ) -> Result<Vec<u8>, LibvirtError> {
        self.ask(procedure, &arguments, fd, until)?;
        loop {
            let message = self.message(until)?;
            if let Some(answer) = self.answer_in(&message) {
                return answer;
            }
        }
    }

    /// Sends a call, whose answer [`Connection::answer_in`] then recognizes.
    pub fn ask(
        &mut self,
        procedure: Procedure,
        arguments: &Encoder,
        fd: Option<BorrowedFd<'_>>,
        until: Until<'_>,
    ) -> Result<(), LibvirtError> {
        self.serial = self.serial.wrapping_add(1);
        let (kind, files): (Kind, &[u32]) = match fd {
            None => (Kind::Call, &[]),
            Some(_) => (Kind::CallWithFiles, &[1]),
        };
        let bytes = encoded(procedure, kind as u32, (self.serial, 0), files, &arguments.0);
        let bytes = bytes.ok_or(LibvirtError::Unsendable("a call is too long"))?;
        self.send(&bytes, None, until)?;
        // A descriptor comes behind its message, with a byte of its own.
        fd.map_or(Ok(()), |fd| self.send(&[0], Some(fd), until))
    }

    /// The answer to the last call, if this message is that.
    pub fn answer_in(&self, message: &Message) -> Option<Result<Vec<u8>, LibvirtError>> {
        if message.kind != Kind::Reply as u32 || message.serial != self.serial {
            return None;
        }
        Some(match message.status {
            0 => Ok(message.body.clone()),
            _ => Err(LibvirtError::Refused(reason(&message.body))),
        })
    }

    /// Waits for the next message.
    pub fn message(&mut self, until: Until<'_>) -> Result<Message, LibvirtError> {
        loop {
            if let Some(message) = self.message_now()? {
                return Ok(message);
            }
            self.wait(PollFlags::IN, until)?;
        }
    }

    /// Returns the next message if all of it has come.
    pub fn message_now(&mut self) -> Result<Option<Message>, LibvirtError> {
        loop {
            if let Some(message) = self.parse()? {
                return Ok(Some(message));
            }
            let mut piece = [0; PIECE_BYTES];
            let got = match recv(&self.stream, &mut piece[..], RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(Errno::CONNRESET) | Ok((0, _)) => return Err(LibvirtError::Ended),
                got => got.map_err(io::Error::from)?.0,
            };
            self.come.extend_from_slice(piece.get(..got).unwrap_or_default());
        }
    }

    /// Takes the first message out of what has come, if all of it is there.
    fn parse(&mut self) -> Result<Option<Message>, LibvirtError> {
        let Some(length) = Decoder(&self.come).number() else { return Ok(None) };
        let length = length as usize;
        if !(HEADER_BYTES..=MESSAGE_BYTES).contains(&length) {
            return Err(LibvirtError::Unclear("a message of an impossible size"));
        }
        if self.come.len() < length {
            return Ok(None);
        }
        let rest = self.come.split_off(length);
        let whole = std::mem::replace(&mut self.come, rest);
        let mut from = Decoder(&whole);
        let mut next = || from.number().ok_or(LibvirtError::Unclear("a header"));
        let [_, program, _, number, kind, serial, status] =
            [next()?, next()?, next()?, next()?, next()?, next()?, next()?];
        let (procedure, body) = (Procedure(program, number), from.0.to_vec());
        Ok(Some(Message { procedure, kind, serial, status, body }))
    }

    fn send(
        &self,
        mut bytes: &[u8],
        fd: Option<BorrowedFd<'_>>,
        until: Until<'_>,
    ) -> Result<(), LibvirtError> {
        while !bytes.is_empty() {
            match self.send_some(bytes, fd) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, until)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(LibvirtError::Ended),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(())
    }

    fn send_some(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> rustix::io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let Some(fd) = fd else { return send(&self.stream, bytes, flags) };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let (fds, mut control) = ([fd], SendAncillaryBuffer::new(&mut space));
        // There is room for one.
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, flags)
    }

    fn wait(&self, what: PollFlags, until: Until<'_>) -> Result<(), LibvirtError> {
        match until {
            Until::Time(end) => {
                let left = end.saturating_duration_since(Instant::now());
                let most =
                    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
                match poll(&mut [PollFd::new(&self.stream, what)], Some(&most)) {
                    Ok(0) => Err(LibvirtError::Late),
                    Ok(_) | Err(Errno::INTR) => Ok(()),
                    Err(error) => Err(io::Error::from(error).into()),
                }
            }
            Until::Gone(client) => {
                // A socket whose other side has gone is reported whatever is asked for.
                let asked = PollFd::new(client, PollFlags::empty());
                let mut fds = [PollFd::new(&self.stream, what), asked];
                match poll(&mut fds, None) {
                    Ok(_) if !fds[1].revents().is_empty() => Err(LibvirtError::Unwanted),
                    Ok(_) | Err(Errno::INTR) => Ok(()),
                    Err(error) => Err(io::Error::from(error).into()),
                }
            }
        }
    }
}

/// A message as it is sent. `files`: the number of descriptors, if any come with it. `None` if it is
/// too long.
pub fn encoded(
    procedure: Procedure,
    kind: u32,
    (serial, status): (u32, u32),
    files: &[u32],
    body: &[u8],
) -> Option<Vec<u8>> {
    let length = HEADER_BYTES + size_of_val(files) + body.len();
    let length = u32::try_from(length).ok().filter(|&length| length as usize <= MESSAGE_BYTES)?;
    let Procedure(program, number) = procedure;
    let words = [length, program, VERSION, number, kind, serial, status];
    let words = words.iter().chain(files);
    Some(words.fold(Encoder::default(), |all, &word| all.number(word)).fixed(body).0)
}

/// The event that this message reports, if it is one of `EVENTS`.
pub fn event_in(message: &Message) -> Option<&'static str> {
    if message.kind != Kind::Event as u32 || message.procedure != Procedure::EVENT {
        return None;
    }
    let mut from = Decoder(&message.body);
    let _callback = from.number()?;
    let (_name, _uuid, _id) = (from.text()?, from.fixed::<16>()?, from.number()?);
    let name = from.text()?;
    EVENTS.into_iter().find(|event| *event == name)
}

/// Why libvirt refused, on one line.
fn reason(error: &[u8]) -> String {
    let mut from = Decoder(error);
    let mut text = || {
        let (_code, _part) = (from.number()?, from.number()?);
        from.maybe_text()?
    };
    shown(text().unwrap_or("no reason given"), REASON_MAX)
}
