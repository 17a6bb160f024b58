//! Load in the background. Memory is allocated, filled, checked and freed, processes are forked,
//! and files are written and read.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vmtest_guest::pattern::Wrong;

use crate::buffer::Buffer;
use crate::loaded_file::{Kind, LoadedFile};
use crate::{Context, Result};

const PAGE_BYTES: u64 = 4096;

/// A running load, with at least one thread for each processor.
#[derive(Default)]
pub struct Churn {
    stop: Arc<AtomicBool>,
    cycles: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Result<Wrong>>>,
}

impl Churn {
    /// Starts it, for `seconds` or until it is stopped. Its threads together use at most `bytes`.
    pub fn start(name: &str, seconds: u64, bytes: u64) -> Result<Churn> {
        let count = thread::available_parallelism().context("processors")?.get() as u64;
        let mut churn = Churn::default();
        let end = Instant::now() + Duration::from_secs(seconds);
        for number in 0..count {
            let worker = Worker {
                name: format!("{name}-{number}"),
                random: number + 1,
                bytes: bytes / count,
                end,
                stop: churn.stop.clone(),
                cycles: churn.cycles.clone(),
            };
            churn.add(move || worker.run())?;
        }
        Ok(churn)
    }

    /// Starts one that writes and reads files of `bytes` in `directory`, past the page cache and
    /// through it, until it is stopped.
    pub fn start_on_disk(name: &str, directory: &str, bytes: u64) -> Result<Churn> {
        let mut churn = Churn::default();
        for kind in [Kind::Direct, Kind::Buffered] {
            let path = Path::new(directory).join(format!("{name}.{kind:?}"));
            let mut file = LoadedFile::create(&path, kind, bytes)?;
            let (stop, cycles) = (churn.stop.clone(), churn.cycles.clone());
            churn.add(move || {
                while !stop.load(Ordering::Relaxed) {
                    file.cycle().context(path.display())?;
                    cycles.fetch_add(1, Ordering::Relaxed);
                }
                file.finish().context(path.display())
            })?;
        }
        Ok(churn)
    }

    fn add(&mut self, work: impl FnOnce() -> Result<Wrong> + Send + 'static) -> Result<()> {
        self.threads.push(thread::Builder::new().spawn(work).context("thread")?);
        Ok(())
    }

    /// Waits for this many more cycles.
    pub fn wait(&self, more: u64) -> Result<String> {
        let goal = self.cycles.load(Ordering::Relaxed) + more;
        while self.cycles.load(Ordering::Relaxed) < goal {
            if self.threads.iter().any(JoinHandle::is_finished) {
                return Err("the load has ended".into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok("done".into())
    }

    /// Ends it. Returns the cycles done, and the wrong bytes found.
    pub fn stop(self) -> Result<String> {
        self.stop.store(true, Ordering::Relaxed);
        let mut wrong = Wrong::default();
        for thread in self.threads {
            wrong.merge(thread.join().map_err(|_| "a churn thread died")??);
        }
        Ok(format!("{} {wrong}", self.cycles.load(Ordering::Relaxed)))
    }
}

struct Worker {
    name: String,
    random: u64,
    bytes: u64,
    end: Instant,
    stop: Arc<AtomicBool>,
    cycles: Arc<AtomicU64>,
}

impl Worker {
    fn run(mut self) -> Result<Wrong> {
        let mut wrong = Wrong::default();
        while !self.stop.load(Ordering::Relaxed) && Instant::now() < self.end {
            let cycle = self.cycles.load(Ordering::Relaxed);
            let bytes = self.next_bytes();
            let buffer = Buffer::new(&self.name, cycle, bytes);
            fork_and_execute()?;
            wrong.merge(buffer.check());
            self.cycles.fetch_add(1, Ordering::Relaxed);
        }
        Ok(wrong)
    }

    /// A random size from one page to this worker's share, small and large ones equally often:
    /// xorshift64.
    fn next_bytes(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let pages = (self.bytes / PAGE_BYTES).max(1);
        let limit = pages >> (self.random >> 60);
        (1 + self.random % limit.max(1)) * PAGE_BYTES
    }
}

/// Runs a pipe, for each side of which the shell forks once more.
fn fork_and_execute() -> Result<()> {
    let status = Command::new("/bin/busybox").args(["sh", "-c", ": | /bin/busybox true"]).status();
    match status.context("busybox")?.success() {
        true => Ok(()),
        false => Err("busybox failed".into()),
    }
}
