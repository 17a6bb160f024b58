//! A bound of a control group's memory that is a host to Ebb's pilot.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// What processes of the group can always have: the kernel would stop Ebb's own with QEMUs'.
const FLOOR_BYTES: u64 = 24 << 20;
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// Keeps the bound until it is dropped.
pub struct Bound {
    bytes: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Bound {
    /// Bounds the group in `directory`.
    pub fn start(directory: PathBuf, bytes: u64) -> Bound {
        let (bytes, stop) = (Arc::new(AtomicU64::new(bytes)), Arc::new(AtomicBool::new(false)));
        let (wanted, stopped) = (Arc::clone(&bytes), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let (path, mut is) = (directory.join("memory.limit_in_bytes"), 0);
            while !stopped.load(Relaxed) {
                let used = used_bytes(&directory).unwrap_or(0);
                let due = wanted.load(Relaxed).max(used + FLOOR_BYTES);
                // The kernel refuses a bound while it cannot take back what is above it.
                if due != is && fs::write(&path, due.to_string()).is_ok() {
                    is = due;
                }
                thread::sleep(LOOK_EVERY);
            }
        });
        Bound { bytes, stop, thread: Some(thread) }
    }

    /// Changes the bound.
    pub fn set(&self, bytes: u64) {
        self.bytes.store(bytes, Relaxed);
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        // It panics nowhere.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Returns what a group takes without its page cache, as Ebb counts it.
///
/// # Errors
/// A file cannot be read, or is not what it was.
pub fn used_bytes(directory: &std::path::Path) -> anyhow::Result<u64> {
    let usage = fs::read_to_string(directory.join("memory.usage_in_bytes"))?;
    let stat = fs::read_to_string(directory.join("memory.stat"))?;
    let cache = ["total_inactive_file ", "total_active_file "].into_iter().filter_map(|name| {
        stat.lines().find_map(|line| line.strip_prefix(name)?.parse::<u64>().ok())
    });
    Ok(usage.trim().parse::<u64>()?.saturating_sub(cache.sum()))
}
