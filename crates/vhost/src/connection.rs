//! Messages between a front end and a back-end: vhost-user protocol, "Header" and "Communication".
//! Both are on one machine, so numbers have its byte order.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use thiserror::Error;

const HEADER_BYTES: usize = 12;
/// Most bytes of a body. No message to a device without memory slots is longer.
const BODY_BYTES_MAX: usize = 4096;
/// Most files of a message: the protocol's limit on a memory table's regions.
const FILES_MAX: usize = 8;
/// Longest time from a message's first byte to its last, since others wait meanwhile.
const MESSAGE_WITHIN: Duration = Duration::from_secs(5);

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;

/// Why a connection ended.
#[derive(Debug, Error)]
pub enum Parted {
    /// The other side has closed it.
    #[error("it has closed the connection")]
    Closed,
    /// As sendmsg(2), recvmsg(2) and poll(2).
    #[error("{0}")]
    Io(#[from] Errno),
    /// The message is not of the protocol's only version.
    #[error("a message of version {0}")]
    Version(u32),
    /// The message is longer than any that a device gets.
    #[error("a message of {0} bytes")]
    Length(u32),
    /// The message has more files than a memory table can have regions.
    #[error("a message with too many files")]
    Files,
    /// A ring's descriptor, by which either side signals the other, is no eventfd.
    #[error("a ring's descriptor that is no eventfd")]
    NoEvent,
    /// A touch of a mapping found nothing in its file.
    #[error("its memory has no page: the file was shrunk, or has no room to grow")]
    Memory,
    /// The other side began a message and does not end it.
    #[error("a message whose end does not come")]
    Slow,
    /// The other side does not read our messages.
    #[error("it does not take our messages")]
    Deaf,
    /// What the request needs did not come in time.
    #[error("request {0} had to wait for too long")]
    NotAdmitted(u32),
    /// The request makes no sense, and no answer could say so.
    #[error("request {0} makes no sense")]
    Request(u32),
}

/// A message, with its files.
#[derive(Debug)]
pub struct Message {
    /// Its number, in the protocol's list for its direction.
    pub request: u32,
    /// Whether it is an answer.
    pub is_reply: bool,
    /// `VHOST_USER_NEED_REPLY_MASK`.
    pub needs_reply: bool,
    /// The bytes after the header.
    pub body: Vec<u8>,
    /// The files sent with it.
    pub files: VecDeque<OwnedFd>,
}

impl Message {
    /// Makes a message that asks for no acknowledgement.
    pub fn new(request: u32, body: Vec<u8>) -> Message {
        Message { request, is_reply: false, needs_reply: false, body, files: VecDeque::new() }
    }

    /// Makes an answer to `request`.
    pub fn reply(request: u32, body: Vec<u8>) -> Message {
        Message { is_reply: true, ..Message::new(request, body) }
    }

    /// Returns the `u32` at index `index` of the body.
    pub fn u32(&self, index: usize) -> Option<u32> {
        let (words, _) = self.body.as_chunks::<4>();
        words.get(index).map(|word| u32::from_ne_bytes(*word))
    }

    /// Returns the `u64` at index `index` of the body.
    pub fn u64(&self, index: usize) -> Option<u64> {
        let (words, _) = self.body.as_chunks::<8>();
        words.get(index).map(|word| u64::from_ne_bytes(*word))
    }
}

/// A connection to the other side. It never waits for that side.
pub struct Connection {
    stream: UnixStream,
    /// The bytes of the present message that have come.
    received: Vec<u8>,
    files: VecDeque<OwnedFd>,
    /// The time by which all of the present message must have come.
    deadline: Option<Instant>,
}

impl Connection {
    /// Makes a connection from this stream.
    pub fn new(stream: UnixStream) -> Connection {
        Connection { stream, received: Vec::new(), files: VecDeque::new(), deadline: None }
    }

    /// Returns after which time to call [`Connection::receive`], whether anything came or not.
    /// `None`: call it only when the stream is readable.
    pub fn patience(&self) -> Option<Timespec> {
        let left = self.deadline?.saturating_duration_since(Instant::now());
        // A little later, so that the deadline is over then.
        Timespec::try_from(left + Duration::from_millis(1)).ok()
    }

    /// Returns the stream, which is readable when a message comes.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Returns the next message, once all of it has come.
    ///
    /// # Errors
    /// The connection has ended: no message will come.
    pub fn receive(&mut self) -> Result<Option<Message>, Parted> {
        loop {
            let whole = self.wanted()?;
            if self.received.len() == whole && whole >= HEADER_BYTES && self.has_body() {
                return Ok(Some(self.take()));
            }
            if !self.receive_more(whole)? {
                return match self.deadline {
                    Some(deadline) if Instant::now() >= deadline => Err(Parted::Slow),
                    _ => Ok(None),
                };
            }
            // The deadline is absolute: a byte now and then gains no time.
            self.deadline.get_or_insert_with(|| Instant::now() + MESSAGE_WITHIN);
        }
    }

    fn has_body(&self) -> bool {
        let body = self.received.len().saturating_sub(HEADER_BYTES);
        self.header().is_some_and(|[_, _, bytes]| bytes as usize == body)
    }

    /// Returns request, flags and length of the body.
    fn header(&self) -> Option<[u32; 3]> {
        let (words, _) = self.received.as_chunks::<4>();
        let words: &[_; 3] = words.first_chunk()?;
        Some(words.map(u32::from_ne_bytes))
    }

    /// Returns the length of the message, or of the header until that has come.
    fn wanted(&self) -> Result<usize, Parted> {
        let Some([_, flags, bytes]) = self.header() else { return Ok(HEADER_BYTES) };
        if flags & VERSION_MASK != VERSION {
            return Err(Parted::Version(flags & VERSION_MASK));
        }
        match bytes as usize {
            body @ ..=BODY_BYTES_MAX => Ok(HEADER_BYTES + body),
            _ => Err(Parted::Length(bytes)),
        }
    }

    /// Receives more bytes of the message. Whether any came.
    fn receive_more(&mut self, whole: usize) -> Result<bool, Parted> {
        let mut bytes = [0; HEADER_BYTES + BODY_BYTES_MAX];
        let missing = whole.saturating_sub(self.received.len());
        let place = bytes.get_mut(..missing).unwrap_or_default();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received =
            match recvmsg(&self.stream, &mut [IoSliceMut::new(place)], &mut control, flags) {
                Ok(received) => received,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                Err(Errno::CONNRESET) => return Err(Parted::Closed),
                Err(error) => return Err(error.into()),
            };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || self.files.len() > FILES_MAX {
            return Err(Parted::Files);
        }
        if received.bytes == 0 {
            return Err(Parted::Closed);
        }
        self.received.extend(bytes.iter().take(received.bytes));
        Ok(true)
    }

    fn take(&mut self) -> Message {
        let [request, flags, _] = self.header().unwrap_or_default();
        let body = self.received.split_off(HEADER_BYTES.min(self.received.len()));
        self.received.clear();
        let files = std::mem::take(&mut self.files);
        self.deadline = None;
        let (is_reply, needs_reply) = (flags & REPLY != 0, flags & NEED_REPLY != 0);
        Message { request, is_reply, needs_reply, body, files }
    }

    /// Sends a message. Its files stay open here.
    ///
    /// # Errors
    /// The other side has closed it, or does not read what was sent before.
    pub fn send(&mut self, message: &Message) -> Result<(), Parted> {
        send(&self.stream, message)
    }
}

/// Tells a front end by its channel that the configuration space has changed: vhost-user
/// protocol, `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`. If the channel is full, nothing is sent: a
/// front end that reads the earlier messages will see this change then.
///
/// # Errors
/// The front end has closed the channel.
pub fn announce(channel: &UnixStream) -> Result<(), Parted> {
    match send(channel, &Message::new(CONFIG_CHANGE, Vec::new())) {
        Err(Parted::Deaf) => Ok(()),
        sent => sent,
    }
}

fn send(to: &UnixStream, message: &Message) -> Result<(), Parted> {
    let flag = |set, flag| if set { flag } else { 0 };
    let flags = flag(message.is_reply, REPLY) | flag(message.needs_reply, NEED_REPLY);
    let header = [message.request, VERSION | flags, message.body.len() as u32];
    let header = header.map(u32::to_ne_bytes);
    let files: Vec<_> = message.files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(Parted::Files);
    }
    let parts = [IoSlice::new(header.as_flattened()), IoSlice::new(&message.body)];
    match sendmsg(to, &parts, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(sent) if sent == HEADER_BYTES + message.body.len() => Ok(()),
        Ok(_) | Err(Errno::AGAIN) => Err(Parted::Deaf),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(Parted::Closed),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn pair() -> (UnixStream, Connection) {
        let (front_end, ours) = UnixStream::pair().unwrap();
        (front_end, Connection::new(ours))
    }

    fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
        let header = [request, flags, body.len() as u32].map(u32::to_ne_bytes);
        [header.as_flattened(), body].concat()
    }

    #[test]
    fn a_message_may_come_in_any_pieces() {
        let (mut front_end, mut ours) = pair();
        let bytes = [message(8, 1 | NEED_REPLY, &[1, 0, 0, 0, 2, 0, 0, 0]), message(3, 1, &[])];
        let bytes = bytes.concat();
        for (index, byte) in bytes.iter().enumerate() {
            front_end.write_all(&[*byte]).unwrap();
            match ours.receive().unwrap() {
                Some(message) if index == 19 => {
                    assert_eq!((message.request, message.needs_reply), (8, true));
                    assert_eq!((message.u32(1), message.u32(2)), (Some(2), None));
                    assert_eq!(message.u64(0), Some(2 << 32 | 1));
                }
                Some(message) => {
                    assert_eq!((index, message.request), (31, 3));
                    assert!(!message.needs_reply && message.body.is_empty());
                }
                None => assert!(![19, 31].contains(&index)),
            }
        }
        front_end.write_all(&bytes).unwrap();
        assert_eq!(ours.receive().unwrap().unwrap().request, 8);
        assert_eq!(ours.receive().unwrap().unwrap().request, 3);
        assert!(ours.receive().unwrap().is_none());
        drop(front_end);
        assert!(matches!(ours.receive(), Err(Parted::Closed)));
    }

    #[test]
    fn a_message_has_to_end() {
        use rustix::event::{PollFd, PollFlags, poll};
        let (mut front_end, mut ours) = pair();
        assert!(ours.receive().unwrap().is_none() && ours.patience().is_none());
        let bytes = message(8, 1, &[0; 8]);
        front_end.write_all(&bytes[..1]).unwrap();
        assert!(ours.receive().unwrap().is_none());
        let mut rest = bytes[1..19].iter();
        // A byte at a time, until it is refused.
        let why = loop {
            let patience = ours.patience().expect("it is not waited for without end");
            poll(&mut [PollFd::new(ours.stream(), PollFlags::IN)], Some(&patience)).unwrap();
            match ours.receive() {
                Ok(message) => assert!(message.is_none()),
                Err(why) => break why,
            }
            rest.next().map_or(Ok(()), |byte| front_end.write_all(&[*byte])).unwrap();
        };
        assert!(matches!(why, Parted::Slow), "{why}");
        // A complete message is not late.
        let (mut front_end, mut ours) = pair();
        front_end.write_all(&bytes).unwrap();
        assert!(ours.receive().unwrap().is_some() && ours.patience().is_none());
    }

    #[test]
    fn a_malformed_message_ends_the_connection() {
        let refused = |bytes: &[u8]| {
            let (mut front_end, mut ours) = pair();
            front_end.write_all(bytes).unwrap();
            ours.receive().unwrap_err()
        };
        assert!(matches!(refused(&message(1, 0, &[])), Parted::Version(0)));
        assert!(matches!(refused(&message(1, 2, &[])), Parted::Version(2)));
        assert!(matches!(refused(&message(1, 1, &[0; 4097])), Parted::Length(4097)));
    }

    fn send_files(to: &UnixStream, count: usize, bytes: &[u8]) {
        let file = std::fs::File::open("/dev/null").unwrap();
        let files = vec![file.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn files_come_with_their_message() {
        let (front_end, mut ours) = pair();
        send_files(&front_end, 8, &message(5, 1, &[0; 8]));
        send_files(&front_end, 1, &message(12, 1, &[0; 8]));
        assert_eq!(ours.receive().unwrap().unwrap().files.len(), 8);
        assert_eq!(ours.receive().unwrap().unwrap().files.len(), 1);
        for count in [9, 40] {
            let (front_end, mut ours) = pair();
            send_files(&front_end, count, &message(5, 1, &[0; 8]));
            assert!(matches!(ours.receive(), Err(Parted::Files)));
        }
    }

    #[test]
    fn an_answer_has_the_requests_number() {
        let (mut front_end, mut ours) = pair();
        ours.send(&Message::reply(17, 1u64.to_ne_bytes().to_vec())).unwrap();
        let mut bytes = [0; 20];
        front_end.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes[..], message(17, 1 | REPLY, &1u64.to_ne_bytes()));
        announce(ours.stream()).unwrap();
        front_end.read_exact(&mut bytes[..12]).unwrap();
        assert_eq!(bytes[..12], message(2, 1, &[]));
        // The other side reads nothing, and nobody waits for it.
        while ours.send(&Message::reply(17, vec![0; 4000])).is_ok() {}
        announce(ours.stream()).unwrap();
        drop(front_end);
        assert!(matches!(ours.send(&Message::reply(17, vec![])), Err(Parted::Closed)));
    }
}
