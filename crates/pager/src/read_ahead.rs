//! How much to read ahead: pure, by where the faults fall.
//!
//! Whoever reads on where an earlier read ended gets twice as much as then; a
//! read anywhere else begins small, and smaller where such beginnings led to
//! nothing. Or, where neighbours went together and may be wanted in any order, it begins
//! with what lies around.

/// The most to read at once.
const MAX: usize = 256;
const START_MAX: usize = 8;
/// Readers told apart.
const STREAMS: usize = 16;

#[derive(Clone, Copy, Default)]
struct Stream {
    /// Where its last read ended.
    next: u64,
    window: usize,
    /// Read ahead in the last read, and not known to be of use yet.
    pending: u64,
    /// When it was last used, by count of reads; 0: never.
    used: u64,
}

/// The readers of one store or disk.
#[derive(Default)]
pub(crate) struct ReadAhead {
    /// Whether a new stream begins with the aligned pages around.
    around: bool,
    streams: [Stream; STREAMS],
    /// Where a new stream begins, as a shift below [`START_MAX`].
    timid: u32,
    reads: u64,
}

/// What to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Window {
    /// Pages, the one asked for among them.
    pub(crate) pages: usize,
    /// So many of them lie before it.
    pub(crate) before: usize,
    /// Pages read ahead before that turn out to be of use now.
    pub(crate) hits: u64,
}

impl ReadAhead {
    /// One that begins with a single page, until somebody is seen to go on.
    pub(crate) fn timid() -> ReadAhead {
        ReadAhead { timid: START_MAX.ilog2(), ..ReadAhead::default() }
    }

    /// One that begins with what lies around.
    pub(crate) fn around() -> ReadAhead {
        ReadAhead { around: true, ..ReadAhead::default() }
    }

    /// A page at `at` is wanted.
    pub(crate) fn window(&mut self, at: u64) -> Window {
        self.reads += 1;
        let reads = self.reads;
        if let Some(stream) = self.streams.iter_mut().find(|s| s.used > 0 && s.next == at) {
            stream.window = (stream.window * 2).min(MAX);
            stream.used = reads;
            self.timid = self.timid.saturating_sub(1);
            let hits = std::mem::take(&mut stream.pending);
            return Window { pages: stream.window, before: 0, hits };
        }
        let (start, before) = match self.around {
            true => (START_MAX, at as usize % START_MAX),
            false => (START_MAX >> self.timid, 0),
        };
        if let Some(oldest) = self.streams.iter_mut().min_by_key(|stream| stream.used) {
            if oldest.used > 0 && oldest.pending > 0 {
                self.timid = (self.timid + 1).min(START_MAX.ilog2());
            }
            // Found again by `read`.
            *oldest = Stream { next: at, window: start, pending: 0, used: reads };
        }
        Window { pages: start, before, hits: 0 }
    }

    /// The read at `at` brought pages up to `end`, `ahead` beside the one asked for.
    pub(crate) fn read(&mut self, at: u64, end: u64, ahead: u64) {
        if let Some(stream) = self.streams.iter_mut().find(|s| s.used > 0 && s.next == at) {
            (stream.next, stream.pending) = (end, ahead);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        for _ in 0..7 {
            let pages = fault(&mut ahead, at);
            windows.push(pages);
            at += pages as u64;
        }
        assert_eq!(windows, [8, 16, 32, 64, 128, 256, 256]);
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
    fn what_was_of_use_is_told_once() {
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
}
