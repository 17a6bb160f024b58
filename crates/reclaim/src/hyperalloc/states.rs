//! R: what each huge frame of a zone is to the host. R is two bits in the host's own memory; the
//! guest neither reads nor writes them.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use ebb_llfree::CHUNK_AREAS;

/// Words for 64 huge frames: one with a bit each for "not installed", one with a bit each for
/// "hard".
const CHUNK_WORDS: usize = 2;
const _: () = assert!(CHUNK_AREAS == u64::BITS as usize);

/// The state of one huge frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// I: it has memory, or gets it like any other.
    Installed,
    /// S: no memory; the guest may have it back, at a touch.
    Soft,
    /// H: no memory, and the guest may not have it before it is returned.
    Hard,
}

/// The states of a zone's huge frames. Only the holder of a huge frame's ledger words changes its
/// state. Without holding them, a state that is read is a hint.
pub(crate) struct States {
    words: Box<[AtomicU64]>,
}

/// The states of 64 huge frames, a bit each.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Chunk {
    /// Soft or hard.
    pub reclaimed: u64,
    /// Hard.
    pub hard: u64,
}

impl States {
    /// All are installed.
    pub fn new(areas: usize) -> States {
        let words = areas.div_ceil(CHUNK_AREAS) * CHUNK_WORDS;
        States { words: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Bytes of memory that the states take.
    pub fn bytes(&self) -> u64 {
        size_of_val(&*self.words) as u64
    }

    fn pair(&self, index: usize) -> Option<(&[AtomicU64; CHUNK_WORDS], u64)> {
        let (chunks, _) = self.words.as_chunks();
        Some((chunks.get(index / CHUNK_AREAS)?, 1 << (index % CHUNK_AREAS)))
    }

    /// The state of a huge frame. Beyond the end, all are installed.
    pub fn get(&self, index: usize) -> State {
        let Some(([reclaimed, hard], bit)) = self.pair(index) else { return State::Installed };
        match (reclaimed.load(Acquire) & bit != 0, hard.load(Acquire) & bit != 0) {
            (false, _) => State::Installed,
            (true, false) => State::Soft,
            (true, true) => State::Hard,
        }
    }

    /// Sets a state. The caller must hold the ledger words of the huge frame. Takes one atomic
    /// operation for each bit that changes.
    pub fn set(&self, index: usize, state: State) {
        let Some((words, bit)) = self.pair(index) else { return };
        let bits = [state != State::Installed, state == State::Hard];
        for (word, set) in words.iter().zip(bits) {
            // Nobody else changes this bit now.
            let is_set = word.load(Relaxed) & bit != 0;
            if set && !is_set {
                word.fetch_or(bit, AcqRel);
            } else if is_set && !set {
                word.fetch_and(!bit, AcqRel);
            }
        }
    }

    /// The states of the 64 huge frames from `64 * chunk` on.
    pub fn chunk(&self, chunk: usize) -> Chunk {
        let (chunks, _) = self.words.as_chunks::<CHUNK_WORDS>();
        let Some([reclaimed, hard]) = chunks.get(chunk) else { return Chunk::default() };
        Chunk { reclaimed: reclaimed.load(Relaxed), hard: hard.load(Relaxed) }
    }

    /// The number of soft and of hard huge frames.
    pub fn count(&self) -> (u64, u64) {
        let chunks = (0..self.words.len() / CHUNK_WORDS).map(|chunk| self.chunk(chunk));
        chunks.fold((0, 0), |(soft, hard), chunk| {
            let ones = |mask: u64| u64::from(mask.count_ones());
            (soft + ones(chunk.reclaimed & !chunk.hard), hard + ones(chunk.reclaimed & chunk.hard))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_own() {
        let states = States::new(200);
        let all = [State::Installed, State::Soft, State::Hard];
        let of = |index: usize| all[index * 7 % 3];
        (0..200).for_each(|index| states.set(index, of(index)));
        assert!((0..200).all(|index| states.get(index) == of(index)));
        let count = |state| (0..200).filter(|&index| of(index) == state).count() as u64;
        assert_eq!(states.count(), (count(State::Soft), count(State::Hard)));
        (0..200).for_each(|index| states.set(index, State::Installed));
        assert_eq!(states.count(), (0, 0));
        assert_eq!(states.chunk(1), Chunk::default());
    }

    #[test]
    fn beyond_the_end_is_nothing() {
        let states = States::new(3);
        states.set(64, State::Hard);
        assert_eq!(states.get(64), State::Installed);
        assert_eq!(states.chunk(9), Chunk::default());
    }
}
