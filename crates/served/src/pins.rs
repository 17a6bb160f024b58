//! Pins for the segments of a device's request.

use std::io;

use ebb_pager::Pager;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use ebb_vhost::{Access, DmaFault, Segment};

/// Makes the frames of a request resident, and pins them until [`unpin`].
///
/// # Errors
/// A frame cannot be pinned, or not now ([`ebb_pager::DeviceAccess::pin_soon`]). Nothing is pinned
/// then. The address is that of the first frame of its run.
pub(crate) fn pin(pager: &Pager, segments: &[Segment], access: Access) -> Result<(), DmaFault> {
    let runs = runs(segments, access);
    for (index, &(frames, replace)) in runs.iter().enumerate() {
        if let Err(error) = pager.devices().pin_soon(frames, replace) {
            runs[..index].iter().for_each(|(frames, _)| pager.devices().unpin(*frames));
            let gpa = frames.start.gpa();
            return Err(match error.kind() {
                io::ErrorKind::PermissionDenied => DmaFault::Forbidden(gpa),
                _ => DmaFault::NotNow(gpa),
            });
        }
    }
    Ok(())
}

/// Ends one [`pin`] of the same segments.
pub(crate) fn unpin(pager: &Pager, segments: &[Segment]) {
    segments.iter().for_each(|segment| pager.devices().unpin(frames_of(*segment)));
}

/// The error of a pin while the VM has no pager, before it is managed and after it is detached: the
/// device waits.
pub(crate) fn nobody_there(segments: &[Segment]) -> DmaFault {
    DmaFault::NotNow(segments.first().map(|segment| segment.gpa).unwrap_or_default())
}

/// The frames that a segment touches.
pub(crate) fn frames_of(segment: Segment) -> FrameRange {
    let first = segment.gpa.0 / FRAME_BYTES;
    let end = segment.gpa.0 + u64::from(segment.bytes);
    FrameRange::new(Gfn(first), end.div_ceil(FRAME_BYTES) - first)
}

/// The frames of a request, in runs that are pinned by one call each. A frame that several segments
/// touch is there for each of them. `true`: a segment covers the frames whole, and they are
/// overwritten.
fn runs(segments: &[Segment], access: Access) -> Vec<(FrameRange, bool)> {
    let mut runs: Vec<(FrameRange, bool)> = Vec::new();
    for (gfn, replace) in segments.iter().flat_map(|segment| frames(*segment, access)) {
        match runs.last_mut() {
            Some((run, same)) if *same == replace && run.end() == gfn => run.count += 1,
            _ => runs.push((FrameRange::new(gfn, 1), replace)),
        }
    }
    runs
}

/// A segment's frames; `true`: the segment covers the frame whole, and it is overwritten.
fn frames(segment: Segment, access: Access) -> impl Iterator<Item = (Gfn, bool)> {
    let (start, end) = (segment.gpa.0, segment.gpa.0 + u64::from(segment.bytes));
    let is_whole = move |gfn: Gfn| gfn.gpa().0 >= start && gfn.gpa().0 + FRAME_BYTES <= end;
    let replace = move |gfn| access == Access::Replace && is_whole(gfn);
    frames_of(segment).frames().map(move |gfn| (gfn, replace(gfn)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_units::Gpa;

    fn segment(gpa: u64, bytes: u32) -> Segment {
        Segment { gpa: Gpa(gpa), bytes }
    }

    /// A run's first frame, its length, and whether it is replaced.
    fn of(segments: &[Segment], access: Access) -> Vec<(u64, u64, bool)> {
        let all = runs(segments, access).into_iter();
        all.map(|(frames, replace)| (frames.start.0, frames.count, replace)).collect()
    }

    #[test]
    fn only_frames_covered_as_a_whole_are_replaced() {
        let segment = [segment(0x1800, 0x3000)];
        let replaced = [(1, 1, false), (2, 2, true), (4, 1, false)];
        assert_eq!(of(&segment, Access::Replace), replaced);
        assert_eq!(of(&segment, Access::Keep), [(1, 4, false)]);
    }

    #[test]
    fn frames_in_a_row_are_one_run_and_shared_ones_are_counted() {
        let list = [(0x1000, 0x1000), (0x2000, 0x2000), (0x8000, 0x1000), (0x6000, 8), (0x6008, 8)];
        let all = list.map(|(gpa, bytes)| segment(gpa, bytes));
        let runs = |replace| [(1, 3, replace), (8, 1, replace), (6, 1, false), (6, 1, false)];
        assert_eq!(of(&all, Access::Replace), runs(true));
        assert_eq!(of(&all, Access::Keep), runs(false));
        // As many as are unpinned.
        let unpinned: u64 = all.iter().map(|segment| frames_of(*segment).count).sum();
        assert_eq!(unpinned, 6);
    }
}
