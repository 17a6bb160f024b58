//! How a device accesses guest memory.

use std::sync::Arc;

use ebb_units::{FRAME_BYTES, Gfn, Gpa};
use thiserror::Error;
use vm_memory::GuestMemoryMmap;

/// A piece of guest-physical memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Its first address.
    pub gpa: Gpa,
    /// Its length in bytes.
    pub bytes: u32,
}

/// What the device will do with memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Read it, or write parts of it: all of it must have its content.
    Keep,
    /// Write every byte: frames wholly in the segments need not have their old content. Frames
    /// partly in them must.
    Replace,
}

/// Why the device cannot access the frame at this address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum DmaFault {
    /// The address is in no RAM, or in RAM that no device may use. The request fails, or if it
    /// has no place to say so, the queue stops.
    #[error("no device may use {0:?}")]
    Forbidden(Gpa),
    /// The frame cannot be refilled now. The request waits, and is tried again.
    #[error("{0:?} cannot be brought back at the moment")]
    NotNow(Gpa),
}

impl DmaFault {
    /// Whether the same access may work later.
    pub fn passes(self) -> bool {
        matches!(self, DmaFault::NotNow(_))
    }
}

/// Keeps frames resident while the device uses them.
///
/// The queues' threads call it. Segments of one request may touch the same frame, and so may
/// requests: pins are counted.
pub trait Dma: Send + Sync {
    /// Makes every frame of the segments resident until [`Dma::unpin`], and makes sure that it is
    /// the one that the guest sees.
    ///
    /// It does not wait for long: the caller may hold what others wait for.
    ///
    /// # Errors
    /// No device may use a frame, or it cannot be made resident now. The caller then leaves the
    /// request undone and asks again later. Nothing is pinned.
    fn pin(&self, segments: &[Segment], access: Access) -> Result<(), DmaFault>;

    /// Ends one [`Dma::pin`] of the same segments.
    fn unpin(&self, segments: &[Segment]);

    /// Translates addresses of the memory that the front end shares into addresses to pin. They
    /// can differ once a memory device was plugged in again. `None`: they are the same.
    ///
    /// # Errors
    /// The translation is not known now.
    fn place(
        &self,
        _memory: &Arc<GuestMemoryMmap>,
        _segments: &[Segment],
    ) -> Result<Option<Vec<Segment>>, DmaFault> {
        Ok(None)
    }
}

/// Memory that is always resident.
#[derive(Clone, Copy, Default, Debug)]
pub struct AllResident;

impl Dma for AllResident {
    fn pin(&self, _: &[Segment], _: Access) -> Result<(), DmaFault> {
        Ok(())
    }

    fn unpin(&self, _: &[Segment]) {}
}

/// Segments that are pinned until this is dropped.
pub struct Pinned {
    dma: Arc<dyn Dma>,
    segments: Vec<Segment>,
    /// The pinned segments, if they are not `segments` ([`Dma::place`]).
    placed: Option<Vec<Segment>>,
}

impl Pinned {
    /// Pins these segments of `memory`.
    ///
    /// # Errors
    /// As [`Dma::pin`] and [`Dma::place`].
    pub fn new(
        dma: &Arc<dyn Dma>,
        memory: &Arc<GuestMemoryMmap>,
        segments: Vec<Segment>,
        access: Access,
    ) -> Result<Pinned, DmaFault> {
        let placed = dma.place(memory, &segments)?;
        dma.pin(placed.as_ref().unwrap_or(&segments), access)?;
        Ok(Pinned { dma: dma.clone(), segments, placed })
    }

    /// Returns the pinned segments, by the front end's addresses.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.dma.unpin(self.placed.as_ref().unwrap_or(&self.segments));
    }
}

impl Segment {
    /// Whether it begins and ends on a frame's border.
    pub fn is_aligned(self) -> bool {
        self.gpa.0.is_multiple_of(FRAME_BYTES) && u64::from(self.bytes).is_multiple_of(FRAME_BYTES)
    }
}

/// Returns the sum of the bytes of `segments`.
pub fn bytes_of(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.bytes)).sum()
}

/// Returns the part of `segments` that has their `count` bytes from byte `start` on.
pub fn slice(segments: &[Segment], start: u64, count: u64) -> Vec<Segment> {
    let (mut at, end) = (0u64, start.saturating_add(count));
    let mut part = Vec::new();
    for segment in segments {
        let next = at + u64::from(segment.bytes);
        let (from, to) = (start.max(at), end.min(next));
        if from < to {
            let gpa = Gpa(segment.gpa.0.saturating_add(from - at));
            part.push(Segment { gpa, bytes: (to - from) as u32 });
        }
        at = next;
    }
    part
}

/// Returns the whole frames in `segments` whose bytes are a whole block of the disk, if the
/// segments' first byte is at `disk_offset`. Each is a block, a frame, and the position in the
/// segments' bytes.
pub fn whole_frames(
    segments: &[Segment],
    disk_offset: u64,
) -> impl Iterator<Item = (u64, Gfn, usize)> {
    let mut at = 0;
    segments.iter().flat_map(move |segment| {
        let (start, bytes) = (at, u64::from(segment.bytes));
        at += bytes;
        let skip = segment.gpa.0.next_multiple_of(FRAME_BYTES) - segment.gpa.0;
        let meets = (disk_offset + start + skip).is_multiple_of(FRAME_BYTES);
        let count = if meets { bytes.saturating_sub(skip) / FRAME_BYTES } else { 0 };
        let (first, gpa) = (start + skip, segment.gpa.0 + skip);
        (0..count).map(move |index| {
            let position = first + index * FRAME_BYTES;
            let block = (disk_offset + position) / FRAME_BYTES;
            (block, Gpa(gpa + index * FRAME_BYTES).gfn(), position as usize)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn segment(gpa: u64, bytes: u32) -> Segment {
        Segment { gpa: Gpa(gpa), bytes }
    }

    #[test]
    fn a_slice_runs_over_segments() {
        let all = [segment(0x1000, 0x10), segment(0x5000, 0x2000), segment(0x9000, 8)];
        assert_eq!(slice(&all, 8, 16), [segment(0x1008, 8), segment(0x5000, 8)]);
        assert_eq!(slice(&all, 0x10, 0x1000), [segment(0x5000, 0x1000)]);
        assert_eq!(slice(&all, 0, u64::MAX), all);
        assert!(slice(&all, bytes_of(&all), 1).is_empty());
    }

    #[test]
    fn only_whole_frames_that_meet_blocks_are_found() {
        let all = [segment(0x1000, 0x1000), segment(0x5000, 0x800), segment(0x5800, 0x1800)];
        let found: Vec<_> = whole_frames(&all, 0x3000).collect();
        assert_eq!(found, [(3, Gfn(1), 0), (5, Gfn(6), 0x2000)]);
        assert_eq!(whole_frames(&all, 0x200).count(), 0);
        let late = [segment(0x1e00, 0x2200)];
        let found: Vec<_> = whole_frames(&late, 0x3e00).collect();
        assert_eq!(found, [(4, Gfn(2), 0x200), (5, Gfn(3), 0x1200)]);
    }
}
