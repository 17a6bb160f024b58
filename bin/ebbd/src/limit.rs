//! Holding a VM's resident memory at a limit.

use std::io;
use std::time::{Duration, Instant};

use ebb_inspect::{Block, Guest, PageKind};
use ebb_ledger::Content;
use ebb_pager::{Evicted, Grain, Judge, NothingKnown, Pager};
use ebb_reclaim::aging::Aging;
use ebb_sys::pagemap::Pagemap;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn, Gpa};

use crate::injector;

/// Frames that rest are told from others by rounds of this length, at least.
const ROUND: Duration = Duration::from_secs(1);
/// A choice of victims is used up or given up after this.
const CHOICE: Duration = Duration::from_millis(500);
/// Chosen at once.
const CHOICE_FRAMES: usize = 16 << 10;
/// Evicted before commands are looked at again.
const STEP_FRAMES: usize = 4096;
/// Of the guest's free frames, so many are looked up after a choice, whether their old
/// content is still kept; of so many it is then dropped.
const SWEEP_FRAMES: usize = 256 << 10;
const SWEEP_DROPS: usize = 4096;
/// A sixteenth of the limit is kept free for what the guest touches next,
const GAP_PART: u64 = 16;
/// within these bounds.
const GAP_BYTES: std::ops::RangeInclusive<u64> = (4 << 20)..=(64 << 20);
/// What no kernel can do without: itself and the metadata of its memory.
const FLOOR_BYTES: u64 = 48 << 20;
const FLOOR_PART: u64 = 64;

/// The least limit for a VM of `memory_bytes` that its guest survives.
pub fn floor_bytes(memory_bytes: u64) -> u64 {
    FLOOR_BYTES + memory_bytes / FLOOR_PART
}

/// From here on the VM is under pressure, and down to there it is relieved.
pub fn marks(limit_bytes: u64) -> (u64, u64) {
    let gap = (limit_bytes / GAP_PART).clamp(*GAP_BYTES.start(), *GAP_BYTES.end());
    (limit_bytes.saturating_sub(gap / 2), limit_bytes.saturating_sub(gap))
}

/// What is known of one VM's frames for the sake of its limit.
pub struct Limiter {
    aging: Aging,
    pagemap: Pagemap,
    round: Option<Instant>,
    chosen: Vec<Gfn>,
    chosen_at: Instant,
    free: Vec<Block>,
    /// Where the next sweep begins.
    hand: Gfn,
    /// Evicted since this daemon holds the VM.
    pub total: Evicted,
}

impl Limiter {
    /// Nothing is known yet.
    ///
    /// # Errors
    /// As open(2) of the VMM's pagemap.
    pub fn new(process: &Process, pager: &Pager) -> io::Result<Limiter> {
        Ok(Limiter {
            aging: Aging::new(pager.ram().end()),
            pagemap: Pagemap::open(process)?,
            round: None,
            chosen: Vec::new(),
            chosen_at: Instant::now(),
            free: Vec::new(),
            hand: Gfn(0),
            total: Evicted::default(),
        })
    }

    /// Whether the next step looks at all frames anew.
    fn is_spent(&self) -> bool {
        self.chosen.is_empty() || self.chosen_at.elapsed() > CHOICE
    }

    /// Whether the next step asks the guest's kernel what its frames are.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn will_choose(&self, pager: &Pager, limit_bytes: u64) -> io::Result<bool> {
        Ok(self.is_spent() && excess_bytes(pager, limit_bytes)? > 0)
    }

    /// Evicts a step, if more than the mark is resident; `true`: there is more to
    /// do. `guest`: with a way to ask whether it still runs, right before its word
    /// is taken. `spare` names frames that stay.
    ///
    /// # Errors
    /// From the store or the system calls; frames not evicted stay resident.
    pub fn step(
        &mut self,
        process: &Process,
        pager: &Pager,
        guest: Option<(&Guest, &dyn Fn() -> bool)>,
        limit_bytes: u64,
        spare: impl Fn(Gfn) -> bool,
    ) -> io::Result<bool> {
        let over = excess_bytes(pager, limit_bytes)?;
        if over == 0 {
            return Ok(false);
        }
        if self.is_spent() {
            self.choose(process, pager, guest.map(|(guest, _)| guest), spare)?;
            if let Some((guest, still_runs)) = guest {
                let known = Known { guest, still_runs, pager, free: &self.free };
                self.hand = sweep(pager, &known, self.hand);
            }
        }
        // In whole huge frames, which have an order of their own in the choice.
        let want = over.div_ceil(FRAME_BYTES).next_multiple_of(FRAMES_PER_HUGE) as usize;
        let step = self.chosen.len().min(want).min(STEP_FRAMES);
        let mut frames = self.chosen.split_off(self.chosen.len() - step);
        frames.sort_unstable();
        let evicted = match guest {
            Some((guest, still_runs)) => {
                pager.evict(&frames, &Known { guest, still_runs, pager, free: &self.free })
            }
            None => pager.evict(&frames, &NothingKnown),
        };
        let evicted = match evicted {
            // Who has a slot without need makes room for who needs one.
            Err(_) if pager.give_up_clean(STEP_FRAMES)? > 0 => return Ok(true),
            evicted => evicted?,
        };
        self.total.add(evicted);
        Ok(evicted.frames() > 0)
    }

    fn choose(
        &mut self,
        process: &Process,
        pager: &Pager,
        guest: Option<&Guest>,
        spare: impl Fn(Gfn) -> bool,
    ) -> io::Result<()> {
        self.see_mapped(pager)?;
        if self.round.is_none_or(|round| round.elapsed() >= ROUND) {
            self.aging.next_round();
            let ranges: Vec<HvaRange> =
                pager.ram().regions().iter().map(|region| region.hva_range()).collect();
            injector::forget(process, &ranges)?;
            self.round = Some(Instant::now());
        }
        self.see_kinds(pager, guest);
        let extents = populated(pager);
        let is_there = |gfn: Gfn| {
            let after = extents.partition_point(|frames| frames.start <= gfn);
            after.checked_sub(1).is_some_and(|index| extents[index].contains(gfn))
        };
        let resident = |gfn: Gfn| {
            matches!(pager.ledger().content(gfn), Content::Resident | Content::Clean { .. })
        };
        let unit = match pager.grain() {
            Grain::Frame => 1,
            Grain::Huge => FRAMES_PER_HUGE,
        };
        let may_go = |gfn| is_there(gfn) && resident(gfn) && !spare(gfn);
        self.chosen = self.aging.choose(CHOICE_FRAMES, unit, may_go);
        // Taken from the end.
        self.chosen.reverse();
        self.chosen_at = Instant::now();
        Ok(())
    }

    fn see_mapped(&mut self, pager: &Pager) -> io::Result<()> {
        self.aging.look_anew();
        for region in pager.ram().regions() {
            let range = region.hva_range();
            self.pagemap.mapped(range, |part| {
                let first = region.gpa.0 + (part.start.0 - range.start.0);
                let frames = FrameRange::new(Gpa(first).gfn(), part.bytes / FRAME_BYTES);
                self.aging.saw_mapped(frames);
            })?;
        }
        Ok(())
    }

    fn see_kinds(&mut self, pager: &Pager, guest: Option<&Guest>) {
        self.aging.forget_kinds();
        self.free.clear();
        let Some(guest) = guest else { return };
        guest.memmap().kinds(&pager.view(), guest.layout(), |frames, kind| {
            self.aging.saw_kind(frames, kind);
            if let PageKind::Free { order } = kind {
                self.free.push(Block { head: frames.start, order });
            }
        });
    }
}

/// Drops what is kept of free frames, from `hand` on as far as one turn goes. Returns where
/// the next begins.
fn sweep(pager: &Pager, known: &Known<'_>, hand: Gfn) -> Gfn {
    let from = known.free.partition_point(|block| block.frames().end() <= hand);
    let frames = known.free[from..].iter().flat_map(|block| block.frames().frames());
    let (mut looked, mut dropped) = (0, 0);
    for gfn in frames.skip_while(|gfn| *gfn < hand) {
        if looked == SWEEP_FRAMES || dropped == SWEEP_DROPS {
            return gfn;
        }
        looked += 1;
        dropped += usize::from(pager.drop_if_free(gfn, known));
    }
    Gfn(0)
}

/// What is resident above the mark down to which is evicted.
fn excess_bytes(pager: &Pager, limit_bytes: u64) -> io::Result<u64> {
    let (_, goal) = marks(limit_bytes);
    Ok(pager.ram().resident_bytes()?.saturating_sub(goal))
}

fn populated(pager: &Pager) -> Vec<FrameRange> {
    let mut at = Gpa(0);
    std::iter::from_fn(|| {
        let (start, bytes) = pager.ram().next_populated(at)?;
        at = Gpa(start.0 + bytes);
        Some(FrameRange::new(start.gfn(), bytes / FRAME_BYTES))
    })
    .collect()
}

/// A trusted guest's word on its frames.
struct Known<'a> {
    guest: &'a Guest,
    /// `false` once it may have been reset.
    still_runs: &'a dyn Fn() -> bool,
    pager: &'a Pager,
    /// Free when the victims were chosen, in order of address.
    free: &'a [Block],
}

impl Judge for Known<'_> {
    fn is_dead(&self, gfn: Gfn) -> bool {
        let after = self.free.partition_point(|block| block.head <= gfn);
        let block = after.checked_sub(1).and_then(|index| self.free.get(index));
        let Some(block) = block.filter(|block| block.frames().contains(gfn)) else { return false };
        let now = self.guest.look(&self.pager.view()).head(block.head);
        // After the look: of a guest that was reset before it the look says nothing.
        now.is_some_and(|now| now.order >= block.order) && (self.still_runs)()
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        let found = self.guest.in_use(&self.pager.view(), frames);
        if (self.still_runs)() { found } else { vec![false; frames.len()] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_marks_lie_below_the_limit() {
        for limit in [64 << 20, 100 << 20, 1 << 30, 1u64 << 40] {
            let (high, low) = marks(limit);
            assert!(low < high && high < limit, "{limit}: {high}, {low}");
            assert!(low >= limit / 10 * 9, "{limit}: {low}");
        }
    }
}
