//! The thread between a [`crate::Qmp`] and libvirt: QMP on one side, libvirt's protocol on the
//! other.
//!
//! libvirt has one queue for events and another one for answers, so an answer can overtake an event
//! that QEMU reported before. One loop of libvirt's daemon empties both queues in each of its
//! rounds. So the thread asks libvirt a second question after each answer (the *fence*). It passes
//! the answer on once the second question is answered: by then all earlier events have come.

use std::convert::Infallible;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use serde_json::{Map, Value};

use super::connection::{Connection, Found, Message, Procedure, Until, event_in};
use super::error::LibvirtError;
use super::xdr::{Decoder, Encoder};
use super::{REFUSED, qemu_of};

/// Most bytes of a request. Ebb's own are far shorter.
const REQUEST_BYTES: usize = 64 << 10;
const PIECE_BYTES: usize = 4 << 10;

/// Both connections, and what is on its way from one to the other.
pub struct Bridge {
    libvirt: Connection,
    /// The other side of this is the [`crate::Qmp`].
    qmp: UnixStream,
    domain: Found,
    /// Where libvirt says which process its domains are, and which this one must be.
    process: (PathBuf, i32),
    /// The part of a request that has come.
    asked: Vec<u8>,
    /// The descriptor that came with it.
    lent: Option<OwnedFd>,
    /// What the `Qmp` has yet to read.
    said: Vec<u8>,
}

impl Bridge {
    /// Stands between these two.
    pub fn new(
        libvirt: Connection,
        qmp: UnixStream,
        domain: Found,
        process: (PathBuf, i32),
    ) -> Bridge {
        let (asked, said) = (Vec::new(), Vec::new());
        Bridge { libvirt, qmp, domain, process, asked, lent: None, said }
    }

    /// Makes sure that the domain's QEMU is the right process: a domain that was shut down and
    /// started again has another one, and the same UUID.
    pub fn is_of_process(&self) -> Result<(), LibvirtError> {
        let ((state, pid), name) = (&self.process, &self.domain.name);
        match qemu_of(state, name) == Some(*pid) {
            true => Ok(()),
            false => Err(LibvirtError::OtherProcess { name: name.clone(), pid: *pid }),
        }
    }

    /// Runs until one of the two closes its connection, or libvirt breaks the protocol. Notes why.
    /// The `Qmp` then sees the end of its connection.
    pub fn run(mut self, ended: &OnceLock<LibvirtError>) {
        let Err(why) = self.serve();
        // Nobody else sets it.
        let _ = ended.set(why);
    }

    fn serve(&mut self) -> Result<Infallible, LibvirtError> {
        loop {
            while let Some(message) = self.libvirt.message_now()? {
                self.hear(&message);
            }
            self.say_now()?;
            match self.request_now()? {
                Some(request) => self.answer(&request)?,
                None => self.wait()?,
            }
        }
    }

    /// Answers a request.
    fn answer(&mut self, request: &[u8]) -> Result<(), LibvirtError> {
        let unsendable = |_| LibvirtError::Unsendable("a request is no JSON");
        let mut request: Value = serde_json::from_slice(request).map_err(unsendable)?;
        // libvirt numbers its requests itself.
        let number = request.as_object_mut().and_then(|request| request.remove("id"));
        let mut answer = match self.executed(&request) {
            // It is about this request alone, and says nothing of QEMU.
            Err(why @ LibvirtError::Refused(_)) => {
                Map::from_iter([(REFUSED.to_owned(), Value::String(why.to_string()))])
            }
            executed => executed?,
        };
        if let Some(number) = number {
            answer.insert("id".into(), number);
        }
        self.said.extend(format!("{}\n", Value::Object(answer)).into_bytes());
        while !self.said.is_empty() {
            self.say_now()?;
            self.wait_to_say()?;
        }
        Ok(())
    }

    /// Has QEMU execute a request, and returns what it answers.
    fn executed(&mut self, request: &Value) -> Result<Map<String, Value>, LibvirtError> {
        let lent = self.lent.take();
        let procedure = match lent {
            Some(_) => Procedure::MONITOR_COMMAND_WITH_FILES,
            None => Procedure::MONITOR_COMMAND,
        };
        let command = Encoder::default().fixed(&self.domain.encoded);
        let command = command.text(&request.to_string()).number(0);
        self.is_of_process()?;
        let answer = self.call(procedure, &command, lent.as_ref())?;
        // The fence. Any answer will do.
        match self.call(Procedure::LIBRARY_VERSION, &Encoder::default(), None) {
            Ok(_) | Err(LibvirtError::Refused(_)) => {}
            Err(error) => return Err(error),
        }
        self.is_of_process()?;
        let unclear = LibvirtError::Unclear("QEMU's answer");
        let answer = Decoder(&answer).text().and_then(|text| serde_json::from_str(text).ok());
        let Some(Value::Object(mut answer)) = answer else { return Err(unclear) };
        // Both are this thread's to say.
        answer.remove("id");
        answer.remove(REFUSED);
        Ok(answer)
    }

    /// Calls a procedure of libvirt's, and hears events meanwhile.
    fn call(
        &mut self,
        procedure: Procedure,
        arguments: &Encoder,
        lent: Option<&OwnedFd>,
    ) -> Result<Vec<u8>, LibvirtError> {
        self.libvirt.ask(procedure, arguments, lent.map(AsFd::as_fd), Until::Gone(&self.qmp))?;
        loop {
            let message = self.libvirt.message(Until::Gone(&self.qmp))?;
            match self.libvirt.answer_in(&message) {
                Some(answer) => return answer,
                None => self.hear(&message),
            }
        }
    }

    /// Passes an event on, unless the same event waits already to be read.
    fn hear(&mut self, message: &Message) {
        let Some(event) = event_in(message) else { return };
        let line = format!("{}\n", serde_json::json!({ "event": event })).into_bytes();
        let mut kept = self.said.split_inclusive(|&byte| byte == b'\n');
        // A line that was sent in part is not this one.
        if !kept.any(|kept| kept == line) {
            self.said.extend(line);
        }
    }

    /// Returns the next request if all of it has come.
    fn request_now(&mut self) -> Result<Option<Vec<u8>>, LibvirtError> {
        loop {
            if let Some(end) = self.asked.iter().position(|&byte| byte == b'\n') {
                let rest = self.asked.split_off(end + 1);
                return Ok(Some(std::mem::replace(&mut self.asked, rest)));
            }
            if self.asked.len() >= REQUEST_BYTES {
                return Err(LibvirtError::Unsendable("a request is too long"));
            }
            if !self.read_some()? {
                return Ok(None);
            }
        }
    }

    /// Reads a part of a request. `false`: nothing has come.
    fn read_some(&mut self) -> Result<bool, LibvirtError> {
        let (mut piece, mut space) =
            ([0; PIECE_BYTES], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = recvmsg(&self.qmp, &mut [IoSliceMut::new(&mut piece)], &mut control, flags);
        let bytes = match got {
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => return Ok(true),
            Err(error) => return Err(io::Error::from(error).into()),
            Ok(got) if got.bytes == 0 => return Err(LibvirtError::Unwanted),
            Ok(got) => got.bytes,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(mut fds) = message {
                self.lent = fds.next();
            }
        }
        self.asked.extend_from_slice(piece.get(..bytes).unwrap_or_default());
        Ok(true)
    }

    /// Sends the `Qmp` as much as there is room for.
    fn say_now(&mut self) -> Result<(), LibvirtError> {
        while !self.said.is_empty() {
            match send(&self.qmp, &self.said, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => drop(self.said.drain(..sent.min(self.said.len()))),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(LibvirtError::Unwanted),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(())
    }

    /// Waits until one of the two has sent something, or the `Qmp` has room.
    fn wait(&self) -> Result<(), LibvirtError> {
        let says = if self.said.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        let mut fds = [
            PollFd::new(self.libvirt.stream(), PollFlags::IN),
            PollFd::new(&self.qmp, PollFlags::IN | says),
        ];
        polled(poll(&mut fds, None))
    }

    fn wait_to_say(&self) -> Result<(), LibvirtError> {
        if self.said.is_empty() {
            return Ok(());
        }
        polled(poll(&mut [PollFd::new(&self.qmp, PollFlags::OUT)], None))
    }
}

fn polled(result: rustix::io::Result<usize>) -> Result<(), LibvirtError> {
    match result {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(io::Error::from(error).into()),
    }
}
