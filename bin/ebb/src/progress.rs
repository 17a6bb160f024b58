//! A line on the terminal that is rewritten again and again.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use ratatui::crossterm::terminal;

/// Time from one update to the next of the line that [`during`] shows.
const EVERY: Duration = Duration::from_secs(1);
/// Cells of a bar.
const CELLS: u64 = 20;

/// A line on standard error. It is written only on a terminal, not beside JSON, and erased when this
/// value is dropped.
pub struct Progress {
    is_shown: bool,
    is_written: bool,
}

impl Progress {
    /// Begins with nothing written.
    pub fn new(json: bool) -> Progress {
        Progress { is_shown: !json && io::stderr().is_terminal(), is_written: false }
    }

    /// Whether somebody looks at it.
    pub fn is_shown(&self) -> bool {
        self.is_shown
    }

    /// Writes `line` over the previous one.
    pub fn show(&mut self, line: &str) {
        if self.is_shown {
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

/// Returns a bar that is full once `done` is `total`, and the part that is done.
pub fn bar(done: u64, total: u64) -> String {
    let (done, total) = (u128::from(done.min(total)), u128::from(total.max(1)));
    let full = (done * u128::from(CELLS) / total) as usize;
    let empty = CELLS as usize - full;
    format!("{}{} {:>3} %", "█".repeat(full), "░".repeat(empty), done * 100 / total)
}

/// Does `work`. Meanwhile it shows what `line` returns for the time since `work` began.
pub fn during<T>(
    json: bool,
    mut line: impl FnMut(Duration) -> String + Send,
    work: impl FnOnce() -> T,
) -> T {
    let mut progress = Progress::new(json);
    if !progress.is_shown {
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
    // A line that wraps could not be erased.
    let columns = terminal::size().map_or(usize::MAX, |(columns, _)| columns.into());
    let line: String =
        line.replace(char::is_control, "?").chars().take(columns.saturating_sub(1)).collect();
    let _ = write!(io::stderr(), "\r\x1b[K{line}");
    let _ = io::stderr().flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_full_as_what_is_done() {
        assert_eq!(bar(0, 8), "░░░░░░░░░░░░░░░░░░░░   0 %");
        assert_eq!(bar(2, 8), "█████░░░░░░░░░░░░░░░  25 %");
        assert_eq!(bar(9, 8), "████████████████████ 100 %");
        assert_eq!(bar(0, 0), "░░░░░░░░░░░░░░░░░░░░   0 %");
        assert_eq!(bar(u64::MAX - 1, u64::MAX), "███████████████████░  99 %");
    }
}
