//! Holding a VM's resident memory at a limit.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_inspect::{Block, Guest, PageKind};
use ebb_ledger::Content;
use ebb_pager::{Evicted, Grain, Pager};
use ebb_reclaim::aging::{Aging, Choice};
use ebb_sys::pagemap::Pagemap;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn, Gpa};

use crate::injector;
use crate::judge::{Known, Sources, holding};
use crate::trouble::is_no_room;

/// Frames that rest are told from others by rounds: a new one begins once what rests is
/// used up, since each costs the guest a minor fault for every frame that it works with.
const ROUND_LEAST: Duration = Duration::from_secs(1);
const ROUND_MOST: Duration = Duration::from_secs(8);
/// A choice of victims is used up or given up after this.
const CHOICE: Duration = Duration::from_millis(500);
/// What the guest has freed is looked for so often where nothing is to be evicted.
const SWEEP_EVERY: Duration = Duration::from_secs(2);
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

/// A limit on the memory that a VM takes, its compressed pages included, and how it is
/// held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Marks {
    /// The limit.
    pub limit_bytes: u64,
    /// Above this the VM is under pressure: its faults wait.
    pub high_bytes: u64,
    /// Down to this it is relieved, under pressure or ahead of it.
    pub low_bytes: u64,
}

impl Marks {
    /// With the marks that were asked for, which are in order, and defaults for others.
    pub fn new(limit_bytes: u64, low_bytes: Option<u64>, high_bytes: Option<u64>) -> Marks {
        let gap = (limit_bytes / GAP_PART).clamp(*GAP_BYTES.start(), *GAP_BYTES.end());
        let below = |bytes: u64, part: u64| bytes.saturating_sub(gap / part);
        let high = match (high_bytes, low_bytes) {
            (Some(high), _) => high,
            (None, Some(low)) if low >= below(limit_bytes, 4) => limit_bytes,
            // What threads that see room bring together.
            _ => below(limit_bytes, 4),
        };
        Marks { limit_bytes, high_bytes: high, low_bytes: low_bytes.unwrap_or(below(high, 2)) }
    }

    /// Above which eviction begins, and above which faults wait: in between is what the
    /// guest takes while the first frames are held.
    pub fn pressure(self) -> (u64, u64) {
        (self.low_bytes.midpoint(self.high_bytes), self.high_bytes)
    }
}

/// What is known of one VM's frames for the sake of its limit.
pub struct Limiter {
    keeps_freed: bool,
    aging: Aging,
    /// Somebody else has emptied the VMM's page table since the round began.
    was_emptied: bool,
    pagemap: Pagemap,
    round: Option<Instant>,
    /// The next victims are at its end.
    chosen: Vec<Gfn>,
    /// So many of them, the last to go, are likely to be at work.
    at_work: usize,
    /// What rests is used up.
    at_work_goes: bool,
    chosen_at: Instant,
    swept_at: Instant,
    free: Vec<Block>,
    /// Where the next sweep begins.
    hand: Gfn,
    /// What the guest took while the last step was held and saved: the next one makes
    /// room for it, too.
    ahead_bytes: u64,
    /// What the last step was refused by the store, where it found another way.
    pub refused: Option<io::Error>,
    /// Evicted since this daemon holds the VM.
    pub total: Evicted,
}

impl Limiter {
    /// Nothing is known yet. `keeps_freed`: what the guest frees after it was evicted
    /// stays where it is.
    ///
    /// # Errors
    /// As open(2) of the VMM's pagemap.
    pub fn new(process: &Process, pager: &Pager, keeps_freed: bool) -> io::Result<Limiter> {
        Ok(Limiter {
            keeps_freed,
            aging: Aging::new(pager.ram().end()),
            was_emptied: false,
            pagemap: Pagemap::open(process)?,
            round: None,
            chosen: Vec::new(),
            at_work: 0,
            at_work_goes: false,
            chosen_at: Instant::now(),
            swept_at: Instant::now(),
            free: Vec::new(),
            hand: Gfn(0),
            ahead_bytes: 0,
            refused: None,
            total: Evicted::default(),
        })
    }

    /// Whether the next step looks at all frames anew, and so asks the guest's kernel
    /// what they are.
    pub fn is_spent(&self) -> bool {
        self.chosen.is_empty() || self.chosen_at.elapsed() > CHOICE
    }

    /// Whether the next step looks for what the guest has freed, with nothing to evict.
    pub fn is_sweep_due(&self, pager: &Pager) -> bool {
        let counters = &pager.counters;
        let elsewhere = [&counters.saved_frames, &counters.on_disk_frames];
        !self.keeps_freed
            && self.swept_at.elapsed() >= SWEEP_EVERY
            && elsewhere.iter().any(|frames| frames.load(Relaxed) > 0)
    }

    /// What the VMM and its guest work with; `None`: nothing had to be evicted yet, and so
    /// nobody looked.
    pub fn active_bytes(&self) -> Option<u64> {
        self.round.map(|_| self.aging.active_frames() * FRAME_BYTES)
    }

    /// What the guest's kernel has for itself, by the last look; 0: not known.
    pub fn kernel_bytes(&self) -> u64 {
        self.aging.kernel_frames() * FRAME_BYTES
    }

    /// Drops what is kept of frames that are free by what was seen last.
    fn sweep(&mut self, pager: &Pager, of: Sources<'_>) {
        self.swept_at = Instant::now();
        if of.guest.is_some() && !self.keeps_freed {
            let known = Known { of, pager, free: &self.free };
            self.hand = drop_free(pager, &known, self.hand);
        }
    }

    /// Evicts a step, as long as more than the low mark is resident; `true`: there is more to
    /// do. `of`: who knows what frames are. `spare` names frames that stay, `heat` tells how hot they are.
    ///
    /// # Errors
    /// From the store or the system calls; frames not evicted stay resident.
    pub fn step(
        &mut self,
        pager: &Pager,
        of: Sources<'_>,
        marks: Marks,
        spare: impl Fn(Gfn) -> bool,
        heat: impl Fn(Gfn) -> usize,
    ) -> io::Result<bool> {
        let taken = pager.taken_bytes()?;
        let over = taken.saturating_sub(marks.low_bytes);
        if over == 0 {
            self.ahead_bytes = 0;
            self.see_kinds(pager, of.guest.map(|(guest, _)| guest));
            self.sweep(pager, of);
            return Ok(false);
        }
        if self.is_spent() {
            self.choose(of.process, pager, of.guest.map(|(guest, _)| guest), spare, heat)?;
            self.sweep(pager, of);
        }
        // In whole huge frames, which have an order of their own in the choice.
        let ahead = self.ahead_bytes.min(2 * (marks.high_bytes - marks.low_bytes));
        let want = (over + ahead).div_ceil(FRAME_BYTES).next_multiple_of(FRAMES_PER_HUGE) as usize;
        let step = self.chosen.len().min(want).min(STEP_FRAMES);
        let mut frames = self.chosen.split_off(self.chosen.len() - step);
        self.at_work_goes |= self.chosen.len() < self.at_work;
        frames.sort_unstable();
        let evicted = pager.evict(&frames, &Known { of, pager, free: &self.free });
        let evicted = match evicted {
            // Who has a slot without need makes room for who needs one.
            Err(error) if is_no_room(&error) && pager.give_up_kept(STEP_FRAMES) > 0 => {
                self.refused = Some(error);
                return Ok(true);
            }
            evicted => evicted?,
        };
        self.total.add(evicted);
        self.ahead_bytes =
            (pager.taken_bytes()? + evicted.frames() * FRAME_BYTES).saturating_sub(taken);
        Ok(evicted.frames() > 0)
    }

    fn choose(
        &mut self,
        process: &Process,
        pager: &Pager,
        guest: Option<&Guest>,
        spare: impl Fn(Gfn) -> bool,
        heat: impl Fn(Gfn) -> usize,
    ) -> io::Result<()> {
        self.look_at_mapped(pager)?;
        let least = if self.at_work_goes { ROUND_LEAST } else { ROUND_MOST };
        if self.round.is_none_or(|round| round.elapsed() >= least) {
            self.aging.next_round();
            self.was_emptied = false;
            let ranges: Vec<HvaRange> =
                pager.ram().regions().map(|region| region.hva_range()).collect();
            injector::forget(process, &ranges)?;
            (self.round, self.at_work_goes) = (Some(Instant::now()), false);
        }
        self.see_kinds(pager, guest);
        let extents = populated(pager);
        let is_there = |gfn| holding(&extents, gfn, |frames| frames).is_some();
        let resident = |gfn: Gfn| {
            matches!(pager.ledger().content(gfn), Content::Resident | Content::Clean { .. })
        };
        let unit = match pager.grain() {
            Grain::Frame => 1,
            Grain::Huge => FRAMES_PER_HUGE,
        };
        // Of memory in one file nothing can leave.
        let unmapped = match pager.ram().files().len() {
            0 | 1 => Vec::new(),
            _ => pager.unmapped()?,
        };
        let is_mapped = |gfn| !unmapped.iter().any(|frames| frames.contains(gfn));
        let may_go = |gfn| is_there(gfn) && resident(gfn) && is_mapped(gfn) && !spare(gfn);
        let Choice { frames, at_rest } = self.aging.choose(CHOICE_FRAMES, unit, may_go, heat);
        (self.at_work, self.chosen) = (frames.len() - at_rest, frames);
        self.chosen.reverse();
        self.chosen_at = Instant::now();
        Ok(())
    }

    /// Takes note of what the VMM has mapped, before somebody else empties its page table.
    ///
    /// # Errors
    /// As reading the pagemap.
    pub fn see_mapped(&mut self, pager: &Pager) -> io::Result<()> {
        self.look_at_mapped(pager)?;
        self.was_emptied = true;
        Ok(())
    }

    fn look_at_mapped(&mut self, pager: &Pager) -> io::Result<()> {
        if !self.was_emptied {
            self.aging.look_anew();
        }
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
fn drop_free(pager: &Pager, known: &Known<'_>, hand: Gfn) -> Gfn {
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

/// What is taken above the mark down to which is evicted.
///
/// # Errors
/// As fstat(2).
pub fn excess_bytes(pager: &Pager, marks: Marks) -> io::Result<u64> {
    Ok(pager.taken_bytes()?.saturating_sub(marks.low_bytes))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_marks_lie_below_the_limit() {
        for limit in [64 << 20, 100 << 20, 1 << 30, 1u64 << 40] {
            let Marks { high_bytes: high, low_bytes: low, .. } = Marks::new(limit, None, None);
            assert!(low < high && high < limit, "{limit}: {high}, {low}");
            assert!(low >= limit / 10 * 9, "{limit}: {low}");
        }
    }

    #[test]
    fn marks_that_were_asked_for_are_kept_and_in_order() {
        let limit = 200 << 20;
        for (low, high) in [
            (Some(100 << 20), None),
            (Some(limit - 1), None),
            (None, Some(100 << 20)),
            (None, Some(limit)),
            (Some(100 << 20), Some(120 << 20)),
        ] {
            let marks = Marks::new(limit, low, high);
            assert!(marks.low_bytes < marks.high_bytes && marks.high_bytes <= limit, "{marks:?}");
            assert!(low.is_none_or(|low| low == marks.low_bytes), "{marks:?}");
            assert!(high.is_none_or(|high| high == marks.high_bytes), "{marks:?}");
        }
    }
}
