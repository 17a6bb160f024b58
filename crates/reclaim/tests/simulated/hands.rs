//! The hand on the made-up guest.

use std::cell::RefCell;
use std::io;
use std::time::{Duration, Instant};

use ebb_reclaim::cost::Page;
use ebb_reclaim::hand::{Hand, HandMemory, Piece};
use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn, HugeFrame};

use crate::guest::{Chooser, Guest};

const WINDOW: usize = FRAMES_PER_HUGE as usize;

struct View<'g>(RefCell<&'g mut Guest>);

impl HandMemory for View<'_> {
    fn now(&self) -> Instant {
        self.0.borrow().now
    }

    fn next(&self, from: HugeFrame) -> Option<HugeFrame> {
        let guest = self.0.borrow();
        let mut windows = guest.there.chunks(WINDOW).enumerate().skip(from.0 as usize);
        windows.find(|(_, window)| window.contains(&true)).map(|(at, _)| HugeFrame(at as u64))
    }

    fn mapped(&self, window: HugeFrame, saw: &mut dyn FnMut(FrameRange)) -> io::Result<()> {
        let mut guest = self.0.borrow_mut();
        guest.figures.entries += FRAMES_PER_HUGE;
        for gfn in FrameRange::huge(window).frames() {
            if guest.mapped.get(gfn.0 as usize) == Some(&true) {
                saw(FrameRange::new(gfn, 1));
            }
        }
        Ok(())
    }

    fn forget(&self, ranges: &[FrameRange]) -> io::Result<u64> {
        let mut guest = self.0.borrow_mut();
        guest.figures.forgot += u64::from(!ranges.is_empty());
        for gfn in ranges.iter().flat_map(|range| range.frames()) {
            guest.mapped[gfn.0 as usize] = false;
        }
        Ok(u64::MAX)
    }

    fn look(&mut self, window: HugeFrame, saw: &mut dyn FnMut(Gfn, Page)) {
        let guest = self.0.get_mut();
        for gfn in FrameRange::huge(window).frames() {
            let at = gfn.0 as usize;
            if guest.there.get(at) == Some(&true) {
                guest.figures.looked += 1;
                saw(gfn, guest.pages[at]);
            }
        }
    }

    fn may_go(&self, _: Gfn) -> bool {
        true
    }

    fn piece(&self, _: HugeFrame) -> Piece {
        Piece::Frames
    }

    fn break_up(&self, _: &[HugeFrame]) -> io::Result<()> {
        Ok(())
    }
}

impl Chooser for Hand {
    fn take(&mut self, guest: &mut Guest, want: usize, now: Instant) -> Vec<Gfn> {
        self.choose(&mut View(RefCell::new(guest)), want, now + Duration::from_secs(1))
            .expect("a choice")
    }
}
