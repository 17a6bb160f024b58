//! The part of a VM's size that the guest's shared allocator keeps.

use std::time::Duration;

/// What a change of the size did in the shared allocator.
#[derive(Clone, Copy, Default)]
pub struct SharedChange {
    /// Taken from the guest by hard reclaim.
    pub taken_bytes: u64,
    /// The part of `taken_bytes` that had host memory.
    pub reclaimed_bytes: u64,
    /// Returned to the guest.
    pub returned_bytes: u64,
    /// How often the guest was asked to free its caches.
    pub purges: u32,
}

/// The shared allocator's part of the size, as it is now.
#[derive(Clone, Copy, Default)]
pub struct SharedSize {
    /// Hard-reclaimed memory.
    pub hard_bytes: u64,
    /// For how much longer nothing is reclaimed, after the guest had its memory returned.
    pub pause_left: Option<Duration>,
    /// Whether it is on its way to a size that was asked for.
    pub is_moving: bool,
    /// What the last change of the size did.
    pub last_change: SharedChange,
}
