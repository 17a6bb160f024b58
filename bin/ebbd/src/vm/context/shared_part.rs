//! The part of a VM's size that the guest's shared allocator has.

use std::time::Duration;

/// What a change of the size did in the shared allocator.
#[derive(Clone, Copy, Default)]
pub struct Moved {
    /// Taken from the guest.
    pub taken_bytes: u64,
    /// Of that, what had memory of the host's.
    pub emptied_bytes: u64,
    /// Returned to the guest.
    pub returned_bytes: u64,
    /// How often it was asked to free its caches.
    pub purges: u32,
}

/// That part as it is now.
#[derive(Clone, Copy, Default)]
pub struct SharedPart {
    /// What the guest has not, for good.
    pub hard_bytes: u64,
    /// How long nothing is taken, as the guest had its memory back.
    pub rests_for: Option<Duration>,
    /// It is on its way to a size that was asked for.
    pub is_moving: bool,
    /// What the last such way came to.
    pub moved: Moved,
}
