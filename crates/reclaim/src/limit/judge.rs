//! What is known of frames that are about to be evicted.

use std::cell::RefCell;

use ebb_inspect::{BuddyBlock, Guest};
use ebb_pager::{Judge, Pager};
use ebb_sys::process::Process;
use ebb_units::{FrameRange, Gfn};
use ebb_vm::pinning::pinning;

/// Sources that know what a VM's frames are.
#[derive(Clone, Copy)]
pub struct Sources<'a> {
    /// The VMM.
    pub process: &'a Process,
    /// A trusted guest, and whether it still runs: `false` once it may have been reset.
    pub guest: Option<(&'a Guest, &'a dyn Fn() -> bool)>,
    /// Whether the VMM pins memory ([`pinning`]), so that the guest has to tell what is in flight.
    pub pins: bool,
    /// Whether a reset is heard of only at a question to the VMM. Such a question takes too long to
    /// be asked for each frame.
    pub hears_late: bool,
}

/// What the sources say of frames.
pub struct Known<'a> {
    /// The sources.
    pub of: Sources<'a>,
    /// The pager of the same VM.
    pub pager: &'a Pager,
    /// Blocks that were free when the victims were chosen, in order of address.
    free: &'a [BuddyBlock],
    /// Where resets are heard of late: the frames of this batch that were free once all of them were
    /// protected, and before the guest was known to run, in order of address.
    dead: RefCell<Vec<Gfn>>,
}

impl<'a> Known<'a> {
    /// What is known of frames, of which those in `free` were free when the victims were chosen.
    pub fn new(of: Sources<'a>, pager: &'a Pager, free: &'a [BuddyBlock]) -> Known<'a> {
        Known { of, pager, free, dead: RefCell::default() }
    }

    /// Whether the guest's allocator has a frame now, as part of a block that was free before.
    fn is_free(&self, guest: &Guest, gfn: Gfn) -> bool {
        let Some(block) = holding(self.free, gfn, BuddyBlock::frames) else { return false };
        let now = guest.look(&self.pager.view()).head(block.head);
        now.is_some_and(|now| now.order >= block.order)
    }

    /// Finds the frames of a batch that are free, with one question for all.
    fn look_for_dead(&self, frames: &[Gfn]) {
        let mut dead: Vec<Gfn> = match self.of.guest {
            Some((guest, _)) => {
                frames.iter().copied().filter(|gfn| self.is_free(guest, *gfn)).collect()
            }
            None => Vec::new(),
        };
        // Asked after the looks, as for one frame.
        if !dead.is_empty() && !self.of.guest.is_some_and(|(_, still_runs)| still_runs()) {
            dead.clear();
        }
        dead.sort_unstable();
        *self.dead.borrow_mut() = dead;
    }

    /// Whether nothing pins memory. A look at the descriptors before the frames were protected
    /// would miss those opened since.
    fn nothing_pins(&self) -> bool {
        !self.of.pins && matches!(pinning(self.of.process), Ok(None))
    }
}

impl Judge for Known<'_> {
    fn is_dead(&self, gfn: Gfn) -> bool {
        let Some((guest, still_runs)) = self.of.guest else { return false };
        if self.of.hears_late {
            return self.dead.borrow().binary_search(&gfn).is_ok();
        }
        // Asked after the look: a look at a guest that had been reset says nothing.
        self.is_free(guest, gfn) && still_runs()
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        if self.of.hears_late {
            self.look_for_dead(frames);
        }
        if self.nothing_pins() {
            return vec![true; frames.len()];
        }
        let Some((guest, still_runs)) = self.of.guest else { return vec![false; frames.len()] };
        let mut settled = guest.settled(&self.pager.view(), frames);
        for (settled, &gfn) in settled.iter_mut().zip(frames) {
            // No request of a kernel writes to what the kernel has freed.
            *settled = *settled || self.is_free(guest, gfn);
        }
        if still_runs() { settled } else { vec![false; frames.len()] }
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        let Some((guest, still_runs)) = self.of.guest else { return vec![false; frames.len()] };
        let found = guest.in_use(&self.pager.view(), frames);
        if still_runs() { found } else { vec![false; frames.len()] }
    }
}

/// The item that contains a frame. The items are in order of address and do not overlap.
pub fn holding<T: Copy>(items: &[T], gfn: Gfn, frames: impl Fn(T) -> FrameRange) -> Option<T> {
    let after = items.partition_point(|item| frames(*item).start <= gfn);
    let item = *items.get(after.checked_sub(1)?)?;
    frames(item).contains(gfn).then_some(item)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_found_in_the_range_that_holds_it() {
        let range = |first, count| FrameRange::new(Gfn(first), count);
        let ranges = [range(2, 3), range(5, 1), range(9, 2)];
        let found = |gfn| holding(&ranges, Gfn(gfn), |frames| frames).map(|frames| frames.start.0);
        let expected = [None, None, Some(2), Some(2), Some(2), Some(5), None, None, None, Some(9)];
        assert!((0..10).map(found).eq(expected));
        assert_eq!((found(10), found(11)), (Some(9), None));
    }
}
