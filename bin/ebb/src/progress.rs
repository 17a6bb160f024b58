//! A line on the terminal that is rewritten again and again.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Time from one update to the next of the line that [`during`] shows.
const EVERY: Duration = Duration::from_secs(1);

/// A line on standard error. It is written only on a terminal, and erased when this value is
/// dropped.
pub struct Progress {
    is_terminal: bool,
    is_written: bool,
}

impl Progress {
    /// Begins with nothing written.
    pub fn new() -> Progress {
        Progress { is_terminal: io::stderr().is_terminal(), is_written: false }
    }

    /// Writes `line` over the previous one.
    pub fn show(&mut self, line: &str) {
        if self.is_terminal {
            self.is_written = true;
            put(line);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_written {
            put("");
        }
    }
}

/// Does `work`. Meanwhile it shows what `line` returns for the time since `work` began.
pub fn during<T>(mut line: impl FnMut(Duration) -> String + Send, work: impl FnOnce() -> T) -> T {
    let mut progress = Progress::new();
    if !progress.is_terminal {
        return work();
    }
    let (is_done, done) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            let began = Instant::now();
            // Nothing is sent. The loop ends when the sender is dropped.
            while done.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                progress.show(&line(began.elapsed()));
            }
        });
        let answer = work();
        drop(is_done);
        answer
    })
}

/// Erases a line that may be there, because the program is about to end.
pub fn clear() {
    if io::stderr().is_terminal() {
        put("");
    }
}

/// Writes `line` over what is there. Errors do not matter: a terminal that is closed needs no
/// progress.
fn put(line: &str) {
    let line = line.replace(char::is_control, "?");
    let _ = write!(io::stderr(), "\r\x1b[K{line}");
    let _ = io::stderr().flush();
}
