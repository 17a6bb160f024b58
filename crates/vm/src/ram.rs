//! The guest's RAM: guest-physical ranges, each a piece of a shared file that the VMM has mapped.

mod backing;
mod puncher;
mod region;
mod resident;
mod small_pages;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64};

use ebb_sys::mapping::Mapping;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa, Hva};

pub use backing::Backing;
pub use puncher::Puncher;
pub use region::{FilePlace, Region};

/// All RAM of a VM.
///
/// A file counts as unplugged once the VMM has unplugged what lies in it, and no longer has the
/// file. Its regions are no longer RAM then.
pub struct Ram {
    regions: Vec<Region>,
    files: Vec<Backing>,
    /// Whether each file is unplugged.
    unplugged: Vec<AtomicBool>,
}

/// The regions overlap, are not frame aligned, or reach beyond their files.
#[derive(Debug, thiserror::Error)]
#[error("the VMM's RAM layout contradicts itself at {0:?}")]
pub struct BadLayout(Gpa);

impl Ram {
    /// Makes the RAM of `regions` over `files`.
    ///
    /// # Errors
    /// [`BadLayout`] if regions overlap, are not frame aligned, or reach beyond their file.
    pub fn new(mut regions: Vec<Region>, files: Vec<Backing>) -> Result<Ram, BadLayout> {
        regions.sort_by_key(|region| region.gpa);
        let mut free_from = 0;
        for region in &regions {
            let end = region.gpa.0.checked_add(region.bytes);
            let file_bytes = files.get(region.file).map_or(0, |file| file.mapping.bytes());
            let in_file = region.offset.checked_add(region.bytes).is_some_and(|e| e <= file_bytes);
            let aligned = (region.gpa.0 | region.bytes | region.hva.0 | region.offset)
                .is_multiple_of(FRAME_BYTES);
            let in_vmm = region.hva.0.checked_add(region.bytes).is_some();
            let fits = in_file && in_vmm && aligned;
            match end {
                Some(end) if region.gpa.0 >= free_from && fits => free_from = end,
                _ => return Err(BadLayout(region.gpa)),
            }
        }
        let unplugged = files.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Ram { regions, files, unplugged })
    }

    /// The regions in guest-physical order, without those that are unplugged.
    pub fn regions(&self) -> impl Iterator<Item = &Region> + Clone {
        self.regions.iter().filter(|region| !self.is_unplugged(region.file))
    }

    /// The regions that lie in a file, whether unplugged or not.
    pub fn regions_in(&self, file: usize) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(move |region| region.file == file)
    }

    /// The region that a frame lies in. `None` if it is not in RAM.
    pub fn region_of(&self, gfn: Gfn) -> Option<&Region> {
        let gpa = gfn.gpa();
        let index = self.regions.partition_point(|region| region.gpa <= gpa).checked_sub(1)?;
        let region = self.regions.get(index)?;
        (gpa.0 - region.gpa.0 < region.bytes && !self.is_unplugged(region.file)).then_some(region)
    }

    /// Records that the VMM no longer has this file. What lies in it is not RAM from now on, for
    /// good.
    pub fn set_unplugged(&self, file: usize) {
        if let Some(unplugged) = self.unplugged.get(file) {
            unplugged.store(true, Release);
        }
    }

    /// Whether the VMM no longer has this file.
    pub fn is_unplugged(&self, file: usize) -> bool {
        self.unplugged.get(file).is_none_or(|unplugged| unplugged.load(Acquire))
    }

    /// The files, including those that are unplugged.
    pub fn files(&self) -> &[Backing] {
        &self.files
    }

    fn files_there(&self) -> impl Iterator<Item = &Backing> {
        let all = self.files.iter().enumerate();
        all.filter(|(file, _)| !self.is_unplugged(*file)).map(|(_, backing)| backing)
    }

    /// Whether the VMM can shrink one of the files.
    pub fn may_shrink(&self) -> bool {
        self.files_there().any(|backing| backing.mapping.is_guarded())
    }

    /// Whether the VMM has shrunk a file, and this process touched what was lost: the guest's
    /// memory is lost.
    pub fn is_broken(&self) -> bool {
        self.files_there().any(|backing| backing.mapping.is_broken())
    }

    /// Size in bytes, as the guest sees it.
    pub fn bytes(&self) -> u64 {
        self.regions().map(|region| region.bytes).sum()
    }

    /// Size in bytes when the VM was attached, including what is unplugged by now.
    pub fn first_bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.bytes).sum()
    }

    /// The frame after the last one of RAM, whether unplugged or not. It never changes.
    pub fn end(&self) -> Gfn {
        self.regions.last().map_or(Gfn(0), |region| region.frames().end())
    }

    /// Bytes of memory that the host spends on the RAM.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn resident_bytes(&self) -> io::Result<u64> {
        self.files_there().map(|backing| backing.file.resident_bytes()).sum()
    }

    /// Where a guest-physical address lies. `None` if it is not in RAM.
    pub fn place(&self, gpa: Gpa) -> Option<FilePlace> {
        let region = self.region_of(gpa.gfn())?;
        let into = gpa.0 - region.gpa.0;
        Some(FilePlace {
            hva: Hva(region.hva.0 + into),
            file: region.file,
            offset: region.offset + into,
            left_bytes: region.bytes - into,
        })
    }

    /// The place of a whole range. `None` if it is not in one region.
    pub fn range(&self, frames: FrameRange) -> Option<FilePlace> {
        self.place(frames.start.gpa()).filter(|place| place.left_bytes >= frames.bytes())
    }

    /// The range in the VMM's address space. `None` if it is not in one region.
    pub fn hva_range(&self, frames: FrameRange) -> Option<HvaRange> {
        Some(HvaRange { start: self.range(frames)?.hva, bytes: frames.bytes() })
    }

    /// The guest-physical address at an address of the VMM.
    pub fn gpa(&self, hva: Hva) -> Option<Gpa> {
        // There are few regions: a search by another order would not pay.
        let region = self
            .regions()
            .find(|region| hva >= region.hva && hva.0 - region.hva.0 < region.bytes)?;
        Some(Gpa(region.gpa.0 + (hva.0 - region.hva.0)))
    }

    /// The part of a range that is RAM and lies in the region of its first frame.
    pub fn clip(&self, frames: FrameRange) -> Option<FrameRange> {
        let left = self.place(frames.start.gpa())?.left_bytes / FRAME_BYTES;
        Some(FrameRange::new(frames.start, frames.count.min(left)))
    }

    /// The parts of a range that are RAM, each in one region.
    pub fn parts(&self, frames: FrameRange) -> impl Iterator<Item = FrameRange> {
        self.regions().filter_map(move |region| {
            let all = region.frames();
            let start = all.start.max(frames.start);
            let count = all.end().min(frames.end()).0.checked_sub(start.0).filter(|&n| n > 0)?;
            Some(FrameRange::new(start, count))
        })
    }

    fn backing(&self, frames: FrameRange) -> io::Result<(&Backing, u64)> {
        let place = self.range(frames).ok_or(io::ErrorKind::InvalidInput)?;
        let backing = self.files.get(place.file).ok_or(io::ErrorKind::InvalidInput)?;
        Ok((backing, place.offset))
    }

    /// Gives the range memory, zeros where there was none.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not in one region; `ENOMEM` if the host has no memory.
    pub fn populate(&self, frames: FrameRange) -> io::Result<()> {
        let (backing, offset) = self.backing(frames)?;
        backing.mapping.populate(offset, frames.bytes())?;
        // The guest maps the memory in its own page table. An entry in this process's page table
        // would only make the next punch slower.
        backing.mapping.forget(offset, frames.bytes())
    }

    /// Maps those frames of a range that are in memory into this process's page table, where they
    /// stay. A hole that is made meanwhile may get memory again, zeros.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not in one region; as mincore(2), and as madvise(2) for
    /// `MADV_POPULATE_READ` (Linux 5.14).
    pub fn map(&self, frames: FrameRange) -> io::Result<()> {
        let (backing, offset) = self.backing(frames)?;
        let mut there = vec![false; usize::try_from(frames.count).unwrap_or(0)];
        backing.mapping.in_memory(offset, &mut there)?;
        let mut at = offset;
        for run in there.chunk_by(|one, next| one == next) {
            let bytes = run.len() as u64 * FRAME_BYTES;
            if run.first() == Some(&true) {
                backing.mapping.map(at, bytes)?;
            }
            at += bytes;
        }
        Ok(())
    }

    /// Maps those frames of a range that are in memory, or were until the host swapped them out.
    ///
    /// # Errors
    /// As [`Ram::map`], and as lseek(2).
    pub fn map_data(&self, frames: FrameRange) -> io::Result<()> {
        let (backing, offset) = self.backing(frames)?;
        let (mut at, end) = (offset, offset + frames.bytes());
        while let Some(data) = backing.file.next_data(at)?.filter(|data| *data < end) {
            at = backing.file.next_hole(data)?.min(end);
            backing.mapping.map(data, at - data)?;
        }
        Ok(())
    }

    /// Removes a range from this process's page table. The memory stays.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not in one region; as madvise(2).
    pub fn forget(&self, frames: FrameRange) -> io::Result<()> {
        let (backing, offset) = self.backing(frames)?;
        backing.mapping.forget(offset, frames.bytes())
    }

    /// Removes all of the RAM from this process's page table. The memory stays.
    ///
    /// # Errors
    /// As madvise(2).
    pub fn unmap(&self) -> io::Result<()> {
        self.files.iter().try_for_each(|file| file.mapping.forget(0, file.mapping.bytes()))
    }

    /// A frame's address in this process. `None` if it is not in RAM.
    pub fn here(&self, gfn: Gfn) -> Option<Hva> {
        let place = self.place(gfn.gpa())?;
        Some(Hva(self.files.get(place.file)?.mapping.address().0 + place.offset))
    }

    /// Reads the range. Holes read as zeros and stay holes.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not in one region; as pread(2).
    pub fn read(&self, frames: FrameRange, to: &mut [u8]) -> io::Result<()> {
        let (backing, offset) = self.backing(frames)?;
        backing.file.read_at(offset, to)
    }

    /// Reads one aligned word, once. A hole gets no memory.
    pub fn word(&self, gpa: Gpa) -> Option<u64> {
        self.bytes_at(gpa).map(u64::from_ne_bytes)
    }

    /// Reads `COUNT` aligned bytes, once. A hole gets no memory.
    pub fn bytes_at<const COUNT: usize>(&self, gpa: Gpa) -> Option<[u8; COUNT]> {
        let place = self.place(gpa).filter(|_| gpa.0.is_multiple_of(COUNT as u64))?;
        let mut bytes = [0; COUNT];
        self.files.get(place.file)?.file.read_at(place.offset, &mut bytes).ok()?;
        Some(bytes)
    }

    /// Returns words in place. Loading one from a hole allocates a page, so this is for memory that
    /// is known to be resident.
    pub fn words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU64]> {
        let (mapping, offset) = self.in_place(gpa, count, 8)?;
        mapping.words(offset, count)
    }

    /// Returns words of four bytes each in place, as [`Ram::words`] does.
    pub fn half_words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU32]> {
        let (mapping, offset) = self.in_place(gpa, count, 4)?;
        mapping.half_words(offset, count)
    }

    /// Returns words of two bytes each in place, as [`Ram::words`] does.
    pub fn quarter_words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU16]> {
        let (mapping, offset) = self.in_place(gpa, count, 2)?;
        mapping.quarter_words(offset, count)
    }

    fn in_place(&self, gpa: Gpa, count: usize, each_bytes: u64) -> Option<(&Mapping, u64)> {
        let place = self.place(gpa)?;
        let bytes = u64::try_from(count).ok()?.checked_mul(each_bytes)?;
        let backing = self.files.get(place.file).filter(|_| bytes <= place.left_bytes)?;
        Some((&backing.mapping, place.offset))
    }
}
