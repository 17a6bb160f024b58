//! A QMP client: one request at a time, events kept apart.
//! QEMU documentation: interop/qmp-spec.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// A QEMU that does not answer for so long counts as stuck.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// A longer line is no QMP.
const MAX_LINE_BYTES: u64 = 4 << 20;
/// Events kept while a request is answered; beyond that the oldest go.
const MAX_EVENTS: usize = 256;

/// What can go wrong between Ebb and a QMP socket.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket failed, or QEMU did not answer in time.
    #[error("QMP: {0}")]
    Io(#[from] io::Error),
    /// Something else than QMP came.
    #[error("QMP: the other side does not speak it: {0}")]
    Protocol(String),
    /// QEMU said no.
    #[error("QEMU refused {command}: {reason}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's words.
        reason: String,
    },
}

/// A connection past its greeting.
pub struct Qmp {
    lines: BufReader<UnixStream>,
    /// What came of a line when the time was over.
    part: Vec<u8>,
    /// Of the last request: an answer that came too late is not that of the next.
    id: u64,
    events: VecDeque<String>,
}

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Errors
    /// [`QmpError::Io`] when there is nobody, or QEMU serves another client:
    /// its socket takes one at a time and lets others wait.
    pub fn connect(path: &Path) -> Result<Qmp, QmpError> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        let (lines, part, events) = (BufReader::new(stream), Vec::new(), VecDeque::new());
        let mut qmp = Qmp { lines, part, id: 0, events };
        let greeting = qmp.message()?;
        if greeting.get("QMP").is_none() {
            return Err(QmpError::Protocol("no greeting".into()));
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// The process at the other end.
    ///
    /// # Errors
    /// As getsockopt(2) for `SO_PEERCRED`.
    pub fn peer_pid(&self) -> io::Result<i32> {
        Ok(rustix::net::sockopt::socket_peercred(self.lines.get_ref())?.pid.as_raw_pid())
    }

    /// Does `ask`, which waits for so long at most between two pieces of an answer: for who
    /// holds what QEMU may wait for. What comes later is nobody's.
    ///
    /// # Errors
    /// As setsockopt(2) for `SO_RCVTIMEO`.
    pub fn in_a_hurry<T>(
        &mut self,
        most: Duration,
        ask: impl FnOnce(&mut Qmp) -> T,
    ) -> io::Result<T> {
        self.lines.get_ref().set_read_timeout(Some(most))?;
        let answer = ask(self);
        self.lines.get_ref().set_read_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(answer)
    }

    /// Runs one command and returns what it returned.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.id += 1;
        let request = json!({ "execute": command, "arguments": arguments, "id": self.id });
        let mut line = request.to_string();
        line.push('\n');
        self.lines.get_mut().write_all(line.as_bytes())?;
        loop {
            let mut message = self.message()?;
            if message.get("id").is_some_and(|id| id != &json!(self.id)) {
                continue;
            }
            if let Some(value) = message.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = message.get("error") {
                let reason = error.get("desc").and_then(Value::as_str).unwrap_or("no reason given");
                return Err(QmpError::Refused { command: command.into(), reason: reason.into() });
            }
            self.keep_event(&message);
        }
    }

    /// Runs a command of the human monitor: for what QMP itself does not tell.
    ///
    /// # Errors
    /// [`QmpError`].
    pub fn human(&mut self, line: &str) -> Result<String, QmpError> {
        let answer = self.execute("human-monitor-command", json!({ "command-line": line }))?;
        match answer {
            Value::String(text) => Ok(text),
            other => Err(QmpError::Protocol(format!("{line}: {other}"))),
        }
    }

    /// Events that have come, by name; does not wait.
    ///
    /// # Errors
    /// [`QmpError::Io`] once the socket is closed.
    pub fn events(&mut self) -> Result<Vec<String>, QmpError> {
        while self.has_line()? {
            let message = self.message()?;
            self.keep_event(&message);
        }
        Ok(self.events.drain(..).collect())
    }

    /// Whether a whole line has come; of another the part that has come is kept.
    fn has_line(&mut self) -> Result<bool, QmpError> {
        while !self.lines.buffer().contains(&b'\n') {
            let part = self.lines.buffer();
            let bytes = part.len();
            self.part.extend_from_slice(part);
            self.lines.consume(bytes);
            if self.part.len() as u64 > MAX_LINE_BYTES {
                return Err(QmpError::Protocol("a line without an end".into()));
            }
            if !self.is_readable()? {
                return Ok(false);
            }
            if self.lines.fill_buf()?.is_empty() {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
        Ok(true)
    }

    fn is_readable(&self) -> io::Result<bool> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(self.lines.get_ref(), PollFlags::IN)];
        Ok(poll(&mut fds, Some(&Timespec::default()))? > 0)
    }

    fn keep_event(&mut self, message: &Value) {
        if let Some(event) = message.get("event").and_then(Value::as_str) {
            if self.events.len() == MAX_EVENTS {
                self.events.pop_front();
            }
            self.events.push_back(event.to_owned());
        }
    }

    fn message(&mut self) -> Result<Value, QmpError> {
        let room = MAX_LINE_BYTES.saturating_sub(self.part.len() as u64);
        let got = (&mut self.lines).take(room).read_until(b'\n', &mut self.part)?;
        if got == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let line = std::mem::take(&mut self.part);
        serde_json::from_slice(&line).map_err(|error| QmpError::Protocol(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// A peer that says what it is told to, line by line, one per request.
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
        let (lines, part, events) = (BufReader::new(ours), Vec::new(), VecDeque::new());
        let mut qmp = Qmp { lines, part, id: 0, events };
        (&theirs).write_all(b"{\"return\":\"la").unwrap();
        let most = Duration::from_millis(1);
        let late = qmp.in_a_hurry(most, |qmp| qmp.human("info version")).unwrap();
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
        let (_dir, path) = peer(&["SSH-2.0-OpenSSH\n"]);
        assert!(matches!(Qmp::connect(&path), Err(QmpError::Protocol(_))));
    }
}
