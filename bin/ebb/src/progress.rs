//! A line on the terminal that is written again and again.

use std::io::{self, IsTerminal, Write};

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

/// A terminal that is gone needs no progress.
fn put(line: &str) {
    let line = line.replace(char::is_control, "?");
    let _ = write!(io::stderr(), "\r\x1b[K{line}");
    let _ = io::stderr().flush();
}
