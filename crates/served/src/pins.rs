//! Pins for the segments of a device's request.

use std::io;

use ebb_pager::Pager;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use ebb_vhost::{Access, DmaFault, Segment};

/// Makes the frames of a request resident, and pins them until [`unpin`].
///
/// # Errors
/// A frame cannot be pinned, or not now ([`ebb_pager::DeviceAccess::pin_soon`]). Nothing is pinned
/// then.
pub(crate) fn pin(pager: &Pager, segments: &[Segment], access: Access) -> Result<(), DmaFault> {
    let pieces: Vec<_> = segments.iter().flat_map(|segment| pieces(*segment, access)).collect();
    for (index, &(frames, replace)) in pieces.iter().enumerate() {
        if let Err(error) = pager.devices().pin_soon(frames, replace) {
            pieces[..index].iter().for_each(|(frames, _)| pager.devices().unpin(*frames));
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

/// A segment's frames; `true`: the segment covers them whole, and they are overwritten.
fn pieces(segment: Segment, access: Access) -> impl Iterator<Item = (FrameRange, bool)> {
    let (start, end) = (segment.gpa.0, segment.gpa.0 + u64::from(segment.bytes));
    let is_whole = move |gfn: Gfn| gfn.gpa().0 >= start && gfn.gpa().0 + FRAME_BYTES <= end;
    frames_of(segment)
        .frames()
        .map(move |gfn| (FrameRange::new(gfn, 1), access == Access::Replace && is_whole(gfn)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_units::Gpa;

    #[test]
    fn only_frames_covered_as_a_whole_are_replaced() {
        let segment = Segment { gpa: Gpa(0x1800), bytes: 0x2000 };
        let all = |access| -> Vec<(u64, bool)> {
            pieces(segment, access).map(|(frames, replace)| (frames.start.0, replace)).collect()
        };
        assert_eq!(all(Access::Replace), [(1, false), (2, true), (3, false)]);
        assert_eq!(all(Access::Keep), [(1, false), (2, false), (3, false)]);
    }
}
