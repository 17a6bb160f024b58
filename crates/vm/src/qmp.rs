//! A QMP client with one request at a time, which keeps events apart. The other side may send
//! anything, at any speed: every call has a deadline, and reads and keeps a bounded number of
//! bytes. QEMU documentation: interop/qmp-spec.

mod ears;
mod error;
mod lend;
#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, send, sendmsg,
};
use serde_json::{Value, json};

use crate::dial::{Turn, dial, turn};
use crate::libvirt::{LibvirtError, REFUSED};
use crate::shown::{REASON_MAX, shown};

use error::Refusal;

pub use ears::Ears;
pub use error::QmpError;
pub use lend::Lent;

/// A QEMU that does not answer for this long counts as stuck.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest wait for the greeting, which QEMU sends as it accepts a connection.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// A QEMU that does not answer for this long counts as silent. It usually answers sooner.
const SILENT_AFTER: Duration = Duration::from_millis(10);
/// Longest wait for a QEMU that is already stuck.
const STUCK_TIMEOUT: Duration = Duration::from_secs(1);
/// A QEMU that has reported its shutdown is asked nothing for this long. QEMU 7.2 may never end if a
/// command arrives while it cleans up its monitor. A QEMU that only pauses at its shutdown
/// (`-no-shutdown`) is asked again after this time.
const SHUTDOWN_PAUSE: Duration = Duration::from_secs(5);
/// Most bytes of an event's line.
const EVENT_BYTES: usize = 64 << 10;
/// Most bytes of an answer of QMP itself.
const ANSWER_BYTES: usize = 1 << 20;
/// Most bytes of an answer of the human monitor, which may list 255 processors.
const HUMAN_BYTES: usize = 4 << 20;
/// Most bytes of events that one call reads beside an answer.
const EVENTS_BYTES: usize = 1 << 20;
/// Most event names to keep. QEMU 11 has 70.
const EVENT_NAMES: usize = 128;
/// Most bytes of an event name.
const EVENT_NAME_BYTES: usize = 64;
const PIECE_BYTES: usize = 16 << 10;

/// A QMP connection after its greeting.
pub struct Qmp {
    stream: UnixStream,
    /// Bytes that were received and not parsed yet: whole lines, and a part of another.
    come: Vec<u8>,
    /// How many of these bytes are known to contain no end of a line.
    searched: usize,
    /// Id of the last request. It tells the answer from a late one to an earlier request.
    id: u64,
    /// When the last request was made, and the most bytes of its answer. `None` once it is
    /// answered.
    owed: Option<(Instant, usize)>,
    patience: Duration,
    /// No request begins after this time.
    until: Option<Instant>,
    /// When QEMU reported its shutdown.
    shut_down: Option<Instant>,
    /// Names of events that were not read yet, each once, in order of first arrival.
    events: Vec<String>,
    /// Set to `true` while QEMU keeps Ebb waiting.
    silence: Option<Arc<AtomicBool>>,
    /// Number of resets that QEMU has reported.
    resets: Arc<AtomicU64>,
    /// Why the connection has ended, if it is by libvirt.
    libvirt: Option<Arc<OnceLock<LibvirtError>>>,
}

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// [`QmpError::Io`] if nobody listens, or QEMU accepts nobody in time; [`QmpError::Taken`] if
    /// its socket serves one client at a time, and others have it or wait for it;
    /// [`QmpError::Silent`] or [`QmpError::NoGreeting`] if it is not QMP.
    pub fn connect(path: &Path) -> Result<Qmp, QmpError> {
        Qmp::connect_within(path, ANSWER_TIMEOUT)
    }

    fn connect_within(path: &Path, most: Duration) -> Result<Qmp, QmpError> {
        let deadline = Instant::now() + most;
        Qmp::dialled(path, deadline)?.negotiated(deadline)
    }

    /// Same as [`Qmp::connect`] for a socket of the process `pid`, but waits for `most` at most.
    /// Sends nothing to another process: whoever can change the path chooses who listens there.
    ///
    /// # Errors
    /// As [`Qmp::connect`]; [`QmpError::OtherProcess`] if another process listens there.
    pub fn connect_to(pid: i32, path: &Path, most: Duration) -> Result<Qmp, QmpError> {
        let deadline = Instant::now() + most;
        let qmp = Qmp::dialled(path, deadline)?;
        let peer = rustix::net::sockopt::socket_peercred(&qmp.stream).map_err(io::Error::from)?;
        match peer.pid.as_raw_pid() {
            owner if owner == pid => qmp.negotiated(deadline),
            owner => Err(QmpError::OtherProcess { owner, pid }),
        }
    }

    /// A connection to whoever listens there, before the greeting.
    fn dialled(path: &Path, deadline: Instant) -> Result<Qmp, QmpError> {
        let stream = dial(path, deadline).map_err(|error| match error.kind() {
            // Others already wait for their turn.
            ErrorKind::WouldBlock => QmpError::Taken,
            _ => error.into(),
        });
        stream.map(Qmp::over)
    }

    /// Awaits the greeting and negotiates.
    fn negotiated(mut self, deadline: Instant) -> Result<Qmp, QmpError> {
        self.await_greeting(GREETING_TIMEOUT, deadline)?;
        self.request("qmp_capabilities", json!({}), ANSWER_BYTES, deadline)?;
        Ok(self)
    }

    /// Waits for the greeting. A QEMU that is too busy to accept anybody has until the deadline.
    /// One that has accepted this or another connection has no longer than `most`.
    fn await_greeting(&mut self, most: Duration, deadline: Instant) -> Result<(), QmpError> {
        let mut room = EVENT_BYTES;
        let soon = deadline.min(Instant::now() + most);
        let mut greeting = self.greeting(soon, &mut room);
        if is_timeout(&greeting) {
            greeting = match turn(&self.stream)? {
                Turn::Accepted => Err(QmpError::Silent(most)),
                Turn::Behind => Err(QmpError::Taken),
                Turn::Next => self.greeting(deadline, &mut room),
            };
        }
        match greeting {
            Ok(greeting) if greeting.get("QMP").is_some() => Ok(()),
            Ok(_) | Err(QmpError::Protocol(_)) => Err(QmpError::NoGreeting),
            Err(error) => Err(error),
        }
    }

    /// The first message that is not an event: QEMU may send one that was meant for the client
    /// before.
    fn greeting(&mut self, deadline: Instant, room: &mut usize) -> Result<Value, QmpError> {
        loop {
            let message = self.message(deadline, room)?;
            if message.get("event").is_none() {
                return Ok(message);
            }
        }
    }

    /// Makes a connection that is already greeted and negotiated.
    pub fn over(stream: UnixStream) -> Qmp {
        Qmp {
            stream,
            come: Vec::new(),
            searched: 0,
            id: 0,
            owed: None,
            patience: ANSWER_TIMEOUT,
            until: None,
            shut_down: None,
            events: Vec::new(),
            silence: None,
            resets: Arc::default(),
            libvirt: None,
        }
    }

    /// Makes a connection behind which libvirt is asked. Who ends it notes why in `ended`.
    pub(crate) fn by_libvirt(stream: UnixStream, ended: Arc<OnceLock<LibvirtError>>) -> Qmp {
        Qmp { libvirt: Some(ended), ..Qmp::over(stream) }
    }

    /// Whether QEMU's events are here before its vCPUs go on. If not, an event may come late. It
    /// still comes before the answer to whatever is asked after it.
    pub fn hears_at_once(&self) -> bool {
        self.libvirt.is_none()
    }

    /// Returns what hears of resets on this connection from now on, on any thread.
    ///
    /// # Errors
    /// The process has no file descriptor left, or events may come late.
    pub fn ears(&self) -> io::Result<Ears> {
        if !self.hears_at_once() {
            return Err(ErrorKind::Unsupported.into());
        }
        Ok(Ears::new(self.stream.try_clone()?, Arc::clone(&self.resets)))
    }

    /// Closes the connection, also for its [`Ears`]: QEMU serves one client at a time.
    pub fn close(self) {
        // The other side may have closed it already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    /// Makes `silence` say `true` whenever QEMU has not answered for 10 ms, until it answers or the
    /// wait ends: QEMU may itself be waiting for Ebb.
    pub fn show_silence(&mut self, silence: Arc<AtomicBool>) {
        self.silence = Some(silence);
    }

    /// Runs `ask`, each of whose requests waits for `most` at most: for a caller that has what QEMU
    /// may wait for. An answer that comes later is dropped.
    pub fn in_a_hurry<T>(&mut self, most: Duration, ask: impl FnOnce(&mut Qmp) -> T) -> T {
        let patience = std::mem::replace(&mut self.patience, most);
        let answer = ask(self);
        self.patience = patience;
        answer
    }

    /// Same as [`Qmp::in_a_hurry`] for several questions, none of which is asked after `end`.
    pub(crate) fn until<T>(
        &mut self,
        end: Instant,
        most: Duration,
        ask: impl FnOnce(&mut Qmp) -> T,
    ) -> T {
        let until = self.until.replace(end);
        let answer = self.in_a_hurry(most, ask);
        self.until = until;
        answer
    }

    /// Runs one command and returns what it returned.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let deadline = self.deadline();
        self.request(command, arguments, ANSWER_BYTES, deadline)
    }

    /// Runs a command of the human monitor, for what QMP itself does not tell.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn human(&mut self, line: &str) -> Result<String, QmpError> {
        let (arguments, deadline) = (json!({ "command-line": line }), self.deadline());
        match self.request("human-monitor-command", arguments, HUMAN_BYTES, deadline)? {
            Value::String(text) => Ok(text),
            other => {
                let other = shown(&other.to_string(), REASON_MAX);
                Err(QmpError::Protocol(format!("{line}: {other}")))
            }
        }
    }

    /// Returns the names of the events that have come, each once. Does not wait.
    ///
    /// # Errors
    /// [`QmpError::Io`] once the socket is closed; [`QmpError::Protocol`] if more came than QEMU
    /// has to tell.
    pub fn events(&mut self) -> Result<Vec<String>, QmpError> {
        let mut room = EVENTS_BYTES + self.owed.map_or(0, |(_, bytes)| bytes);
        self.take_all(&mut room)?;
        Ok(std::mem::take(&mut self.events))
    }

    /// The deadline of a request that begins now. A QEMU that has been stuck for long gets less
    /// time.
    fn deadline(&self) -> Instant {
        let is_stuck = self.owed.is_some_and(|(since, _)| since.elapsed() >= ANSWER_TIMEOUT);
        let most = if is_stuck { self.patience.min(STUCK_TIMEOUT) } else { self.patience };
        Instant::now() + most
    }

    fn request(
        &mut self,
        command: &str,
        arguments: Value,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Value, QmpError> {
        self.request_with(command, arguments, None, bytes, deadline)
    }

    /// As [`Qmp::request`], with a descriptor that QEMU gets a copy of.
    fn request_with(
        &mut self,
        command: &str,
        arguments: Value,
        fd: Option<BorrowedFd<'_>>,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Value, QmpError> {
        if self.until.is_some_and(|end| Instant::now() > end) {
            return Err(io::Error::from(ErrorKind::TimedOut).into());
        }
        let mut room = EVENTS_BYTES + bytes + self.owed.map_or(0, |(_, bytes)| bytes);
        // The earlier request must be answered before the next one is sent.
        while self.owed.is_some() {
            let message = self.message(deadline, &mut room)?;
            self.take(&message)?;
        }
        self.take_all(&mut room)?;
        if self.shut_down.is_some_and(|at| at.elapsed() < SHUTDOWN_PAUSE) {
            return Err(io::Error::from(ErrorKind::TimedOut).into());
        }
        self.id += 1;
        let request = json!({ "execute": command, "arguments": arguments, "id": self.id });
        self.owed = Some((Instant::now(), bytes));
        self.send(format!("{request}\n").as_bytes(), fd, deadline)?;
        loop {
            let message = self.message(deadline, &mut room)?;
            if let Some(answer) = self.take(&message)? {
                return answer.map_err(|refusal| refusal.of(command));
            }
        }
    }

    /// Returns the last request's answer, if `message` is that. Keeps events, and drops answers to
    /// earlier requests.
    fn take(&mut self, message: &Value) -> Result<Option<Result<Value, Refusal>>, QmpError> {
        if let Some(event) = message.get("event").and_then(Value::as_str) {
            self.keep_event(event)?;
            return Ok(None);
        }
        if message.get("id").is_some_and(|id| id != &json!(self.id)) || self.owed.is_none() {
            return Ok(None);
        }
        let by_libvirt = message.get(REFUSED).filter(|_| self.libvirt.is_some());
        let answer = match (message.get("return"), message.get("error"), by_libvirt) {
            (Some(value), ..) => Ok(value.clone()),
            (None, Some(error), _) => {
                let reason = error.get("desc").and_then(Value::as_str);
                Err(Refusal::Qemu(shown(reason.unwrap_or("no reason given"), REASON_MAX)))
            }
            (None, None, Some(why)) => {
                Err(Refusal::Libvirt(why.as_str().unwrap_or_default().to_owned()))
            }
            (None, None, None) => return Ok(None),
        };
        self.owed = None;
        Ok(Some(answer))
    }

    /// Takes all that has come. Does not wait.
    fn take_all(&mut self, room: &mut usize) -> Result<(), QmpError> {
        while let Some(message) = self.message_now(room)? {
            self.take(&message)?;
        }
        Ok(())
    }

    /// Keeps an event. One that nobody has read yet is kept only once.
    fn keep_event(&mut self, event: &str) -> Result<(), QmpError> {
        if event == "SHUTDOWN" {
            self.shut_down = Some(Instant::now());
        }
        if event == "RESET" {
            self.resets.fetch_add(1, AcqRel);
        }
        if self.events.iter().any(|kept| kept == event) {
            return Ok(());
        }
        if event.len() > EVENT_NAME_BYTES || self.events.len() == EVENT_NAMES {
            return Err(QmpError::Protocol("more events than QEMU has".into()));
        }
        self.events.push(event.to_owned());
        Ok(())
    }

    /// Waits for the next message until the deadline, and reads `room` bytes for it at most.
    fn message(&mut self, deadline: Instant, room: &mut usize) -> Result<Value, QmpError> {
        loop {
            if let Some(message) = self.message_now(room)? {
                return Ok(message);
            }
            self.wait(PollFlags::IN, deadline)?;
        }
    }

    /// Returns the next message if all of it has come.
    fn message_now(&mut self, room: &mut usize) -> Result<Option<Value>, QmpError> {
        loop {
            if let Some(line) = self.line() {
                let message = serde_json::from_slice(&line);
                return message.map(Some).map_err(|error| QmpError::Protocol(error.to_string()));
            }
            let longest = self.owed.map_or(EVENT_BYTES, |(_, bytes)| bytes);
            if self.come.len() >= longest || *room == 0 {
                return Err(QmpError::Protocol("it says more than it was asked for".into()));
            }
            let mut piece = [0; PIECE_BYTES];
            let most = (*room).min(piece.len());
            let got = match recv(&self.stream, &mut piece[..most], RecvFlags::DONTWAIT) {
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(rustix::io::Errno::INTR) => continue,
                got => got.map_err(io::Error::from)?.0,
            };
            if got == 0 {
                return Err(self.ended());
            }
            *room -= got;
            self.come.extend_from_slice(&piece[..got]);
        }
    }

    /// Why there is no connection any more.
    fn ended(&self) -> QmpError {
        match self.libvirt.as_ref().and_then(|ended| ended.get()) {
            Some(why) => QmpError::Libvirt(why.to_string()),
            None => io::Error::from(ErrorKind::UnexpectedEof).into(),
        }
    }

    /// Returns the first line that has come, if one has.
    fn line(&mut self) -> Option<Vec<u8>> {
        let new = self.come.get(self.searched..).unwrap_or_default();
        let Some(end) = new.iter().position(|byte| *byte == b'\n') else {
            self.searched = self.come.len();
            return None;
        };
        let rest = self.come.split_off(self.searched + end + 1);
        self.searched = 0;
        Some(std::mem::replace(&mut self.come, rest))
    }

    /// Sends a request, and the descriptor with its first byte. If it was sent only in part, shuts
    /// the connection down: nobody could tell the next request from the rest of this one.
    fn send(
        &mut self,
        mut line: &[u8],
        mut fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), QmpError> {
        while !line.is_empty() {
            match self.send_some(line, fd) {
                Ok(sent) => (line, fd) = (line.get(sent..).unwrap_or_default(), None),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    if let Err(error) = self.wait(PollFlags::OUT, deadline) {
                        self.stream.shutdown(std::net::Shutdown::Both)?;
                        return Err(error);
                    }
                }
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(())
    }

    fn send_some(&self, line: &[u8], fd: Option<BorrowedFd<'_>>) -> rustix::io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let Some(fd) = fd else { return send(&self.stream, line, flags) };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let (fds, mut control) = ([fd], SendAncillaryBuffer::new(&mut space));
        // There is room for one.
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(&self.stream, &[IoSlice::new(line)], &mut control, flags)
    }

    fn wait(&self, what: PollFlags, deadline: Instant) -> Result<(), QmpError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::Error::new(ErrorKind::TimedOut, "it does not answer in time").into());
        }
        let Some(silence) = &self.silence else { return Ok(self.poll(what, left).map(drop)?) };
        if self.poll(what, left.min(SILENT_AFTER))? || left <= SILENT_AFTER {
            return Ok(());
        }
        silence.store(true, Relaxed);
        let polled = self.poll(what, left - SILENT_AFTER);
        silence.store(false, Relaxed);
        Ok(polled.map(drop)?)
    }

    /// Whether the socket is ready, or a signal came.
    fn poll(&self, what: PollFlags, most: Duration) -> io::Result<bool> {
        let most = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.stream, what)];
        match poll(&mut fds, Some(&most)) {
            Err(rustix::io::Errno::INTR) => Ok(true),
            polled => Ok(polled? > 0),
        }
    }
}

fn is_timeout<T>(result: &Result<T, QmpError>) -> bool {
    matches!(result, Err(QmpError::Io(error)) if error.kind() == ErrorKind::TimedOut)
}
