//! Pages that threads bring back at the same time share the room that all of them see.
//!
//! Each thread looks at what the VM takes before it brings anything, and may bring 2 MiB. Threads
//! share the room that is left, so that many of them do not exceed the VM's limit by 2 MiB each. A
//! thread that comes when little is left brings only its own page.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Number of frames that are on their way back.
#[derive(Default)]
pub(crate) struct Coming(AtomicU64);

impl Coming {
    /// Returns how many frames a thread may bring: as many as it wants, out of `room` for all
    /// threads together, but at least one. A thread that wants one does not ask for `room`, which
    /// takes a system call.
    pub(crate) fn share(&self, wanted: usize, room: impl Fn() -> u64) -> Share<'_> {
        let wanted = wanted.max(1) as u64;
        let before = self.0.fetch_add(wanted, Relaxed);
        let frames = match wanted {
            1 => 1,
            _ => wanted.min(room().saturating_sub(before)).max(1),
        };
        self.0.fetch_sub(wanted.saturating_sub(frames), Relaxed);
        Share { of: self, frames }
    }
}

/// A thread's share of the room, until its frames are there.
pub(crate) struct Share<'c> {
    of: &'c Coming,
    frames: u64,
}

impl Share<'_> {
    /// Returns how many frames the thread may bring.
    pub(crate) fn frames(&self) -> usize {
        self.frames as usize
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        let before = self.of.0.fetch_sub(self.frames, Relaxed);
        debug_assert!(before >= self.frames, "{before} frames come, and {} have", self.frames);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_the_room_that_all_of_them_see() {
        let coming = Coming::default();
        let shares: Vec<Share<'_>> = (0..16).map(|_| coming.share(256, || 600)).collect();
        let frames: Vec<usize> = shares.iter().map(Share::frames).collect();
        assert_eq!(frames[..4], [256, 256, 88, 1]);
        assert_eq!(frames.iter().sum::<usize>(), 600 + 13, "but for a page each");
        drop(shares);
        assert_eq!(coming.0.load(Relaxed), 0);
        assert_eq!(coming.share(256, || 0).frames(), 1);
        assert_eq!(coming.share(256, || u64::MAX).frames(), 256);
        assert_eq!(coming.share(1, || panic!("nobody asks")).frames(), 1);
    }
}
