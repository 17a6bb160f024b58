//! What is known of frames that are about to go.

use ebb_units::Gfn;

/// What is known of frames that are about to go.
pub trait Judge {
    /// The guest has freed it: nobody will ask for what it holds. Asked while
    /// the frame is protected.
    fn is_dead(&self, gfn: Gfn) -> bool;

    /// Which of these no device writes to by a request that began before they were
    /// protected. Asked while they are, and before they are read; `false` where it is not
    /// known.
    fn settled(&self, frames: &[Gfn]) -> Vec<bool>;

    /// Which of these are page cache or anonymous memory in use, by the word of the
    /// kernel that the pager believes ([`crate::Residency::believe`]). Asked while they are
    /// protected.
    fn in_use(&self, frames: &[Gfn]) -> Vec<bool>;
}

/// Nothing is known of them, but that no device of the VMM pins any.
pub struct NothingKnown;

impl Judge for NothingKnown {
    fn is_dead(&self, _gfn: Gfn) -> bool {
        false
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![false; frames.len()]
    }
}
