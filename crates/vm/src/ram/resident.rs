//! Resident frames and holes: which frames of RAM have memory.

use std::io;

use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};

use super::Ram;

impl Ram {
    /// Whether no frame of the range is resident.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not in one region; as lseek(2).
    pub fn is_hole(&self, frames: FrameRange) -> io::Result<bool> {
        let (backing, offset) = self.backing(frames)?;
        backing.file.is_hole(offset, frames.bytes())
    }

    /// Whether every frame of the range is resident. Takes time in proportion to the size of the
    /// range, as [`Ram::populated_in`] does.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not in one region; as mincore(2) and lseek(2).
    pub fn is_full(&self, frames: FrameRange) -> io::Result<bool> {
        Ok(self.populated_in(frames)? == [frames])
    }

    /// Whether [`Ram::is_hole`] can tell. For hugetlb files it cannot.
    pub fn knows_holes(&self, frames: FrameRange) -> bool {
        let backing = self.backing(frames);
        backing.is_ok_and(|(backing, _)| backing.file.is_hugetlb().is_ok_and(|hugetlb| !hugetlb))
    }

    /// The next resident frame at or after `from`. `None` if there is none. Unlike
    /// [`Ram::next_populated`], it does not walk over the memory that follows.
    pub fn next_data(&self, from: Gpa) -> Option<Gpa> {
        let mut left = self.regions().filter(|region| region.gpa.0 + region.bytes > from.0);
        left.find_map(|region| {
            let into = from.0.saturating_sub(region.gpa.0);
            let file = &self.files().get(region.file)?.file;
            let end = region.offset + region.bytes;
            let data = file.next_data(region.offset + into).ok()?.filter(|&at| at < end)?;
            Some(Gpa(region.gpa.0 + (data - region.offset)))
        })
    }

    /// The resident frames of a range, in order and in runs. Takes time in proportion to the size
    /// of the range, not to the memory in it.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not in one region; as mincore(2) and lseek(2).
    pub fn populated_in(&self, frames: FrameRange) -> io::Result<Vec<FrameRange>> {
        let (backing, offset) = self.backing(frames)?;
        let mut there = vec![false; usize::try_from(frames.count).unwrap_or(0)];
        backing.mapping.in_memory(offset, &mut there)?;
        let (mut found, mut at) = (Vec::new(), 0);
        for run in there.chunk_by(|one, next| one == next) {
            let end = at + run.len() as u64;
            if run.first() == Some(&true) {
                FrameRange::new(Gfn(frames.start.0 + at), end - at).join(&mut found);
                at = end;
            }
            // mincore(2) does not tell what the host swapped out, nor what a hugetlb file has.
            // Neither is a hole.
            while at < end {
                let data = backing.file.next_data(offset + at * FRAME_BYTES)?;
                let data = data.map_or(end, |data| (data - offset) / FRAME_BYTES).min(end);
                if data < end {
                    FrameRange::new(Gfn(frames.start.0 + data), 1).join(&mut found);
                }
                at = data + u64::from(data < end);
            }
        }
        Ok(found)
    }

    /// The next resident extent at or after `from`: its start and length in whole frames. `None` if
    /// there is none.
    pub fn next_populated(&self, from: Gpa) -> Option<(Gpa, u64)> {
        let mut left = self.regions().filter(|region| region.gpa.0 + region.bytes > from.0);
        left.find_map(|region| {
            let into = from.0.saturating_sub(region.gpa.0);
            let file = &self.files().get(region.file)?.file;
            let end = region.offset + region.bytes;
            let data = file.next_data(region.offset + into).ok()?.filter(|&at| at < end)?;
            let hole = file.next_hole(data).ok()?.min(end);
            Some((Gpa(region.gpa.0 + (data - region.offset)), hole - data))
        })
    }
}
