//! The host's side of an allocator that the guest shares.

use std::time::Duration;

use ebb_units::HugeFrame;

/// What the guest may have of an empty huge frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// The allocator does not govern it: it is an ordinary empty frame.
    Apart,
    /// All of it, at the first touch.
    Soft,
    /// Nothing before it is returned: a touch is a violation.
    Hard,
}

/// The host's side of the guest's allocator. Called on the fault path by the holder of the lock on
/// the huge frame's words: it must not wait or allocate.
pub trait Sharer: Send + Sync {
    /// What the huge frame is; this may change until its words are locked.
    fn sharing(&self, huge: HugeFrame) -> Sharing;
    /// A soft huge frame was touched. All of it has memory now, which devices may use, and the
    /// touch still waits. It took `took` to get there.
    fn installed(&self, huge: HugeFrame, took: Duration);
    /// A hard huge frame was touched. It is about to get memory nevertheless, or the guest would
    /// wait for ever.
    fn violated(&self, huge: HugeFrame);
}
