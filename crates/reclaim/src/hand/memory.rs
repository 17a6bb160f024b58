//! The memory that a hand goes around.

use std::io;
use std::time::Instant;

use ebb_units::{FrameRange, Gfn, HugeFrame};

use crate::cost::Page;

/// The memory that a hand goes around.
pub trait HandMemory {
    /// The current time.
    fn now(&self) -> Instant;

    /// The first window from this one on that has resident frames.
    fn next(&self, from: HugeFrame) -> Option<HugeFrame>;

    /// Tells which frames of a window the VMM has mapped.
    ///
    /// # Errors
    /// From reading the VMM's page table.
    fn mapped(&self, window: HugeFrame, saw: &mut dyn FnMut(FrameRange)) -> io::Result<()>;

    /// Takes ranges out of the VMM's page table, as far as one stop gets. Returns how many of their
    /// frames it got to, counted from the first.
    ///
    /// # Errors
    /// From having the VMM make a system call.
    fn forget(&self, ranges: &[FrameRange]) -> io::Result<u64>;

    /// Tells what the resident frames of a window are, in order.
    fn look(&mut self, window: HugeFrame, saw: &mut dyn FnMut(Gfn, Page));

    /// Whether a frame that was looked at may be evicted.
    fn may_go(&self, gfn: Gfn) -> bool;

    /// How a window's frames are evicted.
    fn piece(&self, window: HugeFrame) -> Piece;

    /// Has the frames of these windows evicted one by one from now on.
    ///
    /// # Errors
    /// From having the VMM make a system call.
    fn break_up(&self, windows: &[HugeFrame]) -> io::Result<()>;
}

/// How the frames of a window are evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Piece {
    /// One by one.
    Frames,
    /// Together, until the window is broken up.
    Breakable,
    /// Together: the window cannot be broken up.
    Whole,
}
