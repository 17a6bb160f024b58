//! A clock hand that goes around a VM's memory, and what it has seen.
//!
//! Memory is looked at by windows of a huge frame. Ahead of where it looks the hand has windows
//! *forgotten*: taken out of the VMM's page table. What is mapped again when the hand comes there was
//! used in between. That needs nothing of the guest and sees devices too. A window's *turn* goes from
//! one time that it is forgotten to the next.

use std::io;
use std::time::{Duration, Instant};

use ebb_inspect::PageKind;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn, HugeFrame};

use crate::choice::{Choice, Chosen, Whole};
use crate::cost::{Cost, Page, Work};
use windows::{Found, TURN_AT_REST, Windows};

/// What is forgotten is to be looked at about so much later.
const LEAD: Duration = Duration::from_secs(1);
/// A turn of a window takes so long at least: it costs the guest a minor fault for each frame that it
/// works with there.
const TURN: Duration = Duration::from_millis(2500);
/// If more than that had to go, so many times as much is forgotten ahead.
const HASTE: usize = 8;
/// To forget stops a thread of the VMM: so often at most,
const FORGET_EVERY: Duration = Duration::from_millis(500);
/// so many windows at once, and no more than twice as many as it got to the last time,
const FORGET_WINDOWS: usize = 4096;
/// in so many ranges: each is a system call.
const FORGET_RANGES: usize = 64;
/// In a row with one that is forgotten a window's turn may be shorter, by these parts of it.
const EARLY: (u32, u32) = (3, 4);
/// For each frame that is to go so many are looked at, to have a choice,
const LOOKS_LEAST: usize = 4;
/// and on average at most so many, where what rests is rare.
const LOOKS_MOST: usize = 16;
/// Windows that are broken up in one go: each is a system call in a thread of the VMM that is stopped.
const BREAK_AT_ONCE: usize = 64;
/// After that failed it is tried again so much later.
const BREAK_AGAIN: Duration = Duration::from_secs(8);
/// Looked at in one go, whatever is found.
const LOOKS_AT_ONCE: usize = 64 << 10;
/// What it takes to look at a window as such, in frames looked at.
const LOOKS_A_WINDOW: usize = 64;
/// The memory that a hand goes around.
pub trait Memory {
    /// What time it is.
    fn now(&self) -> Instant;

    /// The first window from this one on that has frames in memory.
    fn next(&self, from: HugeFrame) -> Option<HugeFrame>;

    /// Tells what the VMM has mapped of a window.
    ///
    /// # Errors
    /// As reading its page table.
    fn mapped(&self, window: HugeFrame, saw: &mut dyn FnMut(FrameRange)) -> io::Result<()>;

    /// Takes ranges out of the VMM's page table, as far as it gets at once; how many frames of them,
    /// from the first one on, that is.
    ///
    /// # Errors
    /// As having the VMM make a system call.
    fn forget(&self, ranges: &[FrameRange]) -> io::Result<u64>;

    /// Tells what those frames of a window are that are in memory, in order.
    fn look(&mut self, window: HugeFrame, saw: &mut dyn FnMut(Gfn, Page));

    /// Whether a frame that was looked at may go.
    fn may_go(&self, gfn: Gfn) -> bool;

    /// How a window's frames go.
    fn piece(&self, window: HugeFrame) -> Piece;

    /// Has the frames of these windows go one by one from now on.
    ///
    /// # Errors
    /// As having the VMM make a system call.
    fn break_up(&self, windows: &[HugeFrame]) -> io::Result<()>;
}

/// How the frames of a window go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Piece {
    /// One by one.
    Frames,
    /// Whole, until it is broken up.
    Breakable,
    /// Whole.
    Whole,
}

/// A clock hand and what it has seen.
pub struct Hand {
    windows: Windows,
    /// The next window to look at,
    looks: usize,
    /// and the windows from there on that need not be forgotten.
    lead: usize,
    forgot_at: Option<Instant>,
    /// So many windows may be forgotten the next time.
    reach: usize,
    /// Why something could not be forgotten or broken up.
    failure: Option<io::Error>,
    /// Nothing can be broken up: until then windows go whole.
    whole_until: Option<Instant>,
    /// Looked at since.
    looked: usize,
    /// What was chosen since is at work so much,
    takes: Work,
    /// and is so many frames.
    chosen: usize,
    /// So many may be looked at more, by what was chosen.
    credit: usize,
    /// Windows passed since something went, and in all; up to all of them.
    barren: usize,
    passed: usize,
}

impl Hand {
    /// For frames below `end`.
    pub fn new(end: Gfn) -> Hand {
        let windows = usize::try_from(end.0.div_ceil(FRAMES_PER_HUGE)).unwrap_or(0);
        Hand {
            windows: Windows::new(windows),
            looks: 0,
            lead: 0,
            forgot_at: None,
            reach: FORGET_WINDOWS,
            failure: None,
            whole_until: None,
            looked: 0,
            takes: Work::Rests,
            chosen: 0,
            credit: 0,
            barren: 0,
            passed: 0,
        }
    }

    /// Frames that were used in the turn of their window, or the one before: what is at work, also
    /// where some of it was evicted since. `None` before all of memory was passed.
    pub fn active_frames(&self) -> Option<u64> {
        (self.passed >= self.windows.count()).then(|| self.windows.active())
    }

    /// Frames in memory that the guest's kernel has for itself, as far as memory was passed.
    pub fn kernel_frames(&self) -> u64 {
        self.windows.kernel()
    }

    /// Whether all of memory was passed since something went, or since it was tried anew.
    pub fn is_barren(&self) -> bool {
        self.barren >= self.windows.count()
    }

    /// Something went, or it is tried anew.
    pub fn begin_anew(&mut self) {
        self.barren = 0;
    }

    /// Why something could not be forgotten or broken up, since it was last asked.
    pub fn take_failure(&mut self) -> Option<io::Error> {
        self.failure.take()
    }

    /// The VMM has these frames mapped.
    pub fn saw_mapped(&mut self, frames: FrameRange) {
        self.windows.see(frames);
    }

    /// Somebody else empties the VMM's page table now.
    pub fn is_emptied(&mut self, now: Instant) {
        self.windows.are_emptied(now);
    }

    /// Goes on until it has about `want` frames to evict, or was long enough at it: until `end` at
    /// most. Those that cost least come first.
    ///
    /// # Errors
    /// From the memory.
    pub fn choose(
        &mut self,
        memory: &mut impl Memory,
        want: usize,
        end: Instant,
    ) -> io::Result<Vec<Gfn>> {
        self.forget_ahead(memory, want)?;
        let now = memory.now();
        let least = want * LOOKS_LEAST;
        let most = (self.credit + want * LOOKS_MOST).min(LOOKS_AT_ONCE);
        let mut choice = Choice::new(want);
        let (mut looked, mut passed) = (0, 0);
        while passed < self.windows.count()
            && looked < most
            && (looked == 0 || memory.now() < end)
            && (!choice.is_full() || looked < least)
        {
            let Some((_, by)) = self.after(memory, self.looks) else {
                self.pass(self.windows.count(), now);
                break;
            };
            // The last one of them is looked at.
            self.pass(by - 1, now);
            passed += by;
            looked += LOOKS_A_WINDOW + self.look(memory, now, &mut choice)?;
        }
        let mut found = choice.cheapest(|gfn| memory.may_go(gfn));
        if !found.to_break.is_empty() {
            looked += self.break_up(memory, now, &mut found)?;
        }
        let mut chosen = Vec::new();
        for (frames, cost) in found.go {
            chosen.extend(frames.frames());
            self.takes = self.takes.max(cost.work);
            self.windows.go(frames, cost.is_cache);
        }
        (self.looked, self.chosen) = (self.looked + looked, self.chosen + chosen.len());
        let credit = (self.credit + chosen.len() * LOOKS_MOST).saturating_sub(looked);
        self.credit = credit.min(LOOKS_AT_ONCE);
        Ok(chosen)
    }

    /// The next window with memory from this one on, around, and how many windows on that ends.
    fn after(&self, memory: &impl Memory, from: usize) -> Option<(usize, usize)> {
        let count = self.windows.count();
        let next = |from: usize| {
            let index = usize::try_from(memory.next(HugeFrame(from as u64))?.0).ok()?;
            (from..count).contains(&index).then_some(index)
        };
        match next(from) {
            Some(index) => Some((index, index + 1 - from)),
            None => next(0).map(|index| (index, count - from + index + 1)),
        }
    }

    /// Goes on over so many windows of which nothing is in memory.
    fn pass(&mut self, by: usize, now: Instant) {
        for _ in 0..by {
            self.windows.pass(self.looks);
            self.windows.is_away(self.looks, now);
            self.step();
        }
    }

    /// Goes on by a window.
    fn step(&mut self) {
        let count = self.windows.count();
        self.looks = (self.looks + 1) % count;
        self.lead = self.lead.saturating_sub(1);
        debug_assert!(self.lead > 0 || self.windows.pending() == 0, "what is pending lies ahead");
        self.barren = (self.barren + 1).min(count);
        self.passed = (self.passed + 1).min(count);
    }

    /// Looks at the next window; how many of its frames are in memory.
    fn look(
        &mut self,
        memory: &mut impl Memory,
        now: Instant,
        choice: &mut Choice,
    ) -> io::Result<usize> {
        let index = self.looks;
        self.windows.pass(index);
        self.step();
        self.windows.look(index, now);
        self.see_mapped(memory, index)?;
        let is_ripe = self.windows.is_ripe(index, now);
        let found = self.collect(memory, index, is_ripe, choice);
        self.windows.looked(index, found, is_ripe);
        Ok(found.there.into())
    }

    /// What of a window may go, and what it costs.
    fn collect(
        &self,
        memory: &mut impl Memory,
        index: usize,
        is_ripe: bool,
        choice: &mut Choice,
    ) -> Found {
        let huge = HugeFrame(index as u64);
        let piece = match memory.piece(huge) {
            Piece::Breakable if self.is_whole(memory.now()) => Piece::Whole,
            piece => piece,
        };
        let mut found = Found::default();
        let mut frames = Vec::new();
        memory.look(huge, &mut |gfn, page| {
            let uses = self.windows.uses(gfn, is_ripe);
            found.there += 1;
            found.kernel += u16::from(is_kernel(page.kind));
            found.unused += u16::from(!uses.is_now());
            frames.extend(page.cost(uses).map(|cost| (gfn, cost)));
        });
        if piece == Piece::Frames {
            for (gfn, cost) in frames {
                choice.add(FrameRange::new(gfn, 1), cost, |gfn| memory.may_go(gfn));
            }
            return found;
        }
        let may_go = frames.into_iter().filter(|(gfn, _)| memory.may_go(*gfn));
        let whole = Whole::new(may_go.map(|(_, cost)| cost).collect());
        // What nobody used in its turn goes whole: a huge page says no more than that. One that is
        // used has parts that are not, as far as anybody knows.
        let is_used = found.unused < found.there;
        let goes_whole =
            |cost: &Cost| piece == Piece::Whole || cost.work == Work::Rests || !is_used;
        match (whole.cost().filter(goes_whole), whole.average()) {
            (Some(cost), _) => choice.add(FrameRange::huge(huge), cost, |_| true),
            (None, Some((average, can_go))) if piece == Piece::Breakable => {
                choice.may_break(huge, average, can_go);
            }
            _ => {}
        }
        found
    }

    /// Has windows broken up, and looks at their frames for those that are missing; how many it
    /// looked at. Where that fails nothing of them goes.
    fn break_up(
        &mut self,
        memory: &mut impl Memory,
        now: Instant,
        found: &mut Chosen,
    ) -> io::Result<usize> {
        found.to_break.truncate(BREAK_AT_ONCE);
        if let Err(error) = memory.break_up(&found.to_break) {
            self.fails_to_break(error, memory.now());
            return Ok(0);
        }
        let (mut choice, mut looked) = (Choice::new(found.missing), 0);
        for index in found.to_break.iter().map(|window| window.0 as usize) {
            self.windows.break_up(index);
            let is_ripe = self.windows.is_ripe(index, now);
            looked += usize::from(self.collect(memory, index, is_ripe, &mut choice).there);
        }
        // What else of them is at work is known the next time.
        let rests = { choice.cheapest(|gfn| memory.may_go(gfn)).go.into_iter() }
            .filter(|(_, cost)| cost.work == Work::Rests);
        found.go.extend(rests);
        Ok(looked)
    }

    /// Has windows forgotten, so that the next ones to be looked at have had their time.
    fn forget_ahead(&mut self, memory: &impl Memory, want: usize) -> io::Result<()> {
        let now = memory.now();
        let since = self.forgot_at.map(|at| now.duration_since(at));
        if since.is_some_and(|since| since < FORGET_EVERY) {
            return Ok(());
        }
        // At the pace of late the hand looks at so many frames until what is forgotten now is ripe.
        let pace = since.map_or(0.0, |since| LEAD.as_secs_f64() / since.as_secs_f64());
        let goal = ((self.looked as f64 * pace) as usize).max(want * LOOKS_LEAST);
        let (turn, goal) = match self.takes {
            Work::Rests => (TURN_AT_REST, goal),
            Work::Recent | Work::Busy => (TURN, goal.saturating_mul(HASTE)),
        };
        let (due, ranges, lead) = self.due(memory, turn, goal)?;
        if self.takes > Work::Rests {
            self.break_ahead(memory, &due);
        }
        // What is known of old is enough to choose by.
        let mut left = memory.forget(&ranges).unwrap_or_else(|error| {
            self.failure = Some(error);
            0
        });
        // It may have taken a while.
        let now = memory.now();
        self.lead = lead;
        let (wanted, mut reached) = (due.len(), 0);
        for due in due {
            let frames = if due.is_mapped { FRAMES_PER_HUGE } else { 0 };
            if left < frames {
                // The next time.
                self.lead = due.ahead;
                break;
            }
            left -= frames;
            reached += 1;
            self.windows.end_turn(due.index, now);
        }
        let reached = if reached < wanted { reached } else { self.reach };
        self.reach = (2 * reached).clamp(FORGET_RANGES, FORGET_WINDOWS);
        (self.forgot_at, self.looked, self.takes, self.chosen) = (Some(now), 0, Work::Rests, 0);
        Ok(())
    }

    /// Of windows that are to be forgotten those are broken up that are used least, for as much as
    /// had to go of late: what of them is used is known when the hand comes there.
    fn break_ahead(&mut self, memory: &impl Memory, due: &[Due]) {
        if self.is_whole(memory.now()) {
            return;
        }
        let may_break = |index: &usize| memory.piece(HugeFrame(*index as u64)) == Piece::Breakable;
        let mut windows: Vec<usize> = due.iter().map(|due| due.index).filter(may_break).collect();
        windows.sort_by_cached_key(|index| self.windows.likelihood(*index));
        windows.truncate(self.chosen.div_ceil(FRAMES_PER_HUGE as usize).min(BREAK_AT_ONCE));
        let huge: Vec<HugeFrame> = windows.iter().map(|index| HugeFrame(*index as u64)).collect();
        if huge.is_empty() {
            return;
        }
        match memory.break_up(&huge) {
            Ok(()) => windows.into_iter().for_each(|index| self.windows.break_up(index)),
            Err(error) => self.fails_to_break(error, memory.now()),
        }
    }

    /// For a while windows go whole.
    fn fails_to_break(&mut self, error: io::Error, now: Instant) {
        (self.failure, self.whole_until) = (Some(error), Some(now + BREAK_AGAIN));
    }

    fn is_whole(&self, now: Instant) -> bool {
        self.whole_until.is_some_and(|until| now < until)
    }

    /// Windows ahead of the hand that are to be forgotten until so many frames are, what of them is
    /// mapped, and how far ahead all that is.
    fn due(
        &mut self,
        memory: &impl Memory,
        turn: Duration,
        goal: usize,
    ) -> io::Result<(Vec<Due>, Vec<FrameRange>, usize)> {
        let (now, count) = (memory.now(), self.windows.count());
        let (mut lead, mut pending) = (self.lead, self.windows.pending());
        let (mut due, mut ranges): (Vec<Due>, Vec<FrameRange>) = (Vec::new(), Vec::new());
        for _ in 0..FORGET_WINDOWS {
            let from = (self.looks + lead) % count.max(1);
            let Some((index, by)) = self.after(memory, from) else { break };
            let is_full = ranges.len() >= FORGET_RANGES || due.len() >= self.reach;
            if pending >= goal || lead + by > count || is_full {
                break;
            }
            let window = FrameRange::huge(HugeFrame(index as u64));
            let is_in_row = ranges.last().is_some_and(|range| range.end() == window.start);
            let turn = if is_in_row { turn * EARLY.0 / EARLY.1 } else { turn };
            if self.windows.is_due(index, turn, now) {
                // Before what is mapped is seen, as the stop may not get there.
                self.windows.look(index, now);
                let is_mapped = self.see_mapped(memory, index)?;
                due.push(Due { index, is_mapped, ahead: lead });
                pending += self.windows.to_look_at(index);
                if is_mapped {
                    window.join(&mut ranges);
                }
            }
            lead += by;
        }
        Ok((due, ranges, lead))
    }

    /// Sees what of a window is mapped; whether anything is.
    fn see_mapped(&mut self, memory: &impl Memory, index: usize) -> io::Result<bool> {
        let mut any = false;
        memory.mapped(HugeFrame(index as u64), &mut |frames| {
            any = true;
            self.windows.see(frames);
        })?;
        Ok(any)
    }
}

/// A window that is to be forgotten.
struct Due {
    index: usize,
    is_mapped: bool,
    /// So many windows lie between the hand and the last one before this one.
    ahead: usize,
}

fn is_kernel(kind: Option<PageKind>) -> bool {
    use PageKind::{Hugetlb, Other, Slab, Table};
    matches!(kind, Some(Table | Slab | Hugetlb | Other))
}

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;
mod windows;
