//! A line on the terminal that is written again and again.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// So often it is shown how long something takes of which no more is known.
const EVERY: Duration = Duration::from_secs(1);

/// On standard error, and only where somebody sees it; gone once it goes.
pub struct Progress {
    is_seen: bool,
    is_written: bool,
}

impl Progress {
    /// Nothing is written yet.
    pub fn new() -> Progress {
        Progress { is_seen: io::stderr().is_terminal(), is_written: false }
    }

    /// Writes `line` in place of what was there.
    pub fn show(&mut self, line: &str) {
        if self.is_seen {
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

/// Does `work`; meanwhile `what` is shown, and for how long.
pub fn during<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let mut progress = Progress::new();
    if !progress.is_seen {
        return work();
    }
    let (is_done, done) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            let began = Instant::now();
            // Nothing is sent: it ends with its sender.
            while done.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                progress.show(&format!("{what}, {} s", began.elapsed().as_secs()));
            }
        });
        let answer = work();
        drop(is_done);
        answer
    })
}

/// Nothing is left of a line that may be there: the program is about to end.
pub fn clear() {
    if io::stderr().is_terminal() {
        put("");
    }
}

/// A terminal that is gone needs no progress.
fn put(line: &str) {
    let line = line.replace(char::is_control, "?");
    let _ = write!(io::stderr(), "\r\x1b[K{line}");
    let _ = io::stderr().flush();
}
