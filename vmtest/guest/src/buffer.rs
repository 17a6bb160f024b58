//! Memory with a pattern in it.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;

use vmtest_guest::pattern::{Pattern, WORDS_PER_PAGE, Wrong};

use crate::{Context, Result};

const PAGE_BYTES: u64 = 4096;
/// Bits of the frame number in an entry of `/proc/PID/pagemap`.
const FRAME: u64 = (1 << 55) - 1;

/// Anonymous memory. It returns to the kernel when this is dropped: the allocator maps blocks of
/// this size one by one.
pub struct Buffer {
    name: String,
    generation: u64,
    words: Vec<u64>,
}

impl Buffer {
    /// Allocates `bytes` of memory and writes all of it.
    pub fn new(name: &str, generation: u64, bytes: u64) -> Buffer {
        let words = vec![0; (bytes / 8) as usize];
        let mut buffer = Buffer { name: name.into(), generation, words };
        buffer.write();
        buffer
    }

    /// Writes all of it again, with other content.
    pub fn refill(&mut self) {
        self.generation += 1;
        self.write();
    }

    /// Compares every byte.
    pub fn check(&self) -> Wrong {
        let mut wrong = Wrong::default();
        let pattern = self.pattern();
        for (page, words) in (0..).zip(self.words.chunks(WORDS_PER_PAGE)) {
            pattern.check(page, words, &mut wrong);
        }
        wrong
    }

    /// Reads and writes one word of every page, without changing it. Returns the number of pages.
    pub fn touch(&mut self) -> u64 {
        let pages = self.words.chunks_mut(WORDS_PER_PAGE);
        pages.map(|page| page[0] = black_box(page[0])).count() as u64
    }

    /// All of its words.
    pub fn words_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }

    /// Number of the kernel's page in which it begins. An allocation of this size begins 16 bytes
    /// into a page, so each page of the buffer ends in the kernel's next page.
    pub fn first_page(&self) -> u64 {
        self.words.as_ptr().addr() as u64 / PAGE_BYTES
    }

    /// The guest's frames of the wanted pages, in the order of the pages.
    pub fn frames(&self, is_wanted: impl Fn(usize) -> bool) -> Result<Vec<u64>> {
        let pagemap = File::open("/proc/self/pagemap").context("pagemap")?;
        let pages = (0..self.words.len() / WORDS_PER_PAGE).filter(|page| is_wanted(*page));
        let frame = |page: usize| {
            let mut entry = [0; 8];
            let at = (self.first_page() + page as u64) * 8;
            pagemap.read_exact_at(&mut entry, at).context("pagemap")?;
            Ok(u64::from_ne_bytes(entry) & FRAME)
        };
        pages.map(frame).collect()
    }

    fn write(&mut self) {
        let pattern = self.pattern();
        for (page, words) in (0..).zip(self.words.chunks_mut(WORDS_PER_PAGE)) {
            pattern.write(page, words);
        }
    }

    fn pattern(&self) -> Pattern {
        Pattern::new(&self.name, self.generation)
    }
}

/// Frames as runs of `FIRST+COUNT` in hexadecimal.
pub fn runs(frames: &[u64]) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &frame in frames {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == frame => *count += 1,
            _ => runs.push((frame, 1)),
        }
    }
    let words = runs.iter().map(|(first, count)| format!("{first:x}+{count:x}"));
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_reported_in_their_order() {
        assert_eq!(runs(&[]), "");
        assert_eq!(runs(&[7, 8, 9, 0x20, 0x1f, 0x20]), "7+3 20+1 1f+2");
    }

    #[test]
    fn touching_and_refilling_leave_the_right_content() {
        let mut buffer = Buffer::new("a", 0, 64 << 10);
        assert_eq!(buffer.touch(), 16);
        buffer.refill();
        assert_eq!(buffer.check().to_string(), "0");
        buffer.words[600] ^= 0xff;
        assert!(buffer.check().to_string().starts_with("1 first at page 1 byte 704: "));
    }
}
