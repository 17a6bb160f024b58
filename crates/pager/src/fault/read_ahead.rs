//! How much to read ahead, as a pure function of where the faults fall.
//!
//! A reader that goes on where an earlier read ended gets twice as much as then. A read anywhere
//! else begins small, and smaller still where such beginnings led to nothing. With `around`, for
//! neighbours that were evicted together and may be wanted in any order, a read begins with the
//! pages around it, as long as that pays: now and then a page comes alone, to see whether another
//! one around it is asked for soon (`docs/decisions/0020-*`).

use std::ops::RangeInclusive;

/// Most pages to read at once.
const MAX: usize = 512;
const START_MAX: usize = 8;
/// Number of readers that are distinguished.
const STREAMS: usize = 16;

/// Of reads that begin somewhere new, one in so many brings its page alone.
const ALONE_EVERY: u64 = 8;
/// Number of lone reads that are remembered, each for 512 reads that begin somewhere new.
const ALONE: usize = 64;
const NOBODY: u64 = u64::MAX;
/// Bounds of [`Around::balance`]. [`BALANCE_FIRST`] is where it begins.
const BALANCE: RangeInclusive<i32> = -32..=32;
const BALANCE_FIRST: i32 = 8;

#[derive(Clone, Copy, Default)]
struct Stream {
    /// The position at which its last read ended.
    next: u64,
    window: usize,
    /// Pages read ahead in the last read, not known to be of use yet.
    pending: u64,
    /// When it was last used, as a count of reads; 0: never.
    used: u64,
}

/// The readers of one store or disk.
#[derive(Default)]
pub(crate) struct ReadAhead {
    /// With this, a new stream begins with the aligned group of pages around, where that pays.
    around: Option<Around>,
    streams: [Stream; STREAMS],
    /// How small a new stream begins: [`START_MAX`], shifted right by this.
    timid: u32,
    reads: u64,
}

/// What to read for a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    /// Number of pages, including the one asked for.
    pub(crate) pages: usize,
    /// Number of these pages that lie before the one asked for.
    pub(crate) before: usize,
    /// Number of pages read ahead earlier that turn out to be of use now.
    pub(crate) hits: u64,
}

impl ReadAhead {
    /// Returns a read-ahead that begins with a single page, until a reader is seen to go on.
    pub(crate) fn timid() -> ReadAhead {
        ReadAhead { timid: START_MAX.ilog2(), ..ReadAhead::default() }
    }

    /// Returns a read-ahead that begins with the pages around.
    pub(crate) fn around() -> ReadAhead {
        ReadAhead { around: Some(Around::new()), ..ReadAhead::default() }
    }

    /// Returns what to read for a touch of the page at `at`.
    pub(crate) fn window(&mut self, at: u64) -> Window {
        self.reads += 1;
        let reads = self.reads;
        if let Some(around) = &mut self.around {
            around.wanted(at);
        }
        if let Some(stream) = self.streams.iter_mut().find(|s| s.used > 0 && s.next == at) {
            stream.window = (stream.window * 2).min(MAX);
            stream.used = reads;
            self.timid = self.timid.saturating_sub(1);
            let hits = std::mem::take(&mut stream.pending);
            return Window { pages: stream.window, before: 0, hits };
        }
        let (start, before) = match self.around.as_mut().map(|around| around.comes_with(at)) {
            Some(true) => (START_MAX, at as usize % START_MAX),
            Some(false) => (1, 0),
            None => (START_MAX >> self.timid, 0),
        };
        if let Some(oldest) = self.streams.iter_mut().min_by_key(|stream| stream.used) {
            if oldest.used > 0 && oldest.pending > 0 {
                self.timid = (self.timid + 1).min(START_MAX.ilog2());
            }
            // `read` finds it again by this position.
            *oldest = Stream { next: at, window: start, pending: 0, used: reads };
        }
        Window { pages: start, before, hits: 0 }
    }

    /// Notes that the read at `at` brought pages up to `end`, `ahead` of them beside the one asked
    /// for.
    pub(crate) fn read(&mut self, at: u64, end: u64, ahead: u64) {
        if let Some(stream) = self.streams.iter_mut().find(|s| s.used > 0 && s.next == at) {
            (stream.next, stream.pending) = (end, ahead);
        }
    }
}

/// Whether it pays to bring the pages around a page. Nobody can tell which of the pages that came
/// are used. For pages that did not come, it is known: they are asked for.
struct Around {
    /// Groups of pages of which one came alone; the entry at `oldest` is the next to be forgotten.
    alone: [u64; ALONE],
    oldest: usize,
    begun: u64,
    /// Rises when another page of such a group is asked for, falls when none was. It pays to bring
    /// the group while this is not negative.
    balance: i32,
}

impl Around {
    fn new() -> Around {
        Around { alone: [NOBODY; ALONE], oldest: 0, begun: 0, balance: BALANCE_FIRST }
    }

    /// Notes that the page at `at` is asked for.
    fn wanted(&mut self, at: u64) {
        if let Some(found) = self.alone.iter_mut().find(|group| **group == group_of(at)) {
            *found = NOBODY;
            self.weigh(1);
        }
    }

    /// Returns whether the pages around come with a read that begins at `at`.
    fn comes_with(&mut self, at: u64) -> bool {
        self.begun += 1;
        if !self.begun.is_multiple_of(ALONE_EVERY) {
            return self.balance >= 0;
        }
        if std::mem::replace(&mut self.alone[self.oldest], group_of(at)) != NOBODY {
            self.weigh(-1);
        }
        self.oldest = (self.oldest + 1) % ALONE;
        false
    }

    fn weigh(&mut self, by: i32) {
        self.balance = (self.balance + by).clamp(*BALANCE.start(), *BALANCE.end());
    }
}

fn group_of(at: u64) -> u64 {
    at / START_MAX as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn fault(ahead: &mut ReadAhead, at: u64) -> usize {
        let pages = ahead.window(at).pages;
        ahead.read(at, at + pages as u64, pages as u64 - 1);
        pages
    }

    #[test]
    fn a_reader_that_goes_on_gets_more_and_more() {
        let mut ahead = ReadAhead::default();
        let mut at = 1000;
        let mut windows = Vec::new();
        for _ in 0..8 {
            let pages = fault(&mut ahead, at);
            windows.push(pages);
            at += pages as u64;
        }
        assert_eq!(windows, [8, 16, 32, 64, 128, 256, 512, 512]);
    }

    #[test]
    fn readers_do_not_disturb_each_other() {
        let mut ahead = ReadAhead::default();
        let mut at: Vec<u64> = (0..8).map(|reader| reader * 1_000_000).collect();
        for round in 0..4 {
            for at in &mut at {
                let pages = fault(&mut ahead, *at);
                assert_eq!(pages, 8 << round);
                *at += pages as u64;
            }
        }
    }

    #[test]
    fn who_jumps_about_gets_less() {
        let mut ahead = ReadAhead::default();
        let last = (0..200u64).map(|n| fault(&mut ahead, n * 7919 % 100_000 + 10)).last();
        assert_eq!(last, Some(1));
    }

    #[test]
    fn pages_that_were_used_are_reported_once() {
        let mut ahead = ReadAhead::default();
        assert_eq!(ahead.window(5), Window { pages: 8, before: 0, hits: 0 });
        ahead.read(5, 13, 7);
        assert_eq!(ahead.window(13), Window { pages: 16, before: 0, hits: 7 });
        ahead.read(13, 14, 0);
        assert_eq!(ahead.window(14), Window { pages: 32, before: 0, hits: 0 });
    }

    #[test]
    fn what_lies_around_comes_with_a_first_page() {
        let mut ahead = ReadAhead::around();
        assert_eq!(ahead.window(13), Window { pages: 8, before: 5, hits: 0 });
        ahead.read(13, 16, 7);
        assert_eq!(ahead.window(16), Window { pages: 16, before: 0, hits: 7 });
    }

    /// Asks for these pages in turn; some are there by then. Returns the mean number of pages
    /// brought at each fault of the last quarter.
    fn brought(pages: impl Iterator<Item = u64>) -> f64 {
        let pages: Vec<u64> = pages.collect();
        let (mut ahead, mut there) = (ReadAhead::around(), HashSet::new());
        let late = pages.len() * 3 / 4;
        let mut windows = Vec::new();
        for (index, at) in pages.into_iter().enumerate() {
            if there.contains(&at) {
                continue;
            }
            let Window { pages, before, .. } = ahead.window(at);
            let first = at - before as u64;
            there.extend(first..first + pages as u64);
            ahead.read(at, first + pages as u64, pages as u64 - 1);
            if index >= late {
                windows.push(pages as f64);
            }
        }
        windows.iter().sum::<f64>() / windows.len() as f64
    }

    /// A permutation of `0..65536`.
    fn shuffled(n: u64) -> u64 {
        n.wrapping_mul(40_503).wrapping_add(12_345) % 65_536
    }

    #[test]
    fn pages_of_no_neighbourhood_come_alone() {
        // Only one page of each eight is ever wanted.
        let mean = brought((0..8192).map(|n| shuffled(n) * 8 + n % 8));
        assert!(mean < 1.1, "{mean}");
    }

    #[test]
    fn neighbours_in_any_order_come_together() {
        // All pages of sixteen groups at a time, in any order.
        let mean = brought((0..32_768).map(|n| {
            let within = shuffled(n % 128) % 128;
            shuffled(n / 128 * 16 + within / 8) * 8 + within % 8
        }));
        assert!(mean > 6.0, "{mean}");
    }

    #[test]
    fn who_comes_to_jump_about_gets_less_and_back() {
        let mut around = Around::new();
        let mut pays = |neighbours: bool| {
            for n in 0..4096 {
                let at = shuffled(n) * 8;
                around.wanted(at);
                if !around.comes_with(at) && neighbours {
                    around.wanted(at + 1);
                }
            }
            around.balance >= 0
        };
        assert_eq!([false, true, false].map(&mut pays), [false, true, false]);
    }
}
