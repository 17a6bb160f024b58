//! Holding a VM's resident memory at a limit.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_inspect::Block;
use ebb_pager::{Evicted, Pager};
use ebb_sys::pagemap::Pagemap;
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn, Gpa, HugeFrame};

use crate::hand::Hand;
use crate::limit::is_no_room;
use crate::limit::judge::Known;
use crate::limit::marks::{Left, Marks};
use crate::limit::windows::Windows;

/// What the guest's kernel said of itself holds for so long where frames are chosen by its word.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// What the guest has freed is looked for so often where nothing is to be evicted.
const SWEEP_EVERY: Duration = Duration::from_secs(2);
/// So many words of the ledger are looked at for that in a go,
const SWEEP_WORDS: u64 = 1 << 20;
/// until the old content of so many frames was dropped,
const SWEEP_DROPS: usize = 4096;
/// or for so long.
const SWEEP: Duration = Duration::from_millis(5);
/// Evicted before commands are looked at again.
const STEP_FRAMES: usize = 4096;
/// After so many steps of which nothing went, all that was chosen being in use, it waits.
const FRUITLESS_STEPS: u32 = 8;
/// So often it is looked further in a step, where nothing may go.
const SEARCHES: usize = 8;
/// A search in vain is not begun again for so many times as long as it took,
const VAIN_PAUSE: u32 = 4;
/// but for no longer than this.
const VAIN_PAUSE_MOST: Duration = Duration::from_secs(4);

/// What is known of one VM's frames for the sake of its limit.
pub struct Limiter {
    keeps_freed: bool,
    pagemap: Arc<Pagemap>,
    hand: Hand,
    asked_at: Option<Instant>,
    /// Of RAM the VMM had not mapped then.
    unmapped: Vec<FrameRange>,
    fruitless: u32,
    /// Since then it is looked for what may go, and nothing went.
    began: Option<Instant>,
    /// The last search, as long as nothing went since.
    vain: Option<Vain>,
    /// The store has no room: what goes without is looked for.
    no_room: Option<io::Error>,
    swept_at: Instant,
    /// Where the next sweep begins.
    sweeps: u64,
    /// What the guest took while the last step was held and saved: the next one makes
    /// room for it, too.
    ahead_bytes: u64,
    /// What failed in the last step, where that found another way.
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

    /// Whether the guest's kernel is to be asked whether it is the one that runs, before the next
    /// step, while that much is taken.
    pub fn asks(&self, marks: Marks, taken_bytes: u64) -> bool {
        let is_due = self.asked_at.is_none_or(|at| at.elapsed() > ASK_EVERY);
        is_due && !self.rests(marks, taken_bytes)
    }

    /// Nothing may go, as far as anybody knows: more taken than this, and it is looked for again.
    pub fn vain_mark(&self, marks: Marks) -> Option<u64> {
        let vain = self.vain.as_ref()?;
        Some(vain.taken_bytes.saturating_add(marks.high_bytes - marks.low_bytes))
    }

    /// Whether it is too early to look again for what may go.
    fn rests(&self, marks: Marks, taken_bytes: u64) -> bool {
        self.vain.as_ref().is_some_and(|vain| Instant::now() < vain.until)
            && self.vain_mark(marks).is_some_and(|mark| taken_bytes <= mark)
    }

    /// Whether the next step looks for what the guest has freed, with nothing to evict.
    pub fn is_sweep_due(&self, pager: &Pager) -> bool {
        let counters = &pager.counters();
        let elsewhere = [&counters.saved_frames, &counters.on_disk_frames];
        !self.keeps_freed
            && self.swept_at.elapsed() >= SWEEP_EVERY
            && elsewhere.iter().any(|frames| frames.load(Relaxed) > 0)
    }

    /// What the VMM and its guest work with; `None`: not all of memory was looked at yet, as too little
    /// had to be evicted.
    pub fn active_bytes(&self) -> Option<u64> {
        self.hand.active_frames().map(|frames| frames * FRAME_BYTES)
    }

    /// What the guest's kernel has in memory for itself, as far as memory was looked at: less than
    /// all of it in the first turn, and never what of it was evicted.
    pub fn kernel_bytes(&self) -> u64 {
        self.hand.kernel_frames() * FRAME_BYTES
    }

    /// What the store has no room for, while what needs none is looked for.
    pub fn lacks_room(&self) -> Option<&io::Error> {
        self.no_room.as_ref()
    }

    /// The VMM's page table.
    pub fn pagemap(&self) -> Arc<Pagemap> {
        Arc::clone(&self.pagemap)
    }

    /// Drops what is kept of frames that the guest has freed, in the windows whose turn it is: in one
    /// at least, and until `end`.
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

    /// Nothing has to go.
    pub fn rest(&mut self) {
        (self.ahead_bytes, self.no_room, self.vain) = (0, None, None);
        self.begin_anew();
    }

    /// The next search has all of memory before it.
    fn begin_anew(&mut self) {
        (self.fruitless, self.began) = (0, None);
        self.hand.begin_anew();
    }

    /// Evicts a step, as long as more than the low mark is resident. It looks for what may go until
    /// `end` at most.
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
            self.rest();
            self.sweep(windows, Instant::now() + SWEEP);
            return Ok(Left::Nothing);
        }
        if self.rests(marks, taken) {
            return Ok(Left::Nothing);
        }
        let began = *self.began.get_or_insert_with(Instant::now);
        // In whole huge frames, which go as such.
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
        let known = Known { of: windows.of, pager, free: &free };
        let evicted = pager.evictor().evict(&frames, &known);
        let left = pager.residency().taken_bytes()?;
        // Of those that had an error, too, some may have gone.
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
            // Who has a slot without need makes room for who needs one.
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

    /// A step had an error. Where the store lacks room there may be frames that need none: the
    /// next steps look for those, in all of memory. Which do is a guess, that may be wrong.
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

    /// Whether to go on after a step with so many frames, of which some went or none. All of
    /// memory is passed once, and is tried anew when there is need again.
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

    /// Chooses what is to go next, in order, and what is free there.
    fn choose(
        &mut self,
        windows: &mut Windows<'_>,
        want: usize,
        end: Instant,
    ) -> io::Result<(Vec<Gfn>, Vec<Block>)> {
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

    /// Takes note of what the VMM has mapped, before somebody else empties its page table.
    ///
    /// # Errors
    /// As reading the pagemap.
    pub fn see_mapped(&mut self, pager: &Pager) -> io::Result<()> {
        for region in pager.ram().regions() {
            let range = region.hva_range();
            self.pagemap.mapped(range, |part| {
                let first = region.gpa.0 + (part.start.0 - range.start.0);
                self.hand.saw_mapped(FrameRange::new(Gpa(first).gfn(), part.bytes / FRAME_BYTES));
            })?;
        }
        self.hand.is_emptied(Instant::now());
        Ok(())
    }
}

/// A search in which nothing was found that may go.
struct Vain {
    /// No use to look again before this,
    until: Instant,
    /// unless much more than this is taken.
    taken_bytes: u64,
}

/// What of RAM the VMM has not mapped.
fn unmapped(pager: &Pager) -> io::Result<Vec<FrameRange>> {
    // Of memory in one file nothing can leave.
    match pager.ram().files().len() {
        0 | 1 => Ok(Vec::new()),
        _ => pager.frames().unmapped(),
    }
}

#[cfg(test)]
mod tests;
