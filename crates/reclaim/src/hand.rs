//! A clock hand that goes around a VM's memory, and what it has seen.
//!
//! The hand looks at memory in windows of a huge frame. Ahead of itself it has windows *forgotten*:
//! taken out of the VMM's page table. A page that is mapped again when the hand arrives was used in
//! between. That needs nothing of the guest, and sees devices too. A window's *turn* lasts from one
//! forgetting of it to the next.

use std::io;
use std::time::{Duration, Instant};

use ebb_inspect::PageKind;
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn, HugeFrame};

use crate::choice::{Choice, Chosen, Whole};
use crate::cost::{Cost, Work};
pub use memory::{HandMemory, Piece};
use windows::{Found, TURN_AT_REST, Windows};

/// Shortest turn of a window. Each turn costs the guest a minor fault for each frame that it uses
/// there.
const TURN: Duration = Duration::from_millis(2500);
/// Most windows to forget at once. The limit is also twice what the last stop got to.
const FORGET_WINDOWS: usize = 4096;
/// Fewest frames to look at for each frame to evict, so that there is a choice.
const LOOKS_LEAST: usize = 4;
/// Most frames to look at for each evicted frame, on average, where frames at rest are rare.
const LOOKS_MOST: usize = 16;
/// Most windows to break up at once: each is a system call in a stopped thread of the VMM.
const BREAK_AT_ONCE: usize = 64;
/// Time after a failed breaking up until the next try.
const BREAK_AGAIN: Duration = Duration::from_secs(8);
/// Frames looked at after which a search ends, whatever it found.
const LOOKS_AT_ONCE: usize = 64 << 10;
/// Cost of looking at a window as such, in frames looked at.
const LOOKS_A_WINDOW: usize = 64;

/// A clock hand and what it has seen.
pub struct Hand {
    windows: Windows,
    /// Index of the next window to look at.
    looks: usize,
    /// Windows from `looks` on that need not be forgotten.
    lead: usize,
    forgot_at: Option<Instant>,
    /// Most windows to forget the next time.
    reach: usize,
    /// Why something could not be forgotten or broken up.
    failure: Option<io::Error>,
    /// Nothing can be broken up until then: windows are evicted whole.
    whole_until: Option<Instant>,
    /// Frames looked at since the last forgetting.
    looked: usize,
    /// How busy the busiest frame is that was chosen since the last forgetting.
    takes: Work,
    /// Frames chosen since the last forgetting.
    chosen: usize,
    /// Frames that may be looked at beyond the usual, earned by frames that were chosen.
    credit: usize,
    /// Windows passed since something was evicted, up to all of them.
    barren: usize,
    /// Windows passed in all, up to all of them.
    passed: usize,
}

impl Hand {
    /// A hand over the frames below `end`.
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
            takes: Work::AtRest,
            chosen: 0,
            credit: 0,
            barren: 0,
            passed: 0,
        }
    }

    /// Frames used in the current turn of their window, or in the one before. They count as in use
    /// even if they were evicted since. `None` before all of memory was passed.
    pub fn active_frames(&self) -> Option<u64> {
        (self.passed >= self.windows.count()).then(|| self.windows.active())
    }

    /// Resident frames of the guest kernel's own memory, as far as memory was passed.
    pub fn kernel_frames(&self) -> u64 {
        self.windows.kernel()
    }

    /// Whether all of memory was passed since something was evicted, or since the search began
    /// anew.
    pub fn is_barren(&self) -> bool {
        self.barren >= self.windows.count()
    }

    /// Begins the search anew, as after an eviction.
    pub fn begin_anew(&mut self) {
        self.barren = 0;
    }

    /// Returns why something could not be forgotten or broken up since the last call.
    pub fn take_failure(&mut self) -> Option<io::Error> {
        self.failure.take()
    }

    /// Notes that the VMM has these frames mapped.
    pub fn note_mapped(&mut self, frames: FrameRange) {
        self.windows.see(frames);
    }

    /// Notes that somebody else empties the VMM's page table now.
    pub fn note_all_forgotten(&mut self, now: Instant) {
        self.windows.note_all_forgotten(now);
    }

    /// Goes on until it has about `want` frames to evict, has looked at enough, or `end` has come.
    /// Returns the cheapest first.
    ///
    /// # Errors
    /// From the memory.
    pub fn choose(
        &mut self,
        memory: &mut impl HandMemory,
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
            // The last of these windows is looked at below.
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

    /// Returns the next window with resident frames from this one on, going around, and the
    /// distance from `from` to its end, in windows.
    fn after(&self, memory: &impl HandMemory, from: usize) -> Option<(usize, usize)> {
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

    /// Moves on over `by` windows without resident frames.
    fn pass(&mut self, by: usize, now: Instant) {
        for _ in 0..by {
            self.windows.pass(self.looks);
            self.windows.note_non_resident(self.looks, now);
            self.step();
        }
    }

    /// Moves on by a window.
    fn step(&mut self) {
        let count = self.windows.count();
        self.looks = (self.looks + 1) % count;
        self.lead = self.lead.saturating_sub(1);
        debug_assert!(self.lead > 0 || self.windows.pending() == 0, "what is pending lies ahead");
        self.barren = (self.barren + 1).min(count);
        self.passed = (self.passed + 1).min(count);
    }

    /// Looks at the next window. Returns how many of its frames are resident.
    fn look(
        &mut self,
        memory: &mut impl HandMemory,
        now: Instant,
        choice: &mut Choice,
    ) -> io::Result<usize> {
        let index = self.looks;
        self.windows.pass(index);
        self.step();
        self.windows.look(index, now);
        self.note_mapped_in(memory, index)?;
        let is_ripe = self.windows.is_ripe(index, now);
        let found = self.collect(memory, index, is_ripe, choice);
        self.windows.looked(index, found, is_ripe);
        Ok(found.resident.into())
    }

    /// Adds to the choice what of a window may be evicted, with its cost.
    fn collect(
        &self,
        memory: &mut impl HandMemory,
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
            found.resident += 1;
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
        // A huge page that nobody used in its turn is evicted whole: there is nothing more to know
        // of it. One that was used has unused parts, as far as anybody knows.
        let is_used = found.unused < found.resident;
        let goes_whole =
            |cost: &Cost| piece == Piece::Whole || cost.work == Work::AtRest || !is_used;
        match (whole.cost().filter(goes_whole), whole.average()) {
            (Some(cost), _) => choice.add(FrameRange::huge(huge), cost, |_| true),
            (None, Some((average, can_go))) if piece == Piece::Breakable => {
                choice.may_break(huge, average, can_go);
            }
            _ => {}
        }
        found
    }

    /// Has windows broken up, and looks in them for the missing frames. Returns how many frames it
    /// looked at. If breaking up fails, nothing of them is evicted.
    fn break_up(
        &mut self,
        memory: &mut impl HandMemory,
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
            looked += usize::from(self.collect(memory, index, is_ripe, &mut choice).resident);
        }
        // How busy the other frames are is known only the next time.
        let at_rest = { choice.cheapest(|gfn| memory.may_go(gfn)).go.into_iter() }
            .filter(|(_, cost)| cost.work == Work::AtRest);
        found.go.extend(at_rest);
        Ok(looked)
    }

    /// Has windows evicted whole for a while.
    fn fails_to_break(&mut self, error: io::Error, now: Instant) {
        (self.failure, self.whole_until) = (Some(error), Some(now + BREAK_AGAIN));
    }

    fn is_whole(&self, now: Instant) -> bool {
        self.whole_until.is_some_and(|until| now < until)
    }

    /// Notes which frames of a window are mapped. Returns whether any is.
    fn note_mapped_in(&mut self, memory: &impl HandMemory, index: usize) -> io::Result<bool> {
        let mut any = false;
        memory.mapped(HugeFrame(index as u64), &mut |frames| {
            any = true;
            self.windows.see(frames);
        })?;
        Ok(any)
    }
}

fn is_kernel(kind: Option<PageKind>) -> bool {
    use PageKind::{Hugetlb, Other, Slab, Table};
    matches!(kind, Some(Table | Slab | Hugetlb | Other))
}

mod ahead;
#[cfg(test)]
mod fake;
mod memory;
#[cfg(test)]
mod tests;
mod windows;
