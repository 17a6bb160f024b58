//! The guest's serial console. Requests and answers use a socket; what was printed before it was
//! connected is in the log that QEMU writes.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::complaints;
use crate::process;
use crate::wait::{deadline, until_within};

const TAIL_LINES: usize = 30;

/// Why a guest did not do what it was asked to do.
#[derive(Clone, Debug)]
pub struct GuestError(pub String);

/// A connection to the guest's init program.
pub struct Console {
    input: UnixStream,
    log: PathBuf,
    vmm: i32,
    last_number: u64,
    patience: Duration,
    /// What came over the socket.
    received: Arc<Mutex<Vec<u8>>>,
}

impl Console {
    /// Connects to the console of the VM run by process `vmm`.
    ///
    /// # Errors
    /// Those of connect(2).
    pub fn connect(socket: &Path, log: &Path, vmm: i32) -> io::Result<Console> {
        let input = UnixStream::connect(socket)?;
        let received = Arc::default();
        collect(input.try_clone()?, Arc::clone(&received));
        let (log, patience) = (log.into(), deadline());
        Ok(Console { input, log, vmm, last_number: 0, patience, received })
    }

    /// Sets the longest time for each wait.
    pub fn be_patient(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// All that the guest has printed, as far as the log goes back. If QEMU writes the log itself,
    /// it logs a character twice when its socket is full at that moment.
    pub fn text(&self) -> String {
        let before = fs::read(self.log.with_extension("log.1")).unwrap_or_default();
        let text = [before, fs::read(&self.log).unwrap_or_default()].concat();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// What came over the socket since the last request.
    fn received(&self) -> String {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&received).into_owned()
    }

    fn forget_received(&self) {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Waits until the guest has started `boots` times.
    pub fn wait_ready(&self, boots: usize) {
        self.try_wait_ready(boots).unwrap_or_else(|GuestError(why)| self.fail(&why));
    }

    /// Does the same for a guest that may end meanwhile.
    ///
    /// # Errors
    /// It did not start, or it could not do what its start has to do.
    pub fn try_wait_ready(&self, boots: usize) -> Result<(), GuestError> {
        let line = self.wait(&format!("the guest's start number {boots}"), |console| {
            let text = console.text();
            let line = text.match_indices("@0 ").nth(boots - 1)?.0;
            text[line..].split_once('\n').map(|(line, _)| line.to_owned())
        })?;
        if line.starts_with("@0 ok") { Ok(()) } else { Err(GuestError(line)) }
    }

    /// Sends a request to the guest, and returns the answer.
    ///
    /// # Errors
    /// The guest's own words.
    ///
    /// # Panics
    /// No answer comes, or the guest's kernel or VMM dies.
    pub fn ask(&mut self, request: &str) -> Result<String, GuestError> {
        self.try_ask(request).unwrap_or_else(|GuestError(why)| self.fail(&why))
    }

    /// Does the same for a guest that may end meanwhile.
    ///
    /// # Errors
    /// No answer comes, or the guest's kernel or VMM dies. The answer itself may be an error, too:
    /// the guest's own words.
    pub fn try_ask(&mut self, request: &str) -> Result<Result<String, GuestError>, GuestError> {
        self.last_number += 1;
        let number = self.last_number;
        self.send(number, request)?;
        loop {
            match self.wait_answer(number, request)? {
                Answer::Torn => self.send(number, "again")?,
                answer => return Ok(answer.outcome()),
            }
        }
    }

    /// Sends a request that needs no answer.
    pub fn tell(&mut self, request: &str) {
        self.try_tell(request).unwrap_or_else(|GuestError(why)| self.fail(&why));
    }

    /// Does the same for a guest that may have ended.
    ///
    /// # Errors
    /// The VMM has ended.
    pub fn try_tell(&mut self, request: &str) -> Result<(), GuestError> {
        self.last_number += 1;
        self.send(self.last_number, request)
    }

    fn send(&mut self, number: u64, request: &str) -> Result<(), GuestError> {
        self.forget_received();
        let line = format!("#{number} {request}\n");
        self.input.write_all(line.as_bytes()).map_err(|error| GuestError(error.to_string()))
    }

    fn wait_answer(&self, number: u64, request: &str) -> Result<Answer, GuestError> {
        let mark = format!("@{number} ");
        self.wait(&format!("the answer to `{request}`"), |console| {
            let text = console.received();
            Answer::parse(&text[text.find(&mark)?..])
        })
    }

    /// Waits until the guest prints `wanted`.
    ///
    /// # Errors
    /// The guest did not print it, or no longer can.
    pub fn wait_text(&self, wanted: &str) -> Result<(), GuestError> {
        self.wait(wanted, |console| {
            let found = console.text().contains(wanted) || console.received().contains(wanted);
            found.then_some(())
        })
    }

    fn wait<T>(
        &self,
        what: &str,
        mut find: impl FnMut(&Console) -> Option<T>,
    ) -> Result<T, GuestError> {
        let found = until_within(self.patience, || {
            // The end is looked for first, then what was printed before it.
            let vmm_ended = !process::runs(self.vmm);
            let panicked = complaints::is_fatal(&self.text());
            match find(self) {
                Some(found) => Some(Ok(found)),
                None if vmm_ended => Some(Err(format!("QEMU ended before {what}"))),
                None => panicked.then(|| Err(format!("kernel panic before {what}"))),
            }
        });
        let timeout = || Err(format!("waited {:?} in vain for {what}", self.patience));
        found.unwrap_or_else(timeout).map_err(GuestError)
    }

    /// What QEMU wrote to its standard error: why it ended, if it did so by itself.
    pub fn words_of_vmm(&self) -> String {
        fs::read_to_string(self.log.with_file_name("qemu.log")).unwrap_or_default()
    }

    /// The last lines, for a message.
    pub fn tail(&self) -> String {
        format!("--- end of the console ---\n{}\n---", last_lines(&self.text()))
    }

    /// Fails the test with this message and the console's last lines.
    pub fn fail(&self, what: &str) -> ! {
        panic!("{what}\n{}", self.tail())
    }
}

/// The end of a log, for a message.
pub fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

/// Reads as long as something comes: QEMU stops the guest when nobody reads.
fn collect(mut output: UnixStream, received: Arc<Mutex<Vec<u8>>>) {
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(length @ 1..) = output.read(&mut bytes) {
            let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
            received.extend_from_slice(&bytes[..length]);
        }
    });
}

/// An answer on a line of its own.
enum Answer {
    Ok(String),
    Error(String),
    /// Other output has broken into it.
    Torn,
}

impl Answer {
    /// Parses the line that `text` begins with, once it is complete.
    fn parse(text: &str) -> Option<Answer> {
        let (line, _) = text.split_once('\n')?;
        Some(Answer::whole(line.trim_end_matches('\r')).unwrap_or(Answer::Torn))
    }

    /// Parses `@17 ok "TEXT" $LENGTH`.
    fn whole(line: &str) -> Option<Answer> {
        let (_, rest) = line.split_once(' ')?;
        let (word, rest) = rest.split_once(' ')?;
        let (json, length) = rest.rsplit_once(" $")?;
        if json.len() != length.parse::<usize>().ok()?.checked_add(2)? {
            return None;
        }
        let text = serde_json::from_str(json).ok()?;
        match word {
            "ok" => Some(Answer::Ok(text)),
            "error" => Some(Answer::Error(text)),
            _ => None,
        }
    }

    fn outcome(self) -> Result<String, GuestError> {
        match self {
            Answer::Ok(text) => Ok(text),
            Answer::Error(text) => Err(GuestError(text)),
            Answer::Torn => Err(GuestError("the answer was torn by other output".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Result<String, String>> {
        Some(Answer::parse(text)?.outcome().map_err(|error| error.0))
    }

    #[test]
    fn whole_answers_are_read() {
        assert_eq!(parse("@17 ok \"a\\nb\" $4\r\nmore"), Some(Ok("a\nb".into())));
        assert_eq!(parse("@17 error \"no\" $2\n"), Some(Err("no".into())));
        assert_eq!(parse("@17 ok \"a\\nb\" $4"), None);
    }

    #[test]
    fn torn_answers_are_noticed() {
        for line in ["@17 ok \"a[  1.0] note\n", "@17 ok \"a [ 1.0] note b\" $2\n", "@17 \n"] {
            assert!(matches!(parse(line), Some(Err(why)) if why.contains("torn")), "{line}");
        }
    }
}
