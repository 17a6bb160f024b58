//! What a hand has seen of windows, and of the frames in them.

use std::time::{Duration, Instant};

use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn};

use super::LOOKS_A_WINDOW;
use crate::uses::Uses;

/// Shortest time from forgetting a window until it is ripe. Frames in use had no time to be used
/// again before.
pub const RIPE: Duration = Duration::from_millis(300);
/// Turn of a window while only frames at rest have to be evicted. No turn that ends for its age is
/// shorter.
pub const TURN_AT_REST: Duration = Duration::from_secs(32);
/// Greatest patience: turns of a window of which little was unused are longer by a power of two up
/// to this.
const PATIENCE_MOST: u8 = 2;
/// Little is less than one frame in this many.
const LITTLE: usize = 8;
/// Much is more than one frame in this many.
const MUCH: usize = 2;
/// Uses of a frame before anything was looked at. If it is not used soon, it is evicted before what
/// was seen in use.
const UNKNOWN: Uses = Uses::unused_for(3);

const FRAMES: usize = FRAMES_PER_HUGE as usize;

/// A window, as it was last looked at.
#[derive(Clone, Copy, Default)]
struct Window {
    /// When it was last forgotten; `None`: never.
    forgotten: Option<Instant>,
    /// Resident frames; all 512 while that is unknown.
    resident: u16,
    active: u16,
    kernel: u16,
    /// Frames for which it counts as forgotten and not passed since.
    pending: u16,
    /// Whether it is still to be judged if forgetting it was of use.
    is_new: bool,
    /// Power of two by which its turn is longer.
    patience: u8,
}

/// All windows, and sums over them.
pub struct Windows {
    frames: Vec<Uses>,
    each: Vec<Window>,
    pending: usize,
    active: u64,
    kernel: u64,
}

/// What was found in a window.
#[derive(Clone, Copy, Default)]
pub struct Found {
    /// Resident frames.
    pub resident: u16,
    /// Resident frames of the guest kernel's own memory.
    pub kernel: u16,
    /// Resident frames that were not used since the window was forgotten.
    pub unused: u16,
}

impl Windows {
    /// `count` windows of which nothing is known.
    pub fn new(count: usize) -> Windows {
        let window = Window { resident: FRAMES as u16, ..Window::default() };
        let (frames, each) = (vec![UNKNOWN; count * FRAMES], vec![window; count]);
        Windows { frames, each, pending: 0, active: 0, kernel: 0 }
    }

    /// Number of windows.
    pub fn count(&self) -> usize {
        self.each.len()
    }

    /// Frames in windows that were forgotten and not passed since.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Frames used in the current turn of their window, or in the one before.
    pub fn active(&self) -> u64 {
        self.active
    }

    /// Resident frames of the guest kernel's own memory.
    pub fn kernel(&self) -> u64 {
        self.kernel
    }

    /// Notes that these frames are mapped. Frames beyond the end are ignored.
    pub fn see(&mut self, frames: FrameRange) {
        let at = |gfn: Gfn| usize::try_from(gfn.0).unwrap_or(usize::MAX).min(self.frames.len());
        let (start, end) = (at(frames.start), at(frames.end()));
        self.frames[start..end].iter_mut().for_each(Uses::see);
    }

    /// Notes that somebody else empties the VMM's page table now.
    pub fn note_all_forgotten(&mut self, now: Instant) {
        for window in &mut self.each {
            // What was mapped before was seen: the turn of the other windows goes on.
            window.forgotten.get_or_insert(now);
        }
    }

    /// Whether a window's turn may end, if it is to last at least `turn`.
    pub fn is_due(&self, index: usize, turn: Duration, now: Instant) -> bool {
        let window = &self.each[index];
        let turn = (turn * (1 << window.patience)).min(TURN_AT_REST);
        window.forgotten.is_none_or(|at| now.duration_since(at) >= turn)
    }

    /// Cost of looking at a window, in frames.
    pub fn to_look_at(&self, index: usize) -> usize {
        usize::from(self.each[index].resident).max(LOOKS_A_WINDOW)
    }

    /// Ends a turn of a window. The next one begins with nothing mapped.
    pub fn end_turn(&mut self, index: usize, now: Instant) {
        self.uses_of(index).iter_mut().for_each(Uses::end_turn);
        let pending = self.to_look_at(index);
        let window = &mut self.each[index];
        debug_assert_eq!(window.pending, 0, "it is forgotten once, ahead of the hand");
        window.pending = pending as u16;
        self.pending += pending;
        (window.forgotten, window.is_new) = (Some(now), true);
    }

    /// Notes that the hand passes a window.
    pub fn pass(&mut self, index: usize) {
        self.pending -= usize::from(std::mem::take(&mut self.each[index].pending));
    }

    /// Notes that nothing of a window is resident. What was evicted of it counts as in use until
    /// its turn is over.
    pub fn note_non_resident(&mut self, index: usize, now: Instant) {
        let active = match self.is_due(index, TURN_AT_REST, now) {
            true => 0,
            false => self.each[index].active,
        };
        self.note(index, Found { resident: FRAMES as u16, ..Found::default() }, active);
    }

    /// Prepares a window to be looked at. What was evicted in use and comes back long after that
    /// counts as used once.
    pub fn look(&mut self, index: usize, now: Instant) {
        if self.is_due(index, TURN_AT_REST, now) {
            self.uses_of(index).iter_mut().for_each(Uses::forget_before);
        }
    }

    /// Whether frames in use in a window have had time to be used again.
    pub fn is_ripe(&self, index: usize, now: Instant) -> bool {
        self.each[index].forgotten.is_some_and(|at| now.duration_since(at) >= RIPE)
    }

    /// The uses of a frame; those before the current turn, if its window is not ripe.
    pub fn uses(&self, gfn: Gfn, is_ripe: bool) -> Uses {
        let uses = self.frames[gfn.0 as usize];
        if is_ripe { uses } else { uses.without_now() }
    }

    /// Notes what was found in a window. A window that was of little use to forget is forgotten
    /// less often.
    pub fn looked(&mut self, index: usize, found: Found, is_ripe: bool) {
        let active = self.uses_of(index).iter().filter(|uses| uses.is_active()).count() as u16;
        self.note(index, found, active);
        let (resident, unused) = (usize::from(found.resident), usize::from(found.unused));
        let window = &mut self.each[index];
        if !is_ripe || !std::mem::take(&mut window.is_new) {
            return;
        }
        window.patience = match () {
            () if unused * LITTLE < resident => (window.patience + 1).min(PATIENCE_MOST),
            () if unused * MUCH > resident => window.patience.saturating_sub(1),
            () => window.patience,
        };
    }

    fn note(&mut self, index: usize, found: Found, active: u16) {
        let window = &mut self.each[index];
        self.active = self.active + u64::from(active) - u64::from(window.active);
        self.kernel = self.kernel + u64::from(found.kernel) - u64::from(window.kernel);
        (window.resident, window.kernel, window.active) = (found.resident, found.kernel, active);
    }

    /// The sum of the likelihoods that its frames are used before long.
    pub fn likelihood(&mut self, index: usize) -> u32 {
        self.uses_of(index).iter().map(|uses| uses.likelihood(1)).sum()
    }

    /// Notes that a window's frames are evicted one by one from now on. Until then each use of one
    /// frame was seen as a use of all.
    pub fn break_up(&mut self, index: usize) {
        let used = self.uses_of(index).iter_mut().filter(|uses| uses.is_now());
        used.for_each(|uses| *uses = Uses::NOW);
        self.each[index].patience = 0;
    }

    /// Notes that frames are evicted. What comes back soon was in use, except what is mostly used
    /// once.
    pub fn go(&mut self, frames: FrameRange, is_cache: bool) {
        let start = frames.start.0 as usize;
        for uses in &mut self.frames[start..start + frames.count as usize] {
            uses.go(is_cache);
        }
    }

    fn uses_of(&mut self, index: usize) -> &mut [Uses] {
        &mut self.frames[index * FRAMES..][..FRAMES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A window of which `unused` frames were unused, look by look, and the current time.
    fn window(unused: &[u16]) -> (Windows, Instant) {
        let (mut windows, now) = (Windows::new(1), Instant::now());
        for &unused in unused {
            windows.end_turn(0, now);
            windows.pass(0);
            windows.looked(0, Found { resident: 512, unused, kernel: 0 }, true);
        }
        (windows, now)
    }

    #[test]
    fn turns_are_longer_if_little_is_unused() {
        let turn = SECOND;
        for (unused, seconds) in [
            (&[511][..], 1),
            (&[0], 2),
            (&[64], 1),
            (&[63, 63], 4),
            (&[0, 0, 0], 4),
            (&[0, 0, 256], 4),
            (&[0, 0, 257], 2),
            (&[0, 257, 257], 1),
        ] {
            let (windows, now) = window(unused);
            let is_due = |later| windows.is_due(0, turn, now + later);
            assert!(is_due(seconds * SECOND) && !is_due(seconds * SECOND * 9 / 10), "{unused:?}");
        }
        // But no turn is longer than one at rest.
        let (windows, now) = window(&[0, 0]);
        assert!(windows.is_due(0, TURN_AT_REST, now + TURN_AT_REST));
    }

    /// Nothing is learned from a window that was not forgotten anew, or was forgotten just now.
    #[test]
    fn a_turn_is_judged_once_and_by_what_is_ripe() {
        let (mut windows, now) = window(&[0]);
        for is_ripe in [true, false] {
            windows.looked(0, Found { resident: 512, ..Found::default() }, is_ripe);
            assert!(windows.is_due(0, SECOND, now + 2 * SECOND));
            windows.end_turn(0, now);
            windows.pass(0);
        }
    }

    #[test]
    fn pending_looks_are_counted_by_resident_frames() {
        let (mut windows, now) = (Windows::new(2), Instant::now());
        assert_eq!(windows.to_look_at(0), FRAMES, "as far as anybody knows");
        for (resident, counted) in [(3, LOOKS_A_WINDOW), (100, 100)] {
            windows.looked(0, Found { resident, ..Found::default() }, true);
            windows.end_turn(0, now);
            assert_eq!(windows.pending(), counted);
            windows.pass(0);
            assert_eq!(windows.pending(), 0);
        }
    }
}
