//! What is known of frames that are about to be evicted.

use ebb_units::Gfn;

/// What is known of frames that are about to be evicted.
pub trait Judge {
    /// Whether the guest has freed the frame, so that nobody will ask for what it holds. Asked
    /// while the frame is protected.
    fn is_dead(&self, gfn: Gfn) -> bool;

    /// Says for each of these frames whether no device writes to it by a request that began before
    /// the frame was protected. `false` where that is not known. Asked while the frames are
    /// protected, and before they are read.
    fn settled(&self, frames: &[Gfn]) -> Vec<bool>;

    /// Says for each of these frames whether it is page cache or anonymous memory in use, by the
    /// word of the kernel that the pager believes ([`crate::Residency::believe`]). Asked while the
    /// frames are protected.
    fn in_use(&self, frames: &[Gfn]) -> Vec<bool>;
}

/// A judge that knows nothing of the frames, except that no device of the VMM pins any.
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
