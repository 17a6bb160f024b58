//! Memory of which a known part is used again and again.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::buffer::Buffer;
use crate::pattern::{WORDS_PER_PAGE, Wrong};
use crate::{Context, Result};

const PAGE_BYTES: u64 = 4096;
/// Of an entry of `/proc/PID/pagemap`: the frame's number.
const FRAME: u64 = (1 << 55) - 1;
/// Between two passes: the kernel is entered, and with page-table isolation other page tables
/// are loaded, so that an emulator looks them up again.
const PAUSE: Duration = Duration::from_millis(2);

/// Pages `unit` in a row, aligned, are used, of every `part` units the first; the others never.
pub struct Hot {
    stop: Arc<AtomicBool>,
    passes: Arc<AtomicU64>,
    frames: Vec<u64>,
    thread: JoinHandle<Wrong>,
}

impl Hot {
    /// Takes `bytes`, writes all of it, and begins to use the part.
    pub fn start(name: &str, bytes: u64, unit: u64, part: u64) -> Result<Hot> {
        if unit == 0 || part == 0 {
            return Err("a unit has a page, and a part is a fraction".into());
        }
        let mut buffer = Buffer::new(name, 0, bytes);
        let first = buffer.words_mut().as_ptr().addr() as u64 / PAGE_BYTES;
        let is_hot = move |page: usize| ((first + page as u64) / unit).is_multiple_of(part);
        let frames = frames(&mut buffer, is_hot)?;
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

    /// Waits for so many more passes over the part.
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

    /// The guest's frames of the part, as `FIRST+COUNT` in hexadecimal.
    pub fn frames(&self) -> String {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for &frame in &self.frames {
            match runs.last_mut() {
                Some((first, count)) if *first + *count == frame => *count += 1,
                _ => runs.push((frame, 1)),
            }
        }
        let words = runs.iter().map(|(first, count)| format!("{first:x}+{count:x}"));
        words.collect::<Vec<_>>().join(" ")
    }

    /// Ends it: passes done, and bytes found wrong in all of the memory.
    pub fn stop(self) -> Result<String> {
        self.stop.store(true, Ordering::Relaxed);
        let wrong = self.thread.join().map_err(|_| "the hot thread died")?;
        Ok(format!("{} {wrong}", self.passes.load(Ordering::Relaxed)))
    }
}

fn frames(buffer: &mut Buffer, is_hot: impl Fn(usize) -> bool) -> Result<Vec<u64>> {
    let pagemap = File::open("/proc/self/pagemap").context("pagemap")?;
    let words = buffer.words_mut();
    // An allocation of this size begins 16 bytes into a page: its last page has the rest.
    let address = words.as_ptr().addr() as u64;
    let pages = (0..words.len() / WORDS_PER_PAGE).filter(|page| is_hot(*page));
    let mut found: Vec<u64> = pages
        .map(|page| {
            let mut entry = [0; 8];
            let at = (address / PAGE_BYTES + page as u64) * 8;
            pagemap.read_exact_at(&mut entry, at).context("pagemap")?;
            Ok(u64::from_ne_bytes(entry) & FRAME)
        })
        .collect::<Result<_>>()?;
    found.sort_unstable();
    Ok(found)
}
