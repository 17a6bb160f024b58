//! The multi-level queue (vTMM, section 3.2.2): a page that was used again and again is
//! left alone for a while, and counts as used.
//!
//! A page that was found used is not disturbed for `2^(x-1)` windows, where `x` is its step. Then
//! its bit is cleared, and the window after that judges: used, it rises and rests again; not
//! used, it sinks and is judged again in the next window, since its bit is clear. Each
//! monitoring begins with steps of 0: a page that was hot and has cooled would else pass for hot
//! by a single use. The level goes up and down with the step, and stays.
//!
//! Pages that nobody uses are not told of, and cost nothing: how far they sank is reckoned
//! when they are seen again. Four bytes a page:
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
/// Windows of one monitoring that are counted, without the first, which only clears.
pub const WINDOWS_MAX: u8 = 250;
/// What the queue keeps of each page.
pub const BYTES_PER_PAGE: usize = size_of::<Page>();

const LEVEL: u8 = 0b111;
const RESTS: u8 = 1 << 3;
const WROTE: u8 = 1 << 4;
/// Where the step stands.
const STEP: u32 = 5;

/// Windows of a monitoring in which a page was used.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Uses {
    /// Not written, as far as was seen.
    pub reads: u8,
    /// Written.
    pub writes: u8,
}

/// One page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Page {
    state: u8,
    /// At rest: when its bit is cleared. Else: the window that judges it next.
    due: u8,
    reads: u8,
    writes: u8,
}

/// All pages of a VM.
pub struct Levels {
    /// In order of frames.
    ram: Vec<FrameRange>,
    /// Those of all ranges, one behind the other.
    pages: Vec<Page>,
    window: u8,
    top_level: u8,
}

impl Levels {
    /// For the frames of `ram`, which are in order and apart; every page in level 0. With
    /// a `top_level` of 0 there is no queue: every page is looked at in every window.
    pub fn new(ram: &[FrameRange], top_level: u8) -> Levels {
        let count: u64 = ram.iter().map(|range| range.count).sum();
        Levels {
            ram: ram.to_vec(),
            pages: vec![Page::NEW; usize::try_from(count).unwrap_or(0)],
            window: 0,
            top_level: top_level.min(TOP_LEVEL),
        }
    }

    /// A monitoring begins: counts are zero, no page rests and rests are short again; levels
    /// stay. The round that follows clears every bit and counts nothing.
    pub fn begin(&mut self) {
        let window = self.window;
        self.pages.iter_mut().for_each(|page| page.begin(window));
        self.window = 0;
    }

    /// The next window begins. After [`WINDOWS_MAX`] none is counted.
    pub fn next_window(&mut self) {
        self.window = WINDOWS_MAX.min(self.window + 1);
    }

    /// The window, from 1 on; 0 is the round that clears.
    pub fn window(&self) -> u8 {
        self.window
    }

    /// The frames looked after.
    pub fn ram(&self) -> &[FrameRange] {
        &self.ram
    }

    /// What was counted so far of a page; nothing of one that is no RAM.
    pub fn uses(&self, gfn: Gfn) -> Uses {
        self.page(gfn).map_or(Uses::default(), |page| page.uses(self.window))
    }

    /// Its level, with how far it sank since it was seen last.
    pub fn level(&self, gfn: Gfn) -> u8 {
        self.page(gfn).map_or(0, |page| page.level_in(self.window))
    }

    /// Every page's count, in order of frames.
    pub fn all_uses(&self) -> impl Iterator<Item = (Gfn, Uses)> {
        let frames = self.ram.iter().flat_map(|range| range.frames());
        frames.zip(&self.pages).map(|(gfn, page)| (gfn, page.uses(self.window)))
    }

    /// The counts and levels of each range's pages.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (Gfn, impl Iterator<Item = (Uses, u8)>)> {
        let mut rest = &self.pages[..];
        self.ram.iter().map(move |range| {
            let (pages, others) = rest.split_at(rest.len().min(range.count as usize));
            rest = others;
            let window = self.window;
            (range.start, pages.iter().map(move |page| (page.uses(window), page.level_in(window))))
        })
    }

    /// What the queue itself takes.
    pub fn bytes(&self) -> u64 {
        (self.pages.len() * BYTES_PER_PAGE) as u64
    }

    fn page(&self, gfn: Gfn) -> Option<&Page> {
        self.pages.get(self.index(gfn)?)
    }

    fn index(&self, gfn: Gfn) -> Option<usize> {
        let mut before = 0;
        // A handful of ranges.
        for range in &self.ram {
            if range.contains(gfn) {
                return usize::try_from(before + (gfn.0 - range.start.0)).ok();
            }
            before += range.count;
        }
        None
    }

    /// Where the pages of a run of frames are: as far as they lie in the range of the first.
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
        let told = |mut page: Page| page.saw(self.window, Access::Read, self.top_level);
        pages.unwrap_or_default().iter().any(|page| told(*page) == Verdict::Clear)
    }

    /// One page that is due is enough for all that share its bit.
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

    fn rests(self) -> bool {
        self.state & RESTS != 0
    }

    fn begin(&mut self, window: u8) {
        *self = Page { state: self.level_in(window), ..Page::NEW };
    }

    /// At the end of a window.
    fn level_in(self, window: u8) -> u8 {
        // Judged in every window since, and in none of them used. One at rest was not judged.
        let unused = match self.rests() {
            true => window.saturating_sub(self.due),
            false => (window + 1).saturating_sub(self.due),
        };
        self.level().saturating_sub(unused)
    }

    fn saw(&mut self, window: u8, access: Access, top_level: u8) -> Verdict {
        if self.rests() && window < self.due {
            return Verdict::Leave;
        }
        if window < self.due {
            // By another entry, in the window in which it was cleared.
            return Verdict::Clear;
        }
        // Windows in which its table was not even read: nobody used it.
        self.sink(window - self.due);
        if self.rests() {
            // The bit is from before: it says nothing of this window.
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
        // Each window counts once, so it fits.
        *count = count.saturating_add(1 + rest);
        if step == 0 {
            self.judge_in(window + 1);
            return Verdict::Clear;
        }
        self.state = level | step << STEP | RESTS | wrote;
        self.due = window + rest;
        Verdict::Leave
    }

    fn judge_in(&mut self, window: u8) {
        self.state &= !(RESTS | WROTE);
        self.due = window;
    }

    fn sink(&mut self, levels: u8) {
        let [level, step] = [self.level(), self.step()].map(|level| level.saturating_sub(levels));
        self.state = (self.state & (RESTS | WROTE)) | level | step << STEP;
    }

    /// What was counted ahead of a rest that goes on does not count yet.
    fn uses(self, window: u8) -> Uses {
        let ahead = if self.rests() { self.due.saturating_sub(window) } else { 0 };
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

    /// What a page that is used in every window goes through.
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
        // Judged and at rest for 1, 2, 4, ... windows, cleared in the last of them.
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
        // A single use, of a page that was hot before, is not taken for many.
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
    fn what_is_no_ram_is_left_alone() {
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
