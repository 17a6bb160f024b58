//! Lines on their way to the log. A thread writes them, so that no other thread waits for whoever
//! reads standard error, or for a file system.

use std::sync::mpsc::{self, SyncSender};
use std::thread::{self, JoinHandle};

use ebb_sys::confine::{self, CapabilitySet};

use crate::support::bounded_log::BoundedLog;

/// Most lines that wait. A line for which there is no room is lost.
const LINES_MOST: usize = 512;

/// The lines that wait, and the thread that writes them.
pub struct Queue {
    lines: Option<SyncSender<String>>,
    thread: Option<JoinHandle<()>>,
    /// Lines that were lost since the last one for which there was room.
    lost: u64,
}

impl Queue {
    /// Starts the thread, which has no capabilities. If there is no thread to be had, all lines are
    /// lost.
    pub fn new(mut log: BoundedLog) -> Queue {
        let (lines, waiting) = mpsc::sync_channel::<String>(LINES_MOST);
        let (starting, has_started) = mpsc::channel::<()>();
        let write = move || {
            // With capabilities it writes as well.
            let _ = confine::keep_capabilities(CapabilitySet::empty());
            drop(starting);
            waiting.iter().for_each(|line| log.write(line.as_bytes()));
        };
        let thread = thread::Builder::new().name("log".into()).spawn(write).ok();
        // Once system calls are filtered, a thread may not be able to give anything up. The end of
        // the channel is the message.
        let _ = has_started.recv();
        Queue { lines: Some(lines), thread, lost: 0 }
    }

    /// Puts a line in, and never waits. `lost` tells how many lines before it were lost.
    pub fn push(&mut self, line: String, lost: impl FnOnce(u64) -> String) {
        let Some(lines) = &self.lines else { return };
        let text = if self.lost == 0 { line } else { lost(self.lost) + &line };
        match lines.try_send(text) {
            Ok(()) => self.lost = 0,
            Err(_) => self.lost += 1,
        }
    }

    /// Takes no more lines. Returns the thread, which ends once it has written those that wait.
    pub fn close(&mut self) -> Option<JoinHandle<()>> {
        self.lines = None;
        self.thread.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, Mode, mkfifoat};
    use std::fs::File;
    use std::io::{BufRead, BufReader};

    #[test]
    fn nobody_waits_for_a_reader_that_stops() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe");
        mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        let reader = File::options().read(true).write(true).open(&path).unwrap();
        let mut queue = Queue::new(BoundedLog::open(&path));
        // The pipe takes 64 KiB.
        for number in 0..LINES_MOST + 100 {
            queue.push(format!("{number:4095}\n"), |_| String::new());
        }
        let (mut lines, mut lost) = (BufReader::new(reader).lines(), 0);
        while queue.lost > 0 {
            lost = queue.lost;
            lines.next().unwrap().unwrap();
            queue.push("the last\n".into(), |lost| format!("{lost} are lost\n"));
        }
        assert!(lost > 0);
        let thread = queue.close().expect("a thread");
        let told = lines.map(Result::unwrap).find(|line| line.ends_with("are lost"));
        assert_eq!(told, Some(format!("{lost} are lost")));
        thread.join().unwrap();
    }
}
