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

use crate::choice::{Choice, Whole};
use crate::cost::{Page, Used, Work};

/// What was used before its window was forgotten had no time to be used again before this.
const RIPE: Duration = Duration::from_millis(300);
/// What is forgotten is to be looked at about so much later.
const LEAD: Duration = Duration::from_secs(1);
/// A turn of a window takes so long at least: it costs the guest a minor fault for each frame that it
/// works with there.
const TURN: Duration = Duration::from_millis(2500);
/// Where little of a window was found to be unused its turns are longer, by a power of two up to this.
const PATIENCE_MOST: u8 = 2;
/// Little and much is one in so many.
const LITTLE: usize = 8;
const MUCH: usize = 2;
/// A turn where nothing but what rests had to go.
const TURN_AT_REST: Duration = Duration::from_secs(32);
/// If more than that had to go, so many times as much is forgotten ahead.
const HASTE: usize = 8;
/// To forget stops a thread of the VMM: so often at most,
const FORGET_EVERY: Duration = Duration::from_millis(500);
/// and so many windows at once.
const FORGET_WINDOWS: usize = 4096;
/// For each frame that is to go so many are looked at, to have a choice,
const LOOKS_LEAST: usize = 4;
/// and on average at most so many, where what rests is rare.
const LOOKS_MOST: usize = 16;
/// Looked at in one go, whatever is found.
const LOOKS_AT_ONCE: usize = 64 << 10;
/// What it takes to look at a window as such, in frames looked at.
const LOOKS_A_WINDOW: usize = 64;
/// In a frame's byte: it was seen mapped in this turn. The rest of the byte are the turns before this
/// one that it rested.
const SEEN: u8 = 1 << 7;

/// The memory that a hand goes around.
pub trait Memory {
    /// The first window from this one on that has frames in memory.
    fn next(&self, from: HugeFrame) -> Option<HugeFrame>;

    /// Tells what the VMM has mapped of a window.
    ///
    /// # Errors
    /// As reading its page table.
    fn mapped(&self, window: HugeFrame, saw: &mut dyn FnMut(FrameRange)) -> io::Result<()>;

    /// Takes ranges out of the VMM's page table.
    ///
    /// # Errors
    /// As having the VMM make a system call.
    fn forget(&self, ranges: &[FrameRange]) -> io::Result<()>;

    /// Tells what those frames of a window are that are in memory, in order.
    fn look(&mut self, window: HugeFrame, saw: &mut dyn FnMut(Gfn, Page));

    /// Whether a frame that was looked at may go.
    fn may_go(&self, gfn: Gfn) -> bool;
}

/// A window, as it was last looked at.
#[derive(Clone, Copy, Default)]
struct Window {
    /// `None`: never.
    forgotten: Option<Instant>,
    /// Frames in memory.
    there: u16,
    active: u16,
    kernel: u16,
    /// Counted as forgotten and not looked at since, with so many frames.
    pending: u16,
    /// Its turn is longer by this power of two.
    patience: u8,
}

/// A clock hand and what it has seen.
pub struct Hand {
    /// A byte a frame: [`SEEN`], and turns at rest.
    frames: Vec<u8>,
    windows: Vec<Window>,
    /// Frames that go whole, so many.
    unit: u64,
    /// The next window to look at,
    looks: usize,
    /// the next one to forget,
    forgets: usize,
    /// and how many windows that is ahead.
    lead: usize,
    /// Frames in windows that were forgotten, and not looked at since.
    pending: usize,
    forgot_at: Option<Instant>,
    /// Looked at since.
    looked: usize,
    /// What was chosen since is at work so much.
    takes: Work,
    /// So many may be looked at more, by what was chosen.
    credit: usize,
    /// Windows passed since something went, and in all; up to one round.
    barren: usize,
    passed: usize,
    active: u64,
    kernel: u64,
}

impl Hand {
    /// For frames below `end`, which go in units of `unit`: 1, or those of a huge frame.
    pub fn new(end: Gfn, unit: u64) -> Hand {
        let windows = usize::try_from(end.0.div_ceil(FRAMES_PER_HUGE)).unwrap_or(0);
        Hand {
            frames: vec![1; windows * FRAMES_PER_HUGE as usize],
            windows: vec![Window::default(); windows],
            unit,
            looks: 0,
            forgets: 0,
            lead: 0,
            pending: 0,
            forgot_at: None,
            looked: 0,
            takes: Work::Rests,
            credit: 0,
            barren: 0,
            passed: 0,
            active: 0,
            kernel: 0,
        }
    }

    /// Frames that were used in the turn of their window, or the one before: what is at work, also
    /// where some of it was evicted since. An estimate in the first round; `None` before.
    pub fn active_frames(&self) -> Option<u64> {
        (self.passed > 0).then(|| self.of_all(self.active))
    }

    /// Frames in memory that the guest's kernel has for itself; counted the same way.
    pub fn kernel_frames(&self) -> u64 {
        self.of_all(self.kernel)
    }

    fn of_all(&self, frames: u64) -> u64 {
        let all = frames.saturating_mul(self.windows.len() as u64);
        all.checked_div(self.passed as u64).unwrap_or(0)
    }

    /// Whether all of memory was passed since something went, or since it was tried anew.
    pub fn is_barren(&self) -> bool {
        self.barren >= self.windows.len()
    }

    /// Something went, or it is tried anew.
    pub fn begin_anew(&mut self) {
        self.barren = 0;
    }

    /// The VMM has these frames mapped.
    pub fn saw_mapped(&mut self, frames: FrameRange) {
        see(&mut self.frames, frames);
    }

    /// Somebody else empties the VMM's page table now.
    pub fn is_emptied(&mut self, now: Instant) {
        for window in &mut self.windows {
            // What was mapped before was seen: the turn of the others goes on.
            window.forgotten.get_or_insert(now);
        }
    }

    /// Goes on until it has about `want` frames to evict, or was long enough at it. Those that
    /// cost least come first.
    ///
    /// # Errors
    /// From the memory.
    pub fn choose(
        &mut self,
        memory: &mut impl Memory,
        want: usize,
        now: Instant,
    ) -> io::Result<Vec<Gfn>> {
        self.forget_ahead(memory, want, now)?;
        let want = want.next_multiple_of(self.unit as usize);
        let least = want * LOOKS_LEAST;
        let most = (self.credit + want * LOOKS_MOST).min(LOOKS_AT_ONCE);
        let mut choice = Choice::new(self.unit);
        let (mut looked, mut passed) = (0, 0);
        while passed < self.windows.len()
            && looked < most
            && (choice.rest() < want || looked < least)
        {
            let Some((index, by)) = self.after(memory, self.looks) else {
                self.pass(self.windows.len());
                break;
            };
            passed += by;
            self.pass(by);
            looked += LOOKS_A_WINDOW + self.look(memory, index, now, &mut choice)?;
        }
        let mut chosen = Vec::new();
        for (frames, cost) in choice.cheapest(want, |gfn| memory.may_go(gfn)) {
            chosen.extend(frames.frames());
            self.takes = self.takes.max(cost.work);
            let start = frames.start.0 as usize;
            for byte in &mut self.frames[start..start + frames.count as usize] {
                // What comes back soon was at work, but for what is mostly used once.
                let turns = *byte & !SEEN;
                *byte = if cost.is_cache { turns.max(1) } else { turns };
            }
        }
        self.looked += looked;
        let credit = (self.credit + chosen.len() * LOOKS_MOST).saturating_sub(looked);
        self.credit = credit.min(LOOKS_AT_ONCE);
        Ok(chosen)
    }

    /// The next window with memory from this one on, around, and how many windows on that ends.
    fn after(&self, memory: &impl Memory, from: usize) -> Option<(usize, usize)> {
        let count = self.windows.len();
        let next = |from: usize| {
            let index = usize::try_from(memory.next(HugeFrame(from as u64))?.0).ok()?;
            (from..count).contains(&index).then_some(index)
        };
        match next(from) {
            Some(index) => Some((index, index + 1 - from)),
            None => next(0).map(|index| (index, count - from + index + 1)),
        }
    }

    /// Goes on by so many windows.
    fn pass(&mut self, by: usize) {
        let count = self.windows.len();
        self.looks = (self.looks + by) % count.max(1);
        self.lead = self.lead.saturating_sub(by);
        if self.lead == 0 {
            self.forgets = self.looks;
        }
        self.barren = (self.barren + by).min(count);
        self.passed = (self.passed + by).min(count);
    }

    /// Looks at a window; how many of its frames are in memory.
    fn look(
        &mut self,
        memory: &mut impl Memory,
        index: usize,
        now: Instant,
        choice: &mut Choice,
    ) -> io::Result<usize> {
        let (window, huge) = (self.windows[index], HugeFrame(index as u64));
        let start = index * FRAMES_PER_HUGE as usize;
        let bytes = &mut self.frames[start..start + FRAMES_PER_HUGE as usize];
        let mut mapped = [0; FRAMES_PER_HUGE as usize];
        memory.mapped(huge, &mut |frames| {
            let at = Gfn(frames.start.0.saturating_sub(huge.first().0));
            see(&mut mapped, FrameRange::new(at, frames.count));
        })?;
        bytes.iter_mut().zip(mapped).for_each(|(byte, mapped)| *byte |= mapped);
        let is_ripe = window.forgotten.is_some_and(|at| now.duration_since(at) >= RIPE);
        let (mut there, mut kernel, mut unused) = (0, 0, 0);
        let mut whole = Whole::default();
        memory.look(huge, &mut |gfn, page| {
            let at = gfn.index_in_huge();
            let used = used(bytes[at], is_ripe);
            there += 1;
            kernel += u16::from(is_kernel(page.kind));
            unused += u16::from(matches!(used, Used::Before | Used::Rests(_)));
            match (self.unit, page.cost(used)) {
                (1, Some(cost)) => choice.add(gfn, cost),
                (1, None) => {}
                (_, cost) => whole.add(cost),
            }
        });
        if let (true, Some(cost)) = (self.unit > 1, whole.cost()) {
            choice.add(huge.first(), cost);
        }
        let active = bytes.iter().filter(|byte| matches!(byte, 0 | SEEN..)).count() as u16;
        self.note(index, Window { there, active, kernel, ..window });
        if is_ripe && window.pending > 0 {
            self.judge(index, usize::from(there), usize::from(unused));
        }
        Ok(there.into())
    }

    /// Notes what was seen of a window.
    fn note(&mut self, index: usize, seen: Window) {
        let was = std::mem::replace(&mut self.windows[index], seen);
        self.active = self.active + u64::from(seen.active) - u64::from(was.active);
        self.kernel = self.kernel + u64::from(seen.kernel) - u64::from(was.kernel);
    }

    /// It was looked at for the first time since it was forgotten. Where that was of little use it
    /// is done less often.
    fn judge(&mut self, index: usize, there: usize, unused: usize) {
        let window = &mut self.windows[index];
        self.pending -= usize::from(std::mem::take(&mut window.pending));
        window.patience = match () {
            () if unused * LITTLE < there => (window.patience + 1).min(PATIENCE_MOST),
            () if unused * MUCH > there => window.patience.saturating_sub(1),
            () => window.patience,
        };
    }

    /// Has windows forgotten, so that the next ones to be looked at have had their time.
    fn forget_ahead(&mut self, memory: &impl Memory, want: usize, now: Instant) -> io::Result<()> {
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
        let mut ranges: Vec<FrameRange> = Vec::new();
        for _ in 0..FORGET_WINDOWS {
            if self.pending >= goal || self.lead >= self.windows.len() {
                break;
            }
            let Some((index, by)) = self.after(memory, self.forgets) else { break };
            self.lead += by;
            self.forgets = (index + 1) % self.windows.len();
            let window = self.windows[index];
            let turn = (turn * (1 << window.patience)).min(TURN_AT_REST);
            if window.forgotten.is_none_or(|at| now.duration_since(at) >= turn)
                && self.end_turn(memory, index, now)?
            {
                FrameRange::huge(HugeFrame(index as u64)).join(&mut ranges);
            }
        }
        (self.forgot_at, self.looked, self.takes) = (Some(now), 0, Work::Rests);
        memory.forget(&ranges)
    }

    /// A turn of a window ends, and the next one begins with nothing mapped; whether anything is.
    fn end_turn(&mut self, memory: &impl Memory, index: usize, now: Instant) -> io::Result<bool> {
        let huge = HugeFrame(index as u64);
        let mut any = false;
        memory.mapped(huge, &mut |frames| {
            any = true;
            see(&mut self.frames, frames);
        })?;
        let start = index * FRAMES_PER_HUGE as usize;
        for byte in &mut self.frames[start..start + FRAMES_PER_HUGE as usize] {
            *byte = if *byte & SEEN != 0 { 0 } else { (*byte + 1).min(!SEEN) };
        }
        let window = &mut self.windows[index];
        if window.pending == 0 {
            window.pending = window.there.max(LOOKS_A_WINDOW as u16);
            self.pending += usize::from(window.pending);
        }
        window.forgotten = Some(now);
        Ok(any)
    }
}

/// What a frame's byte tells.
fn used(byte: u8, is_ripe: bool) -> Used {
    match (byte & SEEN != 0, byte & !SEEN) {
        (true, 0) => Used::Often,
        (true, _) => Used::Now,
        (false, 0) if !is_ripe => Used::Now,
        (false, 0) => Used::Before,
        (false, turns) => Used::Rests(turns),
    }
}

fn is_kernel(kind: Option<PageKind>) -> bool {
    use PageKind::{Hugetlb, Other, Slab, Table};
    matches!(kind, Some(Table | Slab | Hugetlb | Other))
}

/// These frames are mapped; those beyond the end are none.
fn see(bytes: &mut [u8], frames: FrameRange) {
    let at = |gfn: Gfn| usize::try_from(gfn.0).unwrap_or(usize::MAX).min(bytes.len());
    let (start, end) = (at(frames.start), at(frames.end()));
    bytes[start..end].iter_mut().for_each(|byte| *byte |= SEEN);
}

#[cfg(test)]
mod tests;
