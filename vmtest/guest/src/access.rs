//! Memory that is accessed at random, some of its pages more often than others.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vmtest_guest::pattern::{WORDS_PER_PAGE, Wrong};
use vmtest_guest::spread;

use crate::buffer::{self, Buffer};
use crate::times::Times;
use crate::{Context, Result, measure};

/// Accesses between two entries into the kernel. With page-table isolation, other page tables are
/// loaded then, so that an emulator looks pages up again.
const BATCH: u64 = 256;
/// Percentage of accesses to the hot part; the others are to all of the memory.
const HOT_PERCENT: u64 = 90;
/// Words of a page to use: the last words of a buffer's page lie in the kernel's next page.
const WORDS: u64 = WORDS_PER_PAGE as u64 - 2;

/// How often each page is accessed, by its rank (`spread.rs`).
#[derive(Clone, Copy)]
pub enum Law {
    /// The pages of `count` ranks are hot, beginning with `first` and wrapping around.
    Hot { first: u64, count: u64 },
    /// Each rank is accessed less often than the one before: Zipf's law with an exponent of 1.
    Zipf,
}

/// Running accesses: every second one is a write that keeps the content.
pub struct Access {
    shared: Arc<Shared>,
    frames: Vec<u64>,
    began: Instant,
    thread: JoinHandle<Wrong>,
}

struct Shared {
    law: Mutex<Law>,
    stop: AtomicBool,
    done: AtomicU64,
    /// How long each [`BATCH`] accesses took since somebody last asked.
    times: Mutex<Times>,
}

impl Law {
    /// Parses `hot FIRST COUNT`, or `zipf`.
    pub fn parse(words: &[&str]) -> Result<Law> {
        match *words {
            ["hot", first, count] => {
                let (first, count) = (first.parse().context(first)?, count.parse().context(count)?);
                if count == 0 {
                    Err("nothing is hot".into())
                } else {
                    Ok(Law::Hot { first, count })
                }
            }
            ["zipf"] => Ok(Law::Zipf),
            _ => Err(format!("no such law: {}", words.join(" "))),
        }
    }

    fn rank(self, random: u64, pages: u64) -> u64 {
        match self {
            Law::Hot { first, count } if random % 100 < HOT_PERCENT => {
                first + random / 100 % count.min(pages)
            }
            Law::Hot { .. } => random / 100 % pages,
            Law::Zipf => {
                // Gives this distribution, except for the first ranks, without a table.
                let part = random as f64 / u64::MAX as f64;
                ((pages as f64).powf(part) as u64 - 1).min(pages - 1)
            }
        }
    }
}

impl Access {
    /// Allocates `bytes`, writes all of it, and begins.
    pub fn start(name: &str, bytes: u64, law: Law) -> Result<Access> {
        let buffer = Buffer::new(name, 0, bytes);
        let frames = buffer.frames(|_| true)?;
        let shared = Arc::new(Shared {
            law: Mutex::new(law),
            stop: AtomicBool::new(false),
            done: AtomicU64::new(0),
            times: Mutex::default(),
        });
        let for_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name("access".into());
        let thread = thread.spawn(move || work(buffer, &for_thread)).context("thread")?;
        Ok(Access { shared, frames, began: Instant::now(), thread })
    }

    /// Changes the law.
    pub fn change(&self, law: Law) {
        *self.shared.law.lock().unwrap_or_else(PoisonError::into_inner) = law;
    }

    /// Waits for this many more accesses. Returns all that were done, and microseconds since it
    /// began.
    pub fn wait(&self, more: u64) -> Result<String> {
        let goal = self.shared.done.load(Relaxed) + more;
        while self.shared.done.load(Relaxed) < goal {
            if self.thread.is_finished() {
                return Err("the load has ended".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(format!("{} {}", self.shared.done.load(Relaxed), self.began.elapsed().as_micros()))
    }

    /// Returns how long each [`BATCH`] accesses took since the last call, in the format of
    /// [`Times`].
    pub fn times(&self) -> String {
        let mut times = self.shared.times.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *times).to_string()
    }

    /// The guest's frames of the pages, in the order of the pages.
    pub fn frames(&self) -> String {
        buffer::runs(&self.frames)
    }

    /// Ends it. Returns the accesses done, and the wrong bytes found.
    pub fn stop(self) -> Result<String> {
        self.shared.stop.store(true, Relaxed);
        let wrong = self.thread.join().map_err(|_| "the accessing thread died")?;
        Ok(format!("{} {wrong}", self.shared.done.load(Relaxed)))
    }
}

fn work(mut buffer: Buffer, shared: &Shared) -> Wrong {
    let pages = (buffer.words_mut().len() / WORDS_PER_PAGE) as u64;
    let mut random = 1;
    while !shared.stop.load(Relaxed) {
        let law = *shared.law.lock().unwrap_or_else(PoisonError::into_inner);
        let began = Instant::now();
        for _ in 0..BATCH {
            random = measure::next_random(random);
            let page = spread::page(law.rank(random, pages), pages);
            let at = page * WORDS_PER_PAGE as u64 + (random >> 40) % WORDS;
            if let Some(word) = buffer.words_mut().get_mut(at as usize) {
                let value = black_box(*word);
                if random >> 20 & 1 == 0 {
                    *word = black_box(value);
                }
            }
        }
        let took_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        shared.times.lock().unwrap_or_else(PoisonError::into_inner).add(took_us);
        shared.done.fetch_add(BATCH, Relaxed);
        thread::yield_now();
    }
    buffer.check()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 5120;

    fn counts(law: Law) -> Vec<u64> {
        let (mut counts, mut random) = (vec![0; PAGES as usize], 1);
        for _ in 0..100 * PAGES {
            random = measure::next_random(random);
            counts[spread::page(law.rank(random, PAGES), PAGES) as usize] += 1;
        }
        counts
    }

    #[test]
    fn nine_of_ten_accesses_are_of_the_hot_part() {
        let (first, count) = (PAGES - 100, PAGES / 5);
        let counts = counts(Law::Hot { first, count });
        let hot = (first..first + count).map(|rank| counts[spread::page(rank, PAGES) as usize]);
        let percent = hot.sum::<u64>() as f64 / PAGES as f64;
        // 90 %, and a fifth of the other 10 %.
        assert!((91.0..93.0).contains(&percent), "{percent}");
        assert!(counts.iter().all(|&count| count > 0));
    }

    #[test]
    fn by_zipfs_law_the_first_ranks_come_most_often() {
        let mut counts = counts(Law::Zipf);
        assert_eq!(counts.iter().max(), counts.get(spread::page(0, PAGES) as usize));
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let tenth: u64 = counts[..PAGES as usize / 10].iter().sum();
        let percent = tenth as f64 / PAGES as f64;
        assert!((65.0..85.0).contains(&percent), "{percent}");
    }

    #[test]
    fn laws_are_parsed_from_words() {
        assert!(matches!(Law::parse(&["hot", "3", "4"]), Ok(Law::Hot { first: 3, count: 4 })));
        assert!(matches!(Law::parse(&["zipf"]), Ok(Law::Zipf)));
        for words in [&["hot", "3", "0"][..], &["hot"], &["cold"]] {
            assert!(Law::parse(words).is_err());
        }
    }
}
