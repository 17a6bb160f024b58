//! Content that tells where it belongs: by name, generation, page and place in the page.

/// Words of 8 bytes in a page of 4 KiB.
pub const WORDS_PER_PAGE: usize = 512;

/// One buffer's or file's content in one generation.
#[derive(Clone, Copy)]
pub struct Pattern {
    seed: u64,
    /// How often each word stands in a row.
    repeat: usize,
}

/// Bytes that are not what they should be.
#[derive(Clone, Default)]
pub struct Wrong {
    /// Their number.
    pub bytes: u64,
    /// The first of them, in words.
    pub first: Option<String>,
}

impl Pattern {
    /// The pattern of `name` at `generation`. It does not compress, unless the name begins with
    /// `soft`: then it compresses to about an eighth.
    pub fn new(name: &str, generation: u64) -> Pattern {
        let repeat = if name.starts_with("soft") { 16 } else { 1 };
        let name = name.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        Pattern { seed: mix(name ^ mix(generation)), repeat }
    }

    /// Writes the page numbered `page`, or the part of it that `words` has.
    pub fn write(self, page: u64, words: &mut [u64]) {
        let mut value = self.first_word(page);
        for words in words.chunks_mut(self.repeat) {
            words.fill(value);
            value = value.wrapping_add(STEP);
        }
    }

    /// Compares every byte of the page numbered `page`.
    pub fn check(self, page: u64, words: &[u64], wrong: &mut Wrong) {
        let mut value = self.first_word(page);
        for (index, &word) in words.iter().enumerate() {
            if word != value {
                wrong.add(page, index, word, value);
            }
            if (index + 1) % self.repeat == 0 {
                value = value.wrapping_add(STEP);
            }
        }
    }

    fn first_word(self, page: u64) -> u64 {
        mix(self.seed ^ page)
    }
}

/// Odd, and no byte of it is 0: neighbouring words differ in many places.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A bijection in which every bit of the input affects every bit of the output.
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(STEP);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

impl Wrong {
    fn add(&mut self, page: u64, index: usize, is: u64, should_be: u64) {
        self.bytes +=
            (is ^ should_be).to_ne_bytes().iter().filter(|&&byte| byte != 0).count() as u64;
        self.first.get_or_insert_with(|| {
            format!("page {page} byte {}: {is:#018x} instead of {should_be:#018x}", index * 8)
        });
    }

    /// Adds what another check found.
    pub fn merge(&mut self, other: Wrong) {
        self.bytes += other.bytes;
        self.first = self.first.take().or(other.first);
    }
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.first {
            None => write!(f, "{}", self.bytes),
            Some(first) => write!(f, "{} first at {first}", self.bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong_after(change: impl FnOnce(&mut [u64])) -> u64 {
        let mut page = [0; WORDS_PER_PAGE];
        let pattern = Pattern::new("a", 1);
        pattern.write(7, &mut page);
        change(&mut page);
        let mut wrong = Wrong::default();
        pattern.check(7, &page, &mut wrong);
        wrong.bytes
    }

    #[test]
    fn every_byte_counts() {
        assert_eq!(wrong_after(|_| ()), 0);
        assert_eq!(wrong_after(|page| page[511] ^= 0x0100_0000_0000_0001), 2);
    }

    #[test]
    fn a_soft_page_repeats_itself_and_is_no_other() {
        let pattern = Pattern::new("soft", 1);
        let mut page = [0; WORDS_PER_PAGE];
        pattern.write(7, &mut page);
        assert!(page.chunks(16).all(|words| words.iter().all(|word| *word == words[0])));
        assert!(page.windows(17).all(|words| words[0] != words[16]));
        let mut wrong = [Wrong::default(), Wrong::default()];
        pattern.check(7, &page, &mut wrong[0]);
        pattern.check(8, &page, &mut wrong[1]);
        assert!(wrong[0].bytes == 0 && wrong[1].bytes > 4000);
    }

    #[test]
    fn a_zeroed_swapped_or_stale_page_is_wrong_nearly_everywhere() {
        assert!(wrong_after(|page| page.fill(0)) > 4000);
        assert!(wrong_after(|page| Pattern::new("a", 1).write(8, page)) > 4000);
        assert!(wrong_after(|page| Pattern::new("a", 2).write(7, page)) > 4000);
        assert!(wrong_after(|page| Pattern::new("b", 1).write(7, page)) > 4000);
    }
}
