//! Counters of a disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters since the start of the backend, over all queues and front ends.
#[derive(Default, Debug)]
pub(crate) struct Counters {
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) discards: AtomicU64,
    pub(crate) write_zeroes: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) dma_faults: Arc<AtomicU64>,
}

/// The counters at one moment. `failed` counts requests that failed, the other request counters
/// those that succeeded.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Read requests.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Discard requests.
    pub discards: u64,
    /// Write-zeroes requests.
    pub write_zeroes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written, without zeroes and discards.
    pub written_bytes: u64,
    /// Requests that were answered with anything but OK.
    pub failed: u64,
    /// Accesses to guest memory that were refused for good, by requests and by rings: no device may
    /// use a frame there.
    pub dma_faults: u64,
}

impl Counts {
    /// All requests that were answered, except those for the disk's ID.
    pub fn requests(&self) -> u64 {
        let moved = self.reads + self.writes + self.flushes;
        moved + self.discards + self.write_zeroes + self.failed
    }
}

impl Counters {
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            reads: self.reads.load(Relaxed),
            writes: self.writes.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            discards: self.discards.load(Relaxed),
            write_zeroes: self.write_zeroes.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            written_bytes: self.written_bytes.load(Relaxed),
            failed: self.failed.load(Relaxed),
            dma_faults: self.dma_faults.load(Relaxed),
        }
    }
}

pub(crate) fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Relaxed);
}
