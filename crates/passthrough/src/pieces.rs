//! Which of a VM's RAM is mapped for its devices in pieces.

use ebb_units::{FRAMES_PER_HUGE, FrameRange, Gfn, Gpa};
use ebb_vm::{Ram, Region};

/// Below this address a VMM maps RAM anew at each reset, in one piece.
const LOW_END: Gpa = Gpa(4 << 30);

/// The regions that are mapped in pieces, each piece the part of a region in one huge frame.
pub struct Pieces(Vec<FrameRange>);

impl Pieces {
    /// Those of a VM's RAM. A region that begins below 4 GiB is not among them.
    pub fn of(ram: &Ram) -> Pieces {
        let high = ram.regions().filter(|region| region.gpa >= LOW_END);
        Pieces(high.map(Region::frames).collect())
    }

    /// The regions.
    pub fn regions(&self) -> impl Iterator<Item = FrameRange> {
        self.0.iter().copied()
    }

    /// The number of pieces.
    pub fn count(&self) -> u64 {
        self.regions().map(|region| region.by_huge().count() as u64).sum()
    }

    /// The pieces that have some of these frames.
    pub fn over(&self, frames: FrameRange) -> impl Iterator<Item = FrameRange> {
        let first = frames.start.huge().first();
        let end = frames.end().0.next_multiple_of(FRAMES_PER_HUGE);
        let part = move |region: FrameRange| {
            let (first, end) = (first.max(region.start), end.min(region.end().0));
            let count = end.checked_sub(first.0).filter(|&count| count > 0)?;
            Some(FrameRange::new(first, count))
        };
        self.regions().filter_map(part).flat_map(FrameRange::by_huge)
    }

    /// Whether these frames are whole huge frames of one region.
    pub fn has_whole(&self, frames: FrameRange) -> bool {
        let is_whole = |at: Gfn| at.0.is_multiple_of(FRAMES_PER_HUGE);
        is_whole(frames.start) && is_whole(frames.end()) && self.has(frames)
    }

    /// Whether all of these frames are in one region.
    pub fn has(&self, frames: FrameRange) -> bool {
        let holds =
            |region: FrameRange| region.start <= frames.start && frames.end() <= region.end();
        self.regions().any(holds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u64 = LOW_END.0 >> 12;

    fn pieces() -> Pieces {
        Pieces(vec![FrameRange::new(Gfn(FIRST), 1024), FrameRange::new(Gfn(FIRST + 2048), 700)])
    }

    fn run(start: u64, count: u64) -> FrameRange {
        FrameRange::new(Gfn(FIRST + start), count)
    }

    #[test]
    fn a_frame_is_in_the_piece_of_its_huge_frame() {
        let over = |frames| pieces().over(frames).collect::<Vec<_>>();
        assert_eq!(over(run(511, 1)), [run(0, 512)]);
        assert_eq!(over(run(511, 2)), [run(0, 512), run(512, 512)]);
        assert_eq!(over(run(2048 + 600, 1)), [run(2048 + 512, 188)]);
        assert!(over(run(1024, 1024)).is_empty());
        assert_eq!(pieces().count(), 4);
    }

    #[test]
    fn only_whole_huge_frames_may_be_taken() {
        for (frames, may) in [
            (run(0, 512), true),
            (run(0, 1024), true),
            (run(512, 512), true),
            (run(0, 256), false),
            (run(512, 1024), false),
            (run(2048, 512), true),
            // A part of a huge frame.
            (run(2048 + 512, 188), false),
            (FrameRange::new(Gfn(0), 512), false),
        ] {
            assert_eq!(pieces().has_whole(frames), may, "{frames:?}");
        }
    }
}
