//! A secret function from pages to 128 bits: universal hashing, not a cryptographic hash.
//!
//! For any two pages, chosen by somebody who does not know the key, the probability over keys that
//! they collide is below 2^-126. No more is needed, because nobody is ever shown a digest. It takes
//! a fifth of the time of BLAKE3, and runs on every block of a disk that moves and on every page
//! that is evicted.
//!
//! A page goes through NH with a Toeplitz key, twice, in words of 64 bits, with collisions at
//! 2^-128 (Black et al., UMAC, CRYPTO'99, theorems 1 and 2; Krovetz, VMAC, section 2). The two sums
//! then go through a multilinear hash into 64 bits, twice, with collisions at 2^-128 (Lemire and
//! Kaser, "Strongly universal string hashing is fast", theorem 1). One bit of a digest is always
//! set, which costs a factor of 2.
#![forbid(unsafe_code)]

use std::io;

use ebb_sys::confine::lock_in_memory;
use ebb_units::FRAME_BYTES;
use rustix::rand::{GetRandomFlags, getrandom};
use zeroize::{Zeroize, Zeroizing};

/// The content of a frame, or of a disk block of the same size.
pub type Page = [u8; FRAME_BYTES as usize];

const WORDS: usize = FRAME_BYTES as usize / 8;
/// Words by which the keys of the second sum are shifted against those of the first.
const SHIFT: usize = 2;

/// Identifies the content of a page; never all zero.
pub type Digest = [u64; 2];

/// The secret key. It is overwritten when it is dropped.
pub struct DigestKey(Box<Secret>);

struct Secret {
    words: [u64; WORDS + SHIFT],
    /// For each half of a digest: a summand, and a factor for each of the four words of the sums.
    ends: [[u128; 5]; 2],
}

impl DigestKey {
    /// Makes a new random key. It stays out of the host's swap, as far as this process may lock
    /// memory.
    ///
    /// # Errors
    /// As getrandom(2).
    pub fn random() -> io::Result<DigestKey> {
        let mut seed = Zeroizing::new([0; 32]);
        match getrandom(&mut *seed, GetRandomFlags::empty())? == seed.len() {
            true => Ok(DigestKey::new(&seed)),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Derives the key from `seed`, which must be secret and random.
    pub fn new(seed: &[u8; 32]) -> DigestKey {
        let mut secret = Box::new(Secret { words: [0; _], ends: [[0; 5]; 2] });
        // Failure is ignored: it is no reason to give up a VM.
        let _ = lock_in_memory(&*secret);
        let mut hasher = blake3::Hasher::new_keyed(seed);
        let mut random = hasher.finalize_xof();
        hasher.zeroize();
        let mut next = || {
            let mut bytes = Zeroizing::new([0; 16]);
            random.fill(&mut *bytes);
            u128::from_le_bytes(*bytes)
        };
        secret.words.iter_mut().for_each(|word| *word = next() as u64);
        secret.ends.iter_mut().flatten().for_each(|word| *word = next());
        random.zeroize();
        DigestKey(secret)
    }

    /// Returns the digest of a page.
    pub fn digest(&self, page: &Page) -> Digest {
        let sums = self.0.sums(page);
        let words =
            [sums[0] as u64, (sums[0] >> 64) as u64, sums[1] as u64, (sums[1] >> 64) as u64];
        let half = |[add, factors @ ..]: &[u128; 5]| {
            let products = factors.iter().zip(words).map(|(by, word)| by.wrapping_mul(word.into()));
            (products.fold(*add, u128::wrapping_add) >> 64) as u64
        };
        [half(&self.0.ends[0]) | 1, half(&self.0.ends[1])]
    }
}

impl Secret {
    fn sums(&self, page: &Page) -> [u128; 2] {
        let (pairs, _) = page.as_chunks::<16>();
        let (mut first, mut second) = (0u128, 0u128);
        // A window has this pair's two keys of the first sum, then its two keys of the second.
        for (pair, key) in pairs.iter().zip(self.words.windows(4).step_by(2)) {
            let pair = u128::from_le_bytes(*pair);
            let (low, high) = (pair as u64, (pair >> 64) as u64);
            let product = |by: [u64; 2]| {
                u128::from(low.wrapping_add(by[0])) * u128::from(high.wrapping_add(by[1]))
            };
            first = first.wrapping_add(product([key[0], key[1]]));
            second = second.wrapping_add(product([key[SHIFT], key[SHIFT + 1]]));
        }
        [first, second]
    }
}

impl Drop for DigestKey {
    fn drop(&mut self) {
        self.0.words.zeroize();
        self.0.ends.iter_mut().for_each(Zeroize::zeroize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn key() -> DigestKey {
        DigestKey::new(&[7; 32])
    }

    /// Computes the digest word by word, as the papers define it.
    fn by_the_book(key: &DigestKey, block: &Page) -> Digest {
        let word = |at: usize| u64::from_le_bytes(block[8 * at..][..8].try_into().unwrap());
        let mut sums = [0u128; 2];
        for (pass, sum) in sums.iter_mut().enumerate() {
            for at in (0..512).step_by(2) {
                let left = word(at).wrapping_add(key.0.words[at + 2 * pass]);
                let right = word(at + 1).wrapping_add(key.0.words[at + 1 + 2 * pass]);
                *sum = sum.wrapping_add(u128::from(left) * u128::from(right));
            }
        }
        let ends = key.0.ends.map(|end| {
            let mut total = end[0];
            for (at, by) in end[1..].iter().enumerate() {
                let word = (sums[at / 2] >> (64 * (at % 2))) as u64;
                total = total.wrapping_add(by.wrapping_mul(u128::from(word)));
            }
            (total >> 64) as u64
        });
        [ends[0] | 1, ends[1]]
    }

    proptest! {
        #[test]
        fn it_is_what_the_papers_say(bytes in prop::collection::vec(any::<u8>(), 4096)) {
            let (key, block) = (key(), bytes.try_into().unwrap());
            prop_assert_eq!(key.digest(&block), by_the_book(&key, &block));
        }
    }

    #[test]
    fn no_two_of_many_alike_pages_collide() {
        let key = key();
        let mut seen = HashSet::from([key.digest(&[0; 4096])]);
        for bit in 0..8 * 4096 {
            let mut block = [0; 4096];
            block[bit / 8] = 1 << (bit % 8);
            assert!(seen.insert(key.digest(&block)), "bit {bit}");
        }
        for byte in 1..=255 {
            assert!(seen.insert(key.digest(&[byte; 4096])), "byte {byte}");
        }
    }

    #[test]
    fn the_key_makes_the_digest() {
        let other = DigestKey::new(&[8; 32]);
        assert_ne!(key().digest(&[1; 4096]), other.digest(&[1; 4096]));
        assert_eq!(key().digest(&[1; 4096]), key().digest(&[1; 4096]));
    }
}
