//! Memory with a pattern in it.

use std::hint::black_box;

use crate::pattern::{Pattern, WORDS_PER_PAGE, Wrong};

/// Anonymous memory; what it holds goes back to the kernel when it is dropped:
/// the allocator maps blocks of this size one by one.
pub struct Buffer {
    name: String,
    generation: u64,
    words: Vec<u64>,
}

impl Buffer {
    /// Takes `bytes` of memory and writes all of it.
    pub fn new(name: &str, generation: u64, bytes: u64) -> Buffer {
        let words = vec![0; (bytes / 8) as usize];
        let mut buffer = Buffer { name: name.into(), generation, words };
        buffer.write();
        buffer
    }

    /// Writes all of it anew, with other content.
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

    /// Reads and writes one word of every page, without changing it; how many
    /// pages that were.
    pub fn touch(&mut self) -> u64 {
        let pages = self.words.chunks_mut(WORDS_PER_PAGE);
        pages.map(|page| page[0] = black_box(page[0])).count() as u64
    }

    /// All of it.
    pub fn words_mut(&mut self) -> &mut [u64] {
        &mut self.words
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

#[cfg(test)]
mod tests {
    use super::*;

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
