//! Windows ahead of a hand: which of them it has forgotten, and which broken up.

use std::io;
use std::time::Duration;

use ebb_units::{FRAMES_PER_HUGE, FrameRange, HugeFrame};

use super::{
    BREAK_AT_ONCE, FORGET_WINDOWS, Hand, HandMemory, LOOKS_LEAST, Piece, TURN, TURN_AT_REST,
};
use crate::cost::Work;

/// Time from forgetting a window to looking at it, about.
const LEAD: Duration = Duration::from_secs(1);
/// How many times as much is forgotten ahead if more than frames at rest had to be evicted.
const HASTE: usize = 8;
/// Shortest time between two forgettings: each stops a thread of the VMM.
pub(super) const FORGET_EVERY: Duration = Duration::from_millis(500);
/// Most ranges to forget at once: each is a system call.
pub(super) const FORGET_RANGES: usize = 64;
/// Fraction of its turn after which a window may be forgotten if it follows one that is forgotten.
const EARLY: (u32, u32) = (3, 4);

/// A window to forget.
pub(super) struct Due {
    index: usize,
    is_mapped: bool,
    /// Windows between the hand and the end of the last window before this one.
    ahead: usize,
}

impl Hand {
    /// Has windows forgotten ahead, so that the next ones to look at are ripe by then.
    pub(super) fn forget_ahead(&mut self, memory: &impl HandMemory, want: usize) -> io::Result<()> {
        let now = memory.now();
        let since = self.forgot_at.map(|at| now.duration_since(at));
        if since.is_some_and(|since| since < FORGET_EVERY) {
            return Ok(());
        }
        // At its recent speed, the hand looks at this many frames until what is forgotten now is
        // ripe.
        let intervals = since.map_or(0.0, |since| LEAD.as_secs_f64() / since.as_secs_f64());
        let goal = ((self.looked as f64 * intervals) as usize).max(want * LOOKS_LEAST);
        let (turn, goal) = match self.takes {
            Work::AtRest => (TURN_AT_REST, goal),
            Work::Recent | Work::Busy => (TURN, goal.saturating_mul(HASTE)),
        };
        let (due, ranges, lead) = self.due(memory, turn, goal)?;
        if self.takes > Work::AtRest {
            self.break_ahead(memory, &due);
        }
        // On failure, what is already known is enough to choose by.
        let mut left = memory.forget(&ranges).unwrap_or_else(|error| {
            self.failure = Some(error);
            0
        });
        // The stop may have taken a while.
        let now = memory.now();
        self.lead = lead;
        let (wanted, mut reached) = (due.len(), 0);
        for due in due {
            let frames = if due.is_mapped { FRAMES_PER_HUGE } else { 0 };
            if left < frames {
                // Continue here the next time.
                self.lead = due.ahead;
                break;
            }
            left -= frames;
            reached += 1;
            self.windows.end_turn(due.index, now);
        }
        let reached = if reached < wanted { reached } else { self.reach };
        self.reach = (2 * reached).clamp(FORGET_RANGES, FORGET_WINDOWS);
        (self.forgot_at, self.looked, self.takes, self.chosen) = (Some(now), 0, Work::AtRest, 0);
        Ok(())
    }

    /// Breaks up the least used windows among those to forget, for as much as had to be evicted of
    /// late. What of them is used is known when the hand arrives there.
    fn break_ahead(&mut self, memory: &impl HandMemory, due: &[Due]) {
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

    /// Returns the windows ahead of the hand to forget until `goal` frames are pending, their
    /// mapped ranges, and how far ahead they reach.
    pub(super) fn due(
        &mut self,
        memory: &impl HandMemory,
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
                // Before the mapped frames are seen, since the stop may not get to this window.
                self.windows.look(index, now);
                let is_mapped = self.note_mapped_in(memory, index)?;
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
}
