//! What an eviction did.

use ebb_ledger::Content;
use ebb_units::{FrameRange, Gfn};

/// What an eviction did, in frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Evicted {
    /// Frames whose content is in the store now.
    pub saved: u64,
    /// Frames that are disk-backed now: a block of the guest's disk equals them, and nothing was
    /// written.
    pub on_disk: u64,
    /// Frames that still held what they held when they came from the store, where that still is:
    /// nothing was written.
    pub clean: u64,
    /// Frames whose bytes are all the same, or that are free in the guest: nothing is kept.
    pub empty: u64,
    /// Frames that stay, because they were written to meanwhile.
    pub abandoned: u64,
    /// Frames that stay, because a request may be writing to them.
    pub in_flight: u64,
}

impl Evicted {
    /// Returns how many frames the host got.
    pub fn frames(&self) -> u64 {
        self.saved + self.on_disk + self.clean + self.empty
    }

    /// Adds another eviction's counts.
    pub fn add(&mut self, other: Evicted) {
        self.saved += other.saved;
        self.on_disk += other.on_disk;
        self.clean += other.clean;
        self.empty += other.empty;
        self.abandoned += other.abandoned;
        self.in_flight += other.in_flight;
    }

    pub(crate) fn count(&mut self, content: Content, is_kept: bool) {
        match content {
            _ if is_kept => self.clean += 1,
            Content::Saved { .. } => self.saved += 1,
            Content::OnDisk { .. } => self.on_disk += 1,
            _ => self.empty += 1,
        }
    }
}

/// Returns runs of consecutive frames, each with the index of its first item.
pub(crate) fn runs<T>(
    items: &[T],
    gfn: impl Fn(&T) -> Gfn,
) -> impl Iterator<Item = (FrameRange, usize)> {
    let mut at = 0;
    let gfns: Vec<Gfn> = items.iter().map(gfn).collect();
    std::iter::from_fn(move || {
        let first = *gfns.get(at)?;
        let start = at;
        while gfns.get(at).is_some_and(|gfn| gfn.0 == first.0 + (at - start) as u64) {
            at += 1;
        }
        Some((FrameRange::new(first, (at - start) as u64), start))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_in_a_row_make_one_run() {
        let frames = [3, 4, 5, 7, 9, 10].map(Gfn);
        let found: Vec<_> = runs(&frames, |gfn| *gfn).collect();
        let run = |first, count| FrameRange::new(Gfn(first), count);
        assert_eq!(found, [(run(3, 3), 0), (run(7, 1), 3), (run(9, 2), 4)]);
    }
}
