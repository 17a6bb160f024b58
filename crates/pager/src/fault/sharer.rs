//! The host's side of an allocator that the guest shares.

use std::time::Duration;

use ebb_units::HugeFrame;

/// What the guest may have of a huge frame that was emptied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// The allocator has nothing to do with it: an emptied frame like any other.
    Apart,
    /// All of it, at the first touch.
    Soft,
    /// Nothing, before it was returned: a touch is against the rules.
    Hard,
}

/// The host's side of the guest's allocator. Called on the fault path, as the holder of
/// the huge frame's words: no waiting, no allocation.
pub trait Sharer: Send + Sync {
    /// What it is; may change until its words are held.
    fn sharing(&self, huge: HugeFrame) -> Sharing;
    /// A soft one was touched. All of it has memory now, which devices may use, and whoever
    /// touched it still waits. It took `took` to get there.
    fn installed(&self, huge: HugeFrame, took: Duration);
    /// A hard one was touched. It is about to have memory for all that, or the guest
    /// would wait for ever.
    fn violated(&self, huge: HugeFrame);
}
