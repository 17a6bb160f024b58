//! The multi-level queue (vTMM, section 3.2.2): a page that was used again and again is left alone
//! for a while, and counts as used.
//!
//! A page that was found used is not disturbed for `2^(x-1)` windows, where `x` is its step. Then
//! its bit is cleared, and the window after that judges it. If it was used, it rises and rests
//! again. If not, it sinks and is judged again in the next window, since its bit is clear. Each
//! monitoring begins with steps of 0: otherwise a page that was hot and has cooled would pass for
//! hot by a single use. The level goes up and down with the step, and stays from one monitoring to
//! the next.
//!
//! Pages that nobody uses are not reported and cost nothing: how far they sank is computed when
//! they are seen again. A page takes four bytes:
//!
//! ```text
//!   31        24 23        16 15         8 7        5    4      3     2     0
//!  +------------+------------+------------+----------+-------+-------+-------+
//!  | writes     | reads      | due window |   step   | wrote | rests | level |
//!  +------------+------------+------------+----------+-------+-------+-------+
//! ```

use ebb_units::{FrameRange, Gfn};

use crate::{Access, Observer, Verdict};

/// The highest level.
pub const TOP_LEVEL: u8 = 7;
/// Most windows of one monitoring that are counted. The first round, which only clears, is not one.
pub const WINDOWS_MAX: u8 = 250;
/// Bytes that the queue keeps for each page.
pub const BYTES_PER_PAGE: usize = size_of::<Page>();

const LEVEL: u8 = 0b111;
const AT_REST: u8 = 1 << 3;
const WROTE: u8 = 1 << 4;
/// Shift of the step in the state.
const STEP: u32 = 5;

/// Windows of a monitoring in which a page was used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Uses {
    /// Windows in which it was read, and not written as far as was seen.
    pub reads: u8,
    /// Windows in which it was written.
    pub writes: u8,
}

/// One page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Page {
    state: u8,
    /// If the page is at rest: the window at which its bit is cleared. Otherwise: the next window
    /// that judges it.
    due: u8,
    reads: u8,
    writes: u8,
}

/// All pages of a VM.
pub struct Levels {
    /// In order of frames.
    ram: Vec<FrameRange>,
    /// The pages of all ranges, one range after the other.
    pages: Vec<Page>,
    window: u8,
    top_level: u8,
}

impl Levels {
    /// A queue for the frames of `ram`, which must be in order and must not overlap. Every page
    /// starts at level 0. With a `top_level` of 0 there is no queue: every page is looked at in
    /// every window.
    pub fn new(ram: &[FrameRange], top_level: u8) -> Levels {
        let count: u64 = ram.iter().map(|range| range.count).sum();
        Levels {
            ram: ram.to_vec(),
            pages: vec![Page::NEW; usize::try_from(count).unwrap_or(0)],
            window: 0,
            top_level: top_level.min(TOP_LEVEL),
        }
    }

    /// Begins a monitoring: counts are zero, no page is at rest, and rests are short again. Levels
    /// stay. The round that follows clears every bit and counts nothing.
    pub fn begin(&mut self) {
        let window = self.window;
        self.pages.iter_mut().for_each(|page| page.begin(window));
        self.window = 0;
    }

    /// Begins the next window. Windows after [`WINDOWS_MAX`] are not counted.
    pub fn next_window(&mut self) {
        self.window = WINDOWS_MAX.min(self.window + 1);
    }

    /// The current window, from 1 on; 0 is the round that clears.
    pub fn window(&self) -> u8 {
        self.window
    }

    /// The frames that the queue covers.
    pub fn ram(&self) -> &[FrameRange] {
        &self.ram
    }

    /// What was counted so far of a page; zero for a frame that is no RAM.
    pub fn uses(&self, gfn: Gfn) -> Uses {
        self.page(gfn).map_or(Uses::default(), |page| page.uses(self.window))
    }

    /// The level of a page, less how far it sank since it was last seen.
    pub fn level(&self, gfn: Gfn) -> u8 {
        self.page(gfn).map_or(0, |page| page.level_in(self.window))
    }

    /// The counts of every page, in order of frames.
    pub fn all_uses(&self) -> impl Iterator<Item = (Gfn, Uses)> {
        let frames = self.ram.iter().flat_map(|range| range.frames());
        frames.zip(&self.pages).map(|(gfn, page)| (gfn, page.uses(self.window)))
    }

    /// The counts and levels of the pages of each range.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (Gfn, impl Iterator<Item = (Uses, u8)>)> {
        let mut rest = &self.pages[..];
        self.ram.iter().map(move |range| {
            let (pages, others) = rest.split_at(rest.len().min(range.count as usize));
            rest = others;
            let window = self.window;
            (range.start, pages.iter().map(move |page| (page.uses(window), page.level_in(window))))
        })
    }

    /// Bytes that the queue itself takes.
    pub fn bytes(&self) -> u64 {
        (self.pages.len() * BYTES_PER_PAGE) as u64
    }

    fn page(&self, gfn: Gfn) -> Option<&Page> {
        self.pages.get(self.index(gfn)?)
    }

    fn index(&self, gfn: Gfn) -> Option<usize> {
        let mut before = 0;
        // There are only a handful of ranges.
        for range in &self.ram {
            if range.contains(gfn) {
                return usize::try_from(before + (gfn.0 - range.start.0)).ok();
            }
            before += range.count;
        }
        None
    }

    /// Indices of the pages of a run of frames, as far as they lie in the range of the first frame.
    fn indices(&self, frames: FrameRange) -> Option<std::ops::Range<usize>> {
        let range = self.ram.iter().find(|range| range.contains(frames.start))?;
        let first = self.index(frames.start)?;
        let count = frames.count.min(range.end().0 - frames.start.0);
        Some(first..first + usize::try_from(count).ok()?)
    }
}

impl Observer for Levels {
    fn would_clear(&self, frames: FrameRange) -> bool {
        let pages = self.indices(frames).and_then(|indices| self.pages.get(indices));
        let verdict = |mut page: Page| page.saw(self.window, Access::Read, self.top_level);
        pages.unwrap_or_default().iter().any(|page| verdict(*page) == Verdict::Clear)
    }

    /// One page that is due is enough to clear the bit that all of them share.
    fn saw(&mut self, frames: FrameRange, access: Access) -> Verdict {
        let (window, top_level) = (self.window, self.top_level);
        let pages = self.indices(frames).and_then(|indices| self.pages.get_mut(indices));
        let mut verdict = Verdict::Leave;
        for page in pages.unwrap_or_default() {
            if page.saw(window, access, top_level) == Verdict::Clear {
                verdict = Verdict::Clear;
            }
        }
        verdict
    }
}

impl Page {
    const NEW: Page = Page { state: 0, due: 1, reads: 0, writes: 0 };

    fn level(self) -> u8 {
        self.state & LEVEL
    }

    fn step(self) -> u8 {
        self.state >> STEP
    }

    fn is_at_rest(self) -> bool {
        self.state & AT_REST != 0
    }

    fn begin(&mut self, window: u8) {
        *self = Page { state: self.level_in(window), ..Page::NEW };
    }

    /// The level at the end of a window.
    fn level_in(self, window: u8) -> u8 {
        // It was judged in every window since then, and used in none. A page at rest was not
        // judged.
        let unused = match self.is_at_rest() {
            true => window.saturating_sub(self.due),
            false => (window + 1).saturating_sub(self.due),
        };
        self.level().saturating_sub(unused)
    }

    fn saw(&mut self, window: u8, access: Access, top_level: u8) -> Verdict {
        if self.is_at_rest() && window < self.due {
            return Verdict::Leave;
        }
        if window < self.due {
            // Seen by another entry, in the window in which its bit was cleared.
            return Verdict::Clear;
        }
        // In these windows its table was not even read: nobody used it.
        self.sink(window - self.due);
        if self.is_at_rest() {
            // The bit is from before: it says nothing about this window.
            self.judge_in(window + 1);
            return Verdict::Clear;
        }
        self.count(window, access, top_level)
    }

    fn count(&mut self, window: u8, access: Access, top_level: u8) -> Verdict {
        let [level, step] = [self.level(), self.step()].map(|level| top_level.min(level + 1));
        let rest = match step {
            0 => 0,
            step => (1 << (step - 1)).min(WINDOWS_MAX - window),
        };
        let (count, wrote) = match access {
            Access::Read => (&mut self.reads, 0),
            Access::Write => (&mut self.writes, WROTE),
        };
        // Each window counts once, so the count fits.
        *count = count.saturating_add(1 + rest);
        if step == 0 {
            self.judge_in(window + 1);
            return Verdict::Clear;
        }
        self.state = level | step << STEP | AT_REST | wrote;
        self.due = window + rest;
        Verdict::Leave
    }

    fn judge_in(&mut self, window: u8) {
        self.state &= !(AT_REST | WROTE);
        self.due = window;
    }

    fn sink(&mut self, levels: u8) {
        let [level, step] = [self.level(), self.step()].map(|level| level.saturating_sub(levels));
        self.state = (self.state & (AT_REST | WROTE)) | level | step << STEP;
    }

    /// The counts by the end of a window, without what was counted ahead for a rest that goes on.
    fn uses(self, window: u8) -> Uses {
        let ahead = if self.is_at_rest() { self.due.saturating_sub(window) } else { 0 };
        match self.state & WROTE {
            0 => Uses { reads: self.reads - ahead.min(self.reads), writes: self.writes },
            _ => Uses { reads: self.reads, writes: self.writes - ahead.min(self.writes) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: FrameRange = FrameRange::new(Gfn(3), 1);

    fn levels() -> Levels {
        Levels::new(&[FrameRange::new(Gfn(2), 4)], TOP_LEVEL)
    }

    /// The verdicts on a page that is used in every window.
    fn always_used(levels: &mut Levels, windows: u8) -> String {
        let mut verdicts = String::new();
        levels.saw(PAGE, Access::Read);
        for _ in 0..windows {
            levels.next_window();
            verdicts.push(match levels.saw(PAGE, Access::Read) {
                Verdict::Clear => 'c',
                Verdict::Leave => '.',
            });
        }
        verdicts
    }

    #[test]
    fn a_page_in_use_is_disturbed_less_and_less() {
        let mut levels = levels();
        // It is judged and at rest for 1, 2, 4, ... windows, and cleared in the last of them.
        let expected = ".c".to_owned() + "..c" + "....c" + "........c" + &".".repeat(16) + "c";
        assert_eq!(always_used(&mut levels, 36), expected);
        assert_eq!(levels.uses(Gfn(3)), Uses { reads: 36, writes: 0 });
        assert_eq!(levels.level(Gfn(3)), 5);
    }

    #[test]
    fn without_a_queue_each_window_looks() {
        let mut levels = Levels::new(&[FrameRange::new(Gfn(2), 4)], 0);
        assert_eq!(always_used(&mut levels, 20), "c".repeat(20));
        assert_eq!(levels.uses(Gfn(3)), Uses { reads: 20, writes: 0 });
    }

    #[test]
    fn the_top_level_is_not_left_upwards() {
        let mut levels = levels();
        always_used(&mut levels, 250);
        assert_eq!(levels.level(Gfn(3)), TOP_LEVEL);
        assert_eq!(levels.uses(Gfn(3)), Uses { reads: 250, writes: 0 });
    }

    #[test]
    fn a_page_that_is_used_no_more_sinks_in_each_window() {
        let mut levels = levels();
        always_used(&mut levels, 8);
        assert_eq!(levels.level(Gfn(3)), 3);
        // At rest until the ninth window, whose bit is from before.
        let sunk: Vec<u8> = (0..5)
            .map(|_| {
                levels.next_window();
                levels.level(Gfn(3))
            })
            .collect();
        assert_eq!(sunk, [3, 3, 2, 1, 0]);
    }

    #[test]
    fn a_monitoring_begins_with_levels_and_nothing_else() {
        let mut levels = levels();
        always_used(&mut levels, 8);
        levels.begin();
        assert_eq!((levels.level(Gfn(3)), levels.uses(Gfn(3))), (3, Uses::default()));
        assert!(levels.would_clear(PAGE));
        // A single use of a page that was hot before is not taken for many.
        levels.next_window();
        levels.saw(PAGE, Access::Read);
        assert_eq!(levels.level(Gfn(3)), 4);
        (0..7).for_each(|_| levels.next_window());
        assert_eq!(levels.uses(Gfn(3)), Uses { reads: 2, writes: 0 });
        levels.begin();
        assert_eq!(levels.level(Gfn(3)), 0);
    }

    #[test]
    fn writes_count_apart() {
        let mut levels = levels();
        levels.next_window();
        levels.saw(PAGE, Access::Write);
        assert_eq!(levels.uses(Gfn(3)), Uses { reads: 0, writes: 1 });
        levels.next_window();
        assert_eq!(levels.uses(Gfn(3)), Uses { reads: 0, writes: 2 }, "at rest");
        levels.next_window();
        assert_eq!(levels.uses(Gfn(3)), Uses { reads: 0, writes: 2 });
    }

    #[test]
    fn a_page_that_several_entries_map_counts_once() {
        let mut levels = levels();
        levels.next_window();
        assert_eq!(levels.saw(PAGE, Access::Read), Verdict::Leave);
        assert_eq!(levels.saw(PAGE, Access::Read), Verdict::Leave);
        levels.next_window();
        assert_eq!(levels.saw(PAGE, Access::Read), Verdict::Clear);
        assert_eq!(levels.saw(PAGE, Access::Read), Verdict::Clear);
        assert_eq!(levels.uses(Gfn(3)), Uses { reads: 2, writes: 0 });
    }

    #[test]
    fn frames_outside_ram_are_left_alone() {
        let mut levels = Levels::new(&[FrameRange::new(Gfn(2), 4), FrameRange::new(Gfn(9), 1)], 7);
        levels.next_window();
        assert_eq!(levels.saw(FrameRange::new(Gfn(7), 1), Access::Read), Verdict::Leave);
        levels.saw(FrameRange::new(Gfn(5), 512), Access::Read);
        levels.saw(FrameRange::new(Gfn(9), 1), Access::Write);
        let used: Vec<_> = levels.all_uses().filter(|(_, uses)| *uses != Uses::default()).collect();
        let expected =
            [(Gfn(5), Uses { reads: 1, writes: 0 }), (Gfn(9), Uses { reads: 0, writes: 1 })];
        assert_eq!(used, expected);
        assert_eq!(BYTES_PER_PAGE, 4);
    }
}
