//! Keeping a VM's resident memory below a limit.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_inspect::BuddyBlock;
use ebb_pager::{Evicted, Pager};
use ebb_sys::pagemap::Pagemap;
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn, Gpa, HugeFrame};

use crate::hand::Hand;
use crate::limit::is_no_room;
use crate::limit::judge::Known;
use crate::limit::marks::{Left, Marks};
use crate::limit::windows::Windows;

/// How long a liveness check of the guest's kernel holds where frames are chosen by its word.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// Shortest time between two sweeps for what the guest has freed, while nothing has to be evicted.
const SWEEP_EVERY: Duration = Duration::from_secs(2);
/// Words of the ledger after which a sweep ends.
const SWEEP_WORDS: u64 = 1 << 20;
/// Frames whose old content was dropped after which a sweep ends.
const SWEEP_DROPS: usize = 4096;
/// Longest time of a sweep.
const SWEEP: Duration = Duration::from_millis(5);
/// Most frames to evict before commands are looked at again.
const STEP_FRAMES: usize = 4096;
/// Steps without an eviction, because all chosen frames were in use, after which the limiter waits.
const FRUITLESS_STEPS: u32 = 8;
/// Most searches in a step while nothing found may be evicted.
const SEARCHES: usize = 8;
/// Pause after a search in vain, as a multiple of the time that the search took.
const VAIN_PAUSE: u32 = 4;
/// Longest pause after a search in vain.
const VAIN_PAUSE_MOST: Duration = Duration::from_secs(4);

/// What the limit of one VM needs to know of its frames.
pub struct Limiter {
    keeps_freed: bool,
    pagemap: Arc<Pagemap>,
    hand: Hand,
    asked_at: Option<Instant>,
    /// RAM that the VMM had not mapped at `asked_at`.
    unmapped: Vec<FrameRange>,
    fruitless: u32,
    /// When the current search began, in which nothing was evicted yet.
    began: Option<Instant>,
    /// The last search, if it was in vain and nothing was evicted since.
    vain: Option<Vain>,
    /// Why the store has no room. Meanwhile the limiter looks for frames that need none.
    no_room: Option<io::Error>,
    swept_at: Instant,
    /// The window at which the next sweep begins.
    sweeps: u64,
    /// Bytes that the guest took while the last step locked and saved frames. The next step makes
    /// room for them too.
    ahead_bytes: u64,
    /// An error of the last step for which it found another way.
    pub refused: Option<io::Error>,
    /// Frames evicted since this daemon manages the VM.
    pub total: Evicted,
}

impl Limiter {
    /// A limiter that knows nothing yet. `keeps_freed`: content of evicted frames stays in the
    /// store when the guest frees them.
    ///
    /// # Errors
    /// From open(2) of the VMM's pagemap.
    pub fn new(process: &Process, pager: &Pager, keeps_freed: bool) -> io::Result<Limiter> {
        Ok(Limiter {
            keeps_freed,
            pagemap: Arc::new(Pagemap::open(process)?),
            hand: Hand::new(pager.ram().end()),
            asked_at: None,
            unmapped: Vec::new(),
            fruitless: 0,
            began: None,
            vain: None,
            no_room: None,
            swept_at: Instant::now(),
            sweeps: 0,
            ahead_bytes: 0,
            refused: None,
            total: Evicted::default(),
        })
    }

    /// Whether the guest's kernel needs a liveness check before the next step, if `taken_bytes` are
    /// taken.
    pub fn asks(&self, marks: Marks, taken_bytes: u64) -> bool {
        let is_due = self.asked_at.is_none_or(|at| at.elapsed() > ASK_EVERY);
        is_due && !self.is_too_early(marks, taken_bytes)
    }

    /// Bytes taken above which the next search begins, if the last one was in vain.
    pub fn vain_mark(&self, marks: Marks) -> Option<u64> {
        let vain = self.vain.as_ref()?;
        Some(vain.taken_bytes.saturating_add(marks.high_bytes - marks.low_bytes))
    }

    /// Whether it is too early for the next search.
    fn is_too_early(&self, marks: Marks, taken_bytes: u64) -> bool {
        self.vain.as_ref().is_some_and(|vain| Instant::now() < vain.until)
            && self.vain_mark(marks).is_some_and(|mark| taken_bytes <= mark)
    }

    /// Whether the next step sweeps for what the guest has freed, with nothing to evict.
    pub fn is_sweep_due(&self, pager: &Pager) -> bool {
        let counters = &pager.counters();
        let evicted = [&counters.saved_frames, &counters.on_disk_frames];
        !self.keeps_freed
            && self.swept_at.elapsed() >= SWEEP_EVERY
            && evicted.iter().any(|frames| frames.load(Relaxed) > 0)
    }

    /// Bytes in active use by the VMM and its guest. `None`: not all of memory was looked at yet,
    /// since too little had to be evicted.
    pub fn active_bytes(&self) -> Option<u64> {
        self.hand.active_frames().map(|frames| frames * FRAME_BYTES)
    }

    /// Resident bytes of the guest kernel's own memory, as far as memory was looked at: less than
    /// all in the first turn, and never what was evicted.
    pub fn kernel_bytes(&self) -> u64 {
        self.hand.kernel_frames() * FRAME_BYTES
    }

    /// Why the store has no room, while the limiter looks for frames that need none.
    pub fn lacks_room(&self) -> Option<&io::Error> {
        self.no_room.as_ref()
    }

    /// The VMM's page table.
    pub fn pagemap(&self) -> Arc<Pagemap> {
        Arc::clone(&self.pagemap)
    }

    /// Drops the kept content of frames that the guest has freed, in the windows that come next: in
    /// at least one, and until `end`.
    fn sweep(&mut self, windows: &Windows<'_>, end: Instant) {
        self.swept_at = Instant::now();
        if self.keeps_freed || windows.of.guest.is_none() {
            return;
        }
        let count = windows.pager.ram().end().0.div_ceil(FRAMES_PER_HUGE).max(1);
        let (mut words, mut dropped) = (0, 0);
        for _ in 0..count {
            let found = windows.drop_freed(HugeFrame(self.sweeps % count));
            self.sweeps = (self.sweeps + 1) % count;
            words += if found.is_some() { FRAMES_PER_HUGE } else { 1 };
            dropped += found.unwrap_or(0);
            if words >= SWEEP_WORDS || dropped >= SWEEP_DROPS || Instant::now() >= end {
                return;
            }
        }
    }

    /// Notes that nothing has to be evicted.
    pub fn end_search(&mut self) {
        (self.ahead_bytes, self.no_room, self.vain) = (0, None, None);
        self.begin_anew();
    }

    /// Has the next search pass all of memory.
    fn begin_anew(&mut self) {
        (self.fruitless, self.began) = (0, None);
        self.hand.begin_anew();
    }

    /// Evicts a step, while more than the low mark is taken. Looks for frames to evict until `end`
    /// at most.
    ///
    /// # Errors
    /// From the store or the system calls; frames not evicted stay resident.
    pub fn step(
        &mut self,
        windows: &mut Windows<'_>,
        marks: Marks,
        end: Instant,
    ) -> io::Result<Left> {
        let pager = windows.pager;
        let taken = pager.residency().taken_bytes()?;
        let over = taken.saturating_sub(marks.low_bytes);
        if over == 0 {
            self.end_search();
            self.sweep(windows, Instant::now() + SWEEP);
            return Ok(Left::Nothing);
        }
        if self.is_too_early(marks, taken) {
            return Ok(Left::Nothing);
        }
        let began = *self.began.get_or_insert_with(Instant::now);
        // In whole huge frames, which are evicted as such.
        let ahead = self.ahead_bytes.min(2 * (marks.high_bytes - marks.low_bytes));
        let want = (over + ahead).div_ceil(FRAME_BYTES).next_multiple_of(FRAMES_PER_HUGE) as usize;
        let asks = self.asks(marks, taken);
        if asks {
            self.asked_at = Some(Instant::now());
            self.unmapped = unmapped(pager)?;
        }
        let (frames, free) = self.choose(windows, want.min(STEP_FRAMES), end)?;
        if asks {
            self.sweep(windows, Instant::now() + SWEEP);
        }
        let known = Known::new(windows.of, pager, &free);
        let evicted = pager.evictor().evict(&frames, &known);
        let left = pager.residency().taken_bytes()?;
        // Even if the eviction failed, some frames may have been evicted.
        let any = left < taken || evicted.as_ref().is_ok_and(|evicted| evicted.frames() > 0);
        let is_more = self.is_more(frames.len(), any);
        match evicted {
            Ok(evicted) => {
                self.total.add(evicted);
                self.ahead_bytes = (left + evicted.frames() * FRAME_BYTES).saturating_sub(taken);
                match self.no_room.take_if(|_| !is_more) {
                    Some(error) => Err(error),
                    None if is_more => Ok(self.more()),
                    None => {
                        let pause = (began.elapsed() * VAIN_PAUSE).min(VAIN_PAUSE_MOST);
                        let until = Instant::now() + pause;
                        self.vain = Some(Vain { until, taken_bytes: left });
                        Ok(Left::Nothing)
                    }
                }
            }
            // Slots that are kept without need make room for those that are needed.
            Err(error) if is_no_room(&error) && pager.residency().give_up_kept(STEP_FRAMES) > 0 => {
                (self.refused, self.no_room) = (Some(error), None);
                Ok(Left::More)
            }
            Err(error) => self.go_without_room(error, is_more).map(|()| self.more()),
        }
    }

    fn more(&self) -> Left {
        if self.no_room.is_some() { Left::MoreWithoutRoom } else { Left::More }
    }

    /// Handles an error of a step. If the store lacks room, some frames may need none: the next
    /// steps look for those, in all of memory. Which frames these are is a guess that may be wrong.
    fn go_without_room(&mut self, error: io::Error, is_more: bool) -> io::Result<()> {
        let is_again = self.no_room.take().is_some();
        if !is_no_room(&error) || (is_again && !is_more) {
            return Err(error);
        }
        self.no_room = Some(error);
        if !is_again {
            self.begin_anew();
        }
        Ok(())
    }

    /// Whether to go on after a step that tried `tried` frames and evicted some (`any`) or none.
    /// All of memory is passed once, and is tried anew when there is need again.
    fn is_more(&mut self, tried: usize, any: bool) -> bool {
        self.fruitless += u32::from(tried > 0);
        let is_over = tried == 0 && self.hand.is_barren();
        let is_more = any || !(is_over || self.fruitless >= FRUITLESS_STEPS);
        if any || !is_more {
            self.begin_anew();
        }
        self.vain.take_if(|_| any);
        is_more
    }

    /// Returns the frames to evict next and the free blocks there, both in order of address.
    fn choose(
        &mut self,
        windows: &mut Windows<'_>,
        want: usize,
        end: Instant,
    ) -> io::Result<(Vec<Gfn>, Vec<BuddyBlock>)> {
        windows.begin(&self.unmapped, self.no_room.is_some());
        let mut frames = Vec::new();
        for _ in 0..SEARCHES {
            frames = self.hand.choose(windows, want, end)?;
            if !frames.is_empty() || self.hand.is_barren() || Instant::now() >= end {
                break;
            }
        }
        self.refused = self.hand.take_failure();
        frames.sort_unstable();
        Ok((frames, windows.take_free()))
    }

    /// Notes what the VMM has mapped, before somebody else empties its page table.
    ///
    /// # Errors
    /// From reading the pagemap.
    pub fn note_mapped(&mut self, pager: &Pager) -> io::Result<()> {
        for region in pager.ram().regions() {
            let range = region.hva_range();
            self.pagemap.mapped(range, |part| {
                let first = region.gpa.0 + (part.start.0 - range.start.0);
                self.hand.note_mapped(FrameRange::new(Gpa(first).gfn(), part.bytes / FRAME_BYTES));
            })?;
        }
        self.hand.note_all_forgotten(Instant::now());
        Ok(())
    }
}

/// A search that found nothing to evict.
struct Vain {
    /// Earliest time of the next search.
    until: Instant,
    /// Bytes taken after the search. If much more is taken, the next search does not wait.
    taken_bytes: u64,
}

/// The parts of RAM that the VMM has not mapped.
fn unmapped(pager: &Pager) -> io::Result<Vec<FrameRange>> {
    // No part of RAM in a single file can be unplugged.
    match pager.ram().files().len() {
        0 | 1 => Ok(Vec::new()),
        _ => pager.frames().unmapped(),
    }
}

#[cfg(test)]
mod tests;
