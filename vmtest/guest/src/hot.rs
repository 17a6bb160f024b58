//! Memory of which a known part is used again and again.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vmtest_guest::pattern::{WORDS_PER_PAGE, Wrong};

use crate::buffer::{self, Buffer};
use crate::{Context, Result};

/// Pause between two passes. The kernel is entered then, and with page-table isolation other page
/// tables are loaded, so that an emulator looks them up again.
const PAUSE: Duration = Duration::from_millis(2);

/// Memory in aligned units of `unit` pages. Of every `part` units, the first is used, the others
/// never.
pub struct Hot {
    stop: Arc<AtomicBool>,
    passes: Arc<AtomicU64>,
    frames: Vec<u64>,
    thread: JoinHandle<Wrong>,
}

impl Hot {
    /// Allocates `bytes`, writes all of it, and begins to use the part.
    pub fn start(name: &str, bytes: u64, unit: u64, part: u64) -> Result<Hot> {
        if unit == 0 || part == 0 {
            return Err("a unit has a page, and a part is a fraction".into());
        }
        let mut buffer = Buffer::new(name, 0, bytes);
        let first = buffer.first_page();
        let is_hot = move |page: usize| ((first + page as u64) / unit).is_multiple_of(part);
        let mut frames = buffer.frames(is_hot)?;
        frames.sort_unstable();
        let (stop, passes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, passed) = (Arc::clone(&stop), Arc::clone(&passes));
        let thread = thread::Builder::new().name("hot".into()).spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let pages = buffer.words_mut().chunks_mut(WORDS_PER_PAGE).enumerate();
                for (_, words) in pages.filter(|(page, _)| is_hot(*page)) {
                    words[0] = black_box(words[0]);
                }
                passed.fetch_add(1, Ordering::Relaxed);
                thread::sleep(PAUSE);
            }
            buffer.check()
        });
        Ok(Hot { stop, passes, frames, thread: thread.context("thread")? })
    }

    /// Waits for this many more passes over the part.
    pub fn wait(&self, more: u64) -> Result<String> {
        let goal = self.passes.load(Ordering::Relaxed) + more;
        while self.passes.load(Ordering::Relaxed) < goal {
            if self.thread.is_finished() {
                return Err("the load has ended".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok("done".into())
    }

    /// The guest's frames of the part, in the format of [`buffer::runs`].
    pub fn frames(&self) -> String {
        buffer::runs(&self.frames)
    }

    /// Ends it. Returns the passes done, and the wrong bytes found in all of the memory.
    pub fn stop(self) -> Result<String> {
        self.stop.store(true, Ordering::Relaxed);
        let wrong = self.thread.join().map_err(|_| "the hot thread died")?;
        Ok(format!("{} {wrong}", self.passes.load(Ordering::Relaxed)))
    }
}
