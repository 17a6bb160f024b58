//! A QMP client with one request at a time, which keeps events apart. The other side may send
//! anything, at any speed: every call has a deadline, and reads and keeps a bounded number of
//! bytes. QEMU documentation: interop/qmp-spec.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde_json::{Value, json};

use crate::dial::{Turn, dial, turn};

/// A QEMU that does not answer for this long counts as stuck.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest wait for the greeting, which QEMU sends as it accepts a connection.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// A QEMU that does not answer for this long counts as silent. It usually answers sooner.
const SILENT_AFTER: Duration = Duration::from_millis(10);
/// Longest wait for a QEMU that is already stuck.
const STUCK_TIMEOUT: Duration = Duration::from_secs(1);
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

/// What can go wrong between Ebb and a QMP socket.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket failed, or QEMU did not answer in time.
    #[error("QMP: {0}")]
    Io(#[from] io::Error),
    /// The other side sent something else than QMP.
    #[error("QMP: the other side does not speak it: {0}")]
    Protocol(String),
    /// The connection was accepted, but no greeting came.
    #[error(
        "it did not greet as QMP within {} s: is it the socket of a monitor in control mode (-qmp)?",
        .0.as_secs()
    )]
    Silent(Duration),
    /// The greeting is not QMP's.
    #[error("it does not greet as QMP: is it the socket of a monitor in control mode (-qmp)?")]
    NoGreeting,
    /// Others have connected before, and QEMU serves one client after the other.
    #[error(
        "it serves one client at a time, and another one may hold it: disconnect that one, or give \
         QEMU a second monitor (-qmp)"
    )]
    Taken,
    /// QEMU refused the command.
    #[error("QEMU refused {command}: {reason}")]
    Refused {
        /// The command's name.
        command: String,
        /// QEMU's reason.
        reason: String,
    },
}

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
    /// Names of events that were not read yet, each once, in order of first arrival.
    events: Vec<String>,
    /// Set to `true` while QEMU keeps Ebb waiting.
    silence: Option<Arc<AtomicBool>>,
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

    /// Same as [`Qmp::connect`], but waits for `most` at most.
    ///
    /// # Errors
    /// As [`Qmp::connect`].
    pub fn connect_within(path: &Path, most: Duration) -> Result<Qmp, QmpError> {
        let deadline = Instant::now() + most;
        let dialled = dial(path, deadline).map_err(|error| match error.kind() {
            // Others already wait for their turn.
            ErrorKind::WouldBlock => QmpError::Taken,
            _ => error.into(),
        });
        let mut qmp = Qmp::over(dialled?);
        qmp.await_greeting(GREETING_TIMEOUT, deadline)?;
        qmp.request("qmp_capabilities", json!({}), ANSWER_BYTES, deadline)?;
        Ok(qmp)
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
            events: Vec::new(),
            silence: None,
        }
    }

    /// Makes `silence` say `true` whenever QEMU has not answered for 10 ms, until it answers or the
    /// wait ends: QEMU may itself be waiting for Ebb.
    pub fn show_silence(&mut self, silence: Arc<AtomicBool>) {
        self.silence = Some(silence);
    }

    /// The process at the other end of the socket.
    ///
    /// # Errors
    /// As getsockopt(2) for `SO_PEERCRED`.
    pub fn peer_pid(&self) -> io::Result<i32> {
        Ok(rustix::net::sockopt::socket_peercred(&self.stream)?.pid.as_raw_pid())
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
            other => Err(QmpError::Protocol(format!("{line}: {other}"))),
        }
    }

    /// Returns the names of the events that have come, each once. Does not wait.
    ///
    /// # Errors
    /// [`QmpError::Io`] once the socket is closed; [`QmpError::Protocol`] if more came than QEMU
    /// has to tell.
    pub fn events(&mut self) -> Result<Vec<String>, QmpError> {
        let mut room = EVENTS_BYTES + self.owed.map_or(0, |(_, bytes)| bytes);
        while let Some(message) = self.message_now(&mut room)? {
            self.take(&message)?;
        }
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
        if self.until.is_some_and(|end| Instant::now() > end) {
            return Err(io::Error::from(ErrorKind::TimedOut).into());
        }
        let mut room = EVENTS_BYTES + bytes + self.owed.map_or(0, |(_, bytes)| bytes);
        // The earlier request must be answered before the next one is sent.
        while self.owed.is_some() {
            let message = self.message(deadline, &mut room)?;
            self.take(&message)?;
        }
        self.id += 1;
        let request = json!({ "execute": command, "arguments": arguments, "id": self.id });
        self.owed = Some((Instant::now(), bytes));
        self.send(format!("{request}\n").as_bytes(), deadline)?;
        loop {
            let message = self.message(deadline, &mut room)?;
            if let Some(answer) = self.take(&message)? {
                return answer
                    .map_err(|reason| QmpError::Refused { command: command.into(), reason });
            }
        }
    }

    /// Returns the last request's answer, if `message` is that. Keeps events, and drops answers to
    /// earlier requests.
    fn take(&mut self, message: &Value) -> Result<Option<Result<Value, String>>, QmpError> {
        if let Some(event) = message.get("event").and_then(Value::as_str) {
            self.keep_event(event)?;
            return Ok(None);
        }
        if message.get("id").is_some_and(|id| id != &json!(self.id)) || self.owed.is_none() {
            return Ok(None);
        }
        let answer = match (message.get("return"), message.get("error")) {
            (Some(value), _) => Ok(value.clone()),
            (None, Some(error)) => {
                let reason = error.get("desc").and_then(Value::as_str);
                Err(reason.unwrap_or("no reason given").to_owned())
            }
            (None, None) => return Ok(None),
        };
        self.owed = None;
        Ok(Some(answer))
    }

    /// Keeps an event. One that nobody has read yet is kept only once.
    fn keep_event(&mut self, event: &str) -> Result<(), QmpError> {
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
                return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
            }
            *room -= got;
            self.come.extend_from_slice(&piece[..got]);
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

    /// Sends a request. If it was sent only in part, shuts the connection down: nobody could tell
    /// the next request from the rest of this one.
    fn send(&mut self, mut line: &[u8], deadline: Instant) -> Result<(), QmpError> {
        while !line.is_empty() {
            match send(&self.stream, line, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => line = line.get(sent..).unwrap_or_default(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::thread::JoinHandle;

    /// A peer that gives these answers, one for each request.
    fn peer(answers: &'static [&'static str]) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut requests = BufReader::new(stream.try_clone().unwrap());
            for answer in answers {
                (&stream).write_all(answer.as_bytes()).unwrap();
                requests.read_line(&mut String::new()).unwrap();
            }
        });
        (dir, path)
    }

    #[test]
    fn an_event_for_the_client_before_is_no_greeting() {
        let (_dir, path) =
            peer(&["{\"event\":\"BALLOON_CHANGE\"}\n{\"QMP\":{}}\n", "{\"return\":{}}\n"]);
        assert_eq!(Qmp::connect(&path).unwrap().events().unwrap(), [""; 0]);
    }

    #[test]
    fn events_between_request_and_answer_are_kept() {
        let (_dir, path) = peer(&[
            "{\"QMP\":{}}\n",
            "{\"return\":{}}\n",
            "{\"event\":\"RESET\"}\n{\"return\":\"text\"}\n",
        ]);
        let mut qmp = Qmp::connect(&path).unwrap();
        assert_eq!(qmp.human("info version").unwrap(), "text");
        assert_eq!(qmp.events().unwrap(), ["RESET"]);
    }

    #[test]
    fn an_answer_that_came_too_late_is_not_the_next_ones() {
        let (_dir, path) = peer(&[
            "{\"QMP\":{}}\n",
            "{\"return\":{},\"id\":1}\n",
            "{\"return\":\"late\",\"id\":1}\n{\"return\":\"text\",\"id\":2}\n",
        ]);
        let mut qmp = Qmp::connect(&path).unwrap();
        assert_eq!(qmp.human("info version").unwrap(), "text");
    }

    #[test]
    fn an_answer_may_come_in_parts_and_too_late() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut qmp = Qmp::over(ours);
        (&theirs).write_all(b"{\"return\":\"la").unwrap();
        let most = Duration::from_millis(1);
        let late = qmp.in_a_hurry(most, |qmp| qmp.human("info version"));
        assert!(matches!(late, Err(QmpError::Io(_))), "{late:?}");
        assert_eq!(qmp.events().unwrap(), [""; 0]);
        (&theirs).write_all(b"te\",\"id\":1}\n{\"return\":\"text\",\"id\":2}\n").unwrap();
        assert_eq!(qmp.human("info version").unwrap(), "text");
        (&theirs).write_all(b"{\"event\":\"RE").unwrap();
        assert_eq!(qmp.events().unwrap(), [""; 0]);
        (&theirs).write_all(b"SET\"}\n{\"event\":\"STOP\"}\n{").unwrap();
        assert_eq!(qmp.events().unwrap(), ["RESET", "STOP"]);
        drop(theirs);
        assert!(matches!(qmp.events(), Err(QmpError::Io(_))));
    }

    #[test]
    fn a_qemu_that_keeps_us_waiting_is_told_of_until_it_answers() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (mut qmp, silence) = (Qmp::over(ours), Arc::<AtomicBool>::default());
        qmp.show_silence(Arc::clone(&silence));
        let told = Arc::clone(&silence);
        let answer = std::thread::spawn(move || {
            while !told.load(Relaxed) {
                std::thread::yield_now();
            }
            theirs.write_all(b"{\"return\":\"text\",\"id\":1}\n").unwrap();
            theirs
        });
        assert_eq!(qmp.human("info version").unwrap(), "text");
        assert!(!silence.load(Relaxed));
        let _open = answer.join().unwrap();
        let late = qmp.in_a_hurry(3 * SILENT_AFTER, |qmp| qmp.human("info version"));
        assert!(matches!(late, Err(QmpError::Io(_))), "{late:?}");
        assert!(!silence.load(Relaxed));
    }

    /// A connection whose other side says `what` again and again until it is closed.
    fn babbler(what: &'static [u8]) -> (Qmp, JoinHandle<()>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let talk = move || while theirs.write_all(what).is_ok() {};
        (Qmp::over(ours), std::thread::spawn(talk))
    }

    #[test]
    fn who_drips_bytes_is_waited_for_no_longer() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut qmp = Qmp::over(ours);
        let drip = std::thread::spawn(move || {
            while theirs.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        // Each byte comes within the time that the whole answer has.
        let most = Duration::from_millis(200);
        let answer = qmp.in_a_hurry(most, |qmp| qmp.human("info version"));
        assert!(matches!(answer, Err(QmpError::Io(error)) if error.kind() == ErrorKind::TimedOut));
        assert_eq!(qmp.events().unwrap(), [""; 0]);
        drop(qmp);
        drip.join().unwrap();
    }

    #[test]
    fn a_flood_of_events_ends_the_call_and_not_the_daemon() {
        let (mut qmp, flood) = babbler(b"{\"event\":\"STOP\"}\n");
        assert!(matches!(qmp.human("info version"), Err(QmpError::Protocol(_))));
        // However often it waits for more, a call reads a bounded number of bytes.
        let mut room = EVENTS_BYTES;
        let all = std::iter::repeat_with(|| qmp.message_now(&mut room)).find(Result::is_err);
        assert!(matches!(all, Some(Err(QmpError::Protocol(_)))), "{all:?}");
        assert!(qmp.events.len() <= 1 && qmp.come.len() <= EVENT_BYTES + PIECE_BYTES);
        drop(qmp);
        flood.join().unwrap();
    }

    #[test]
    fn no_event_is_lost_among_many() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut qmp = Qmp::over(ours);
        theirs.write_all(b"{\"event\":\"RESET\"}\n").unwrap();
        for _ in 0..2000 {
            theirs.write_all(b"{\"event\":\"STOP\"}\n{\"event\":\"RESUME\"}\n").unwrap();
            // As in a wait for an answer: nobody asks for events.
            while let Some(message) = qmp.message_now(&mut EVENT_BYTES.clone()).unwrap() {
                qmp.take(&message).unwrap();
            }
        }
        assert_eq!(qmp.events().unwrap(), ["RESET", "STOP", "RESUME"]);
    }

    #[test]
    fn names_that_are_none_are_not_kept() {
        let (mut qmp, theirs) = UnixStream::pair().map(|(a, b)| (Qmp::over(a), b)).unwrap();
        let name = "X".repeat(EVENT_NAME_BYTES + 1);
        (&theirs).write_all(format!("{{\"event\":\"{name}\"}}\n").as_bytes()).unwrap();
        assert!(matches!(qmp.events(), Err(QmpError::Protocol(_))));
        let names = (0..=EVENT_NAMES).map(|number| format!("{{\"event\":\"{number}\"}}\n"));
        (&theirs).write_all(names.collect::<String>().as_bytes()).unwrap();
        assert!(matches!(qmp.events(), Err(QmpError::Protocol(_))));
        assert!(qmp.events.len() <= EVENT_NAMES);
    }

    #[test]
    fn a_line_without_an_end_is_not_kept() {
        let (mut qmp, flood) = babbler(&[b'x'; 4096]);
        let all = std::iter::repeat_with(|| qmp.events()).take(100_000).find(Result::is_err);
        assert!(matches!(all, Some(Err(QmpError::Protocol(_)))), "{all:?}");
        assert!(qmp.come.len() <= EVENT_BYTES + PIECE_BYTES);
        drop(qmp);
        flood.join().unwrap();
    }

    #[test]
    fn who_does_not_answer_is_asked_nothing_more() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut qmp = Qmp::over(ours);
        let most = Duration::from_millis(1);
        for _ in 0..3 {
            let late = qmp.in_a_hurry(most, |qmp| qmp.execute("query-status", json!({})));
            assert!(matches!(late, Err(QmpError::Io(_))), "{late:?}");
        }
        let mut asked = BufReader::new(&theirs);
        asked.read_line(&mut String::new()).unwrap();
        assert!(asked.buffer().is_empty(), "{:?}", asked.buffer());
        (&theirs).write_all(b"{\"return\":1,\"id\":1}\n{\"return\":2,\"id\":2}\n").unwrap();
        assert_eq!(qmp.execute("query-status", json!({})).unwrap(), json!(2));
    }

    #[test]
    fn a_socket_that_nobody_serves_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let error = Qmp::connect_within(&path, Duration::from_millis(20)).err().unwrap();
        assert!(matches!(error, QmpError::Io(_)), "{error}");
    }

    #[test]
    fn a_socket_for_which_others_wait_already_is_taken() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        // Room for one connection that waits.
        rustix::net::listen(&listener, 0).unwrap();
        let _waits = dial(&path, Instant::now()).unwrap();
        let error = Qmp::connect_within(&path, Duration::from_millis(20)).err().unwrap();
        assert!(matches!(error, QmpError::Taken), "{error}");
        assert!(error.to_string().contains("second monitor"), "{error}");
    }

    #[test]
    fn a_refusal_carries_qemus_words() {
        let (_dir, path) = peer(&[
            "{\"QMP\":{}}\n",
            "{\"return\":{}}\n",
            "{\"error\":{\"class\":\"X\",\"desc\":\"no such thing\"}}\n",
        ]);
        let error = Qmp::connect(&path).unwrap().human("x").unwrap_err();
        assert!(error.to_string().contains("no such thing"), "{error}");
    }

    #[test]
    fn something_else_than_qmp_is_an_error() {
        for greeting in [
            &["SSH-2.0-OpenSSH\n"],
            &["QEMU 7.2.22 monitor - type 'help' for more information\r\n(qemu) "],
            &["{\"return\":{}}\n"],
        ] {
            let (_dir, path) = peer(greeting);
            let error = Qmp::connect(&path).err().unwrap();
            assert!(matches!(error, QmpError::NoGreeting), "{error}");
            assert!(error.to_string().contains("-qmp"), "{error}");
        }
    }

    /// The events may have been meant for the client before. This client is not greeted.
    #[test]
    fn who_tells_events_and_does_not_greet_is_no_qmp() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let stream = dial(&path, deadline).unwrap();
        let (mut accepted, _) = listener.accept().unwrap();
        accepted.write_all(b"{\"event\":\"RESET\"}\n").unwrap();
        let error = Qmp::over(stream).await_greeting(Duration::ZERO, deadline).unwrap_err();
        assert!(matches!(error, QmpError::Silent(_)), "{error}");
        assert!(error.to_string().contains("-qmp"), "{error}");
    }

    /// Ends long before the deadline: an owner that has accepted somebody is not busy.
    #[test]
    fn who_accepts_and_is_silent_is_no_qmp() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let greeted =
            |stream: UnixStream| Qmp::over(stream).await_greeting(Duration::ZERO, deadline);
        let stream = dial(&path, deadline).unwrap();
        let _accepted = listener.accept().unwrap();
        let waits = dial(&path, deadline).unwrap();
        let other = greeted(waits);
        assert!(matches!(other, Err(QmpError::Taken)), "{other:?}");
        // Nobody else waits any more.
        let error = loop {
            match greeted(stream.try_clone().unwrap()).unwrap_err() {
                QmpError::Taken => drop(listener.accept().unwrap()),
                error => break error,
            }
        };
        assert!(matches!(error, QmpError::Silent(_)), "{error}");
    }

    #[test]
    fn an_owner_that_is_late_to_accept_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut qmp = Qmp::over(dial(&path, deadline).unwrap());
        assert_eq!(turn(&qmp.stream).unwrap(), Turn::Next);
        let (begin, begun) = std::sync::mpsc::channel();
        let late = std::thread::spawn(move || {
            // Answers as soon as the client is known to wait.
            begun.recv().unwrap();
            let mut stream = listener.accept().unwrap().0;
            stream.write_all(b"{\"QMP\":{}}\n").unwrap();
        });
        let error = qmp.await_greeting(Duration::ZERO, Instant::now()).unwrap_err();
        assert!(matches!(error, QmpError::Io(_)), "{error}");
        begin.send(()).unwrap();
        qmp.await_greeting(Duration::from_secs(60), deadline).unwrap();
        late.join().unwrap();
    }
}
