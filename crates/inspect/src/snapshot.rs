//! A copy of a guest's RAM.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_units::{FRAME_BYTES, Gpa};

use crate::GuestMemory;
use crate::page::{PAGE_BYTES, PageWords};

/// Guest RAM copied into this process: a guest's memory file read whole, or made-up bytes.
#[derive(Debug, Default)]
pub struct Snapshot {
    segments: Vec<(Gpa, Vec<AtomicU64>)>,
}

impl Snapshot {
    /// Makes RAM without segments.
    pub fn new() -> Snapshot {
        Snapshot::default()
    }

    /// Adds a segment, cut to whole frames. `start` must be frame aligned and behind every segment
    /// added before.
    pub fn add(&mut self, start: Gpa, mut words: Vec<u64>) {
        words.truncate(words.len() / FRAME_WORDS * FRAME_WORDS);
        self.segments.push((start, words.into_iter().map(AtomicU64::new).collect()));
    }

    /// Writes one word. Does nothing outside RAM.
    pub fn set(&self, gpa: Gpa, value: u64) {
        if let Some(words) = self.words(gpa, 1) {
            words[0].store(value, Relaxed);
        }
    }
}

const FRAME_WORDS: usize = (FRAME_BYTES / 8) as usize;

impl GuestMemory for Snapshot {
    fn word(&self, gpa: Gpa) -> Option<u64> {
        self.words(gpa, 1).map(|words| words[0].load(Relaxed))
    }

    fn page(&self, gpa: Gpa) -> Option<PageWords> {
        let whole = gpa.0.is_multiple_of(PAGE_BYTES);
        let words = self.words(gpa, PAGE_BYTES as usize / 8).filter(|_| whole)?;
        let words: &PageWords = words.try_into().ok()?;
        Some(words.each_ref().map(|word| AtomicU64::new(word.load(Relaxed))))
    }

    fn words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU64]> {
        if !gpa.0.is_multiple_of(8) {
            return None;
        }
        self.segments.iter().find_map(|(start, words)| {
            let first = usize::try_from(gpa.0.checked_sub(start.0)? / 8).ok()?;
            words.get(first..first.checked_add(count)?)
        })
    }

    fn next_populated(&self, from: Gpa) -> Option<(Gpa, u64)> {
        self.segments().into_iter().find_map(|(start, bytes)| {
            let first = start.0.max(from.0.next_multiple_of(FRAME_BYTES));
            let left = (start.0 + bytes).checked_sub(first)?;
            (left > 0).then_some((Gpa(first), left))
        })
    }

    fn segments(&self) -> Vec<(Gpa, u64)> {
        self.segments.iter().map(|(start, words)| (*start, words.len() as u64 * 8)).collect()
    }
}
