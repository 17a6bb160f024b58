//! The guest's RAM: guest-physical ranges, each a piece of a shared file that the VMM has mapped.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64};

use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa, HUGE_BYTES, HugeFrame, Hva};

/// About how many parts with an advice of their own RAM has.
const ADVISED_PARTS: u64 = 128;
/// Largest part with an advice of its own; larger RAM has more parts. So 500 VMs, or 32 TiB of RAM,
/// stay below half of the 65,530 mappings that a kernel gives a process (vm.max_map_count), unless
/// every other part is advised.
const ADVISED_BYTES_MOST: u64 = 1 << 30;

/// A run of guest-physical addresses that is contiguous in the VMM's address space and in its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// First guest-physical address.
    pub gpa: Gpa,
    /// Length in bytes.
    pub bytes: u64,
    /// Its address in the VMM's address space.
    pub hva: Hva,
    /// Index in [`Ram::files`] of the file that it lies in.
    pub file: usize,
    /// Offset in that file.
    pub offset: u64,
}

impl Region {
    /// The frames of this region.
    pub fn frames(&self) -> FrameRange {
        FrameRange::new(self.gpa.gfn(), self.bytes / FRAME_BYTES)
    }

    /// The region's range in the VMM's address space.
    pub fn hva_range(&self) -> HvaRange {
        HvaRange { start: self.hva, bytes: self.bytes }
    }
}

/// A piece of RAM as the host knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Address in the VMM's address space.
    pub hva: Hva,
    /// Index in [`Ram::files`] of the file that it lies in.
    pub file: usize,
    /// Offset in that file.
    pub offset: u64,
    /// Bytes from there to the end of the region.
    pub left_bytes: u64,
}

/// One file of RAM, and Ebb's own mapping of it.
pub struct Backing {
    /// The file.
    pub file: RamFile,
    /// Mapping of the whole file in this process, not watched by the userfaultfd.
    pub mapping: Mapping,
}

impl Backing {
    /// Returns a stand-in for a file that the VMM no longer has. All of it is a hole, and nobody
    /// else has it.
    ///
    /// # Errors
    /// As memfd_create(2) and mmap(2).
    pub fn stand_in(bytes: u64) -> io::Result<Backing> {
        let file = RamFile::create("ebb-gone", bytes)?;
        let mapping = Mapping::new(&file, 0, bytes)?;
        Ok(Backing { file, mapping })
    }

    /// Releases the file, and puts a stand-in in its place. The file's memory stays as long as
    /// somebody else has it.
    ///
    /// # Errors
    /// As [`Backing::stand_in`], and as dup3(2).
    pub fn let_go(&self) -> io::Result<()> {
        let stand_in = RamFile::create("ebb-gone", self.mapping.bytes())?;
        self.mapping.replace(&stand_in)?;
        self.file.replace(&stand_in)
    }
}

/// All RAM of a VM.
///
/// A file is gone once the VMM has unplugged what lies in it, and no longer has the file. Its
/// regions are no longer RAM then.
pub struct Ram {
    regions: Vec<Region>,
    files: Vec<Backing>,
    /// Whether each file is gone.
    gone: Vec<AtomicBool>,
}

/// The right to return RAM's memory to the host, which [`Ram`] alone does not give. The content of
/// a frame must be recorded before the frame is punched.
pub struct Puncher(Arc<Ram>);

impl Puncher {
    /// Makes the puncher of this RAM. Only the RAM's pager calls this.
    pub fn new(ram: Arc<Ram>) -> Puncher {
        Puncher(ram)
    }

    /// Returns the range's memory to the host. The range reads as zero from then on.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not in one region; as fallocate(2).
    pub fn punch(&self, frames: FrameRange) -> io::Result<()> {
        let (backing, offset) = self.0.backing(frames)?;
        backing.file.punch(offset, frames.bytes())
    }
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
        let gone = files.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Ram { regions, files, gone })
    }

    /// The regions in guest-physical order, without those that are gone.
    pub fn regions(&self) -> impl Iterator<Item = &Region> + Clone {
        self.regions.iter().filter(|region| !self.is_gone(region.file))
    }

    /// The regions that lie in a file, whether gone or not.
    pub fn regions_in(&self, file: usize) -> impl Iterator<Item = &Region> {
        self.regions.iter().filter(move |region| region.file == file)
    }

    /// The region that a frame lies in. `None` if it is not in RAM.
    pub fn region_of(&self, gfn: Gfn) -> Option<&Region> {
        let gpa = gfn.gpa();
        let index = self.regions.partition_point(|region| region.gpa <= gpa).checked_sub(1)?;
        let region = self.regions.get(index)?;
        (gpa.0 - region.gpa.0 < region.bytes && !self.is_gone(region.file)).then_some(region)
    }

    /// Records that the VMM no longer has this file. What lies in it is not RAM from now on, for
    /// good.
    pub fn set_gone(&self, file: usize) {
        if let Some(gone) = self.gone.get(file) {
            gone.store(true, Release);
        }
    }

    /// Whether the VMM no longer has this file.
    pub fn is_gone(&self, file: usize) -> bool {
        self.gone.get(file).is_none_or(|gone| gone.load(Acquire))
    }

    /// The files, including those that are gone.
    pub fn files(&self) -> &[Backing] {
        &self.files
    }

    fn files_there(&self) -> impl Iterator<Item = &Backing> {
        let all = self.files.iter().enumerate();
        all.filter(|(file, _)| !self.is_gone(*file)).map(|(_, backing)| backing)
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

    /// Size in bytes when the VM was attached, including what is gone by now.
    pub fn first_bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.bytes).sum()
    }

    /// The frame after the last one of RAM, whether gone or not. It never changes.
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
    pub fn place(&self, gpa: Gpa) -> Option<Place> {
        let region = self.region_of(gpa.gfn())?;
        let into = gpa.0 - region.gpa.0;
        Some(Place {
            hva: Hva(region.hva.0 + into),
            file: region.file,
            offset: region.offset + into,
            left_bytes: region.bytes - into,
        })
    }

    /// The place of a whole range. `None` if it is not in one region.
    pub fn range(&self, frames: FrameRange) -> Option<Place> {
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

    /// The part of a file that is advised to use small pages when a huge frame is: the file's
    /// index, and bytes in the file. Each part with an advice of its own is a mapping, and a
    /// process may have few of them. `None` if the huge frame is not in one region.
    pub fn advised(&self, huge: HugeFrame) -> Option<(usize, Range<u64>)> {
        let place = self.range(FrameRange::huge(huge))?;
        let share = (self.first_bytes() / ADVISED_PARTS).next_power_of_two();
        let part = share.clamp(HUGE_BYTES, ADVISED_BYTES_MOST);
        let start = place.offset / part * part;
        let end = (start + part).max(place.offset + HUGE_BYTES);
        let bytes = self.files.get(place.file)?.mapping.bytes();
        Some((place.file, start..end.min(bytes)))
    }

    /// Makes this process use small pages for a huge frame from now on, and for the part of the
    /// file around it ([`Ram::advised`]).
    ///
    /// # Errors
    /// `InvalidInput` if the huge frame is not in one region; as madvise(2).
    pub fn use_small_pages(&self, huge: HugeFrame) -> io::Result<()> {
        let (file, part) = self.advised(huge).ok_or(io::ErrorKind::InvalidInput)?;
        let backing = self.files.get(file).ok_or(io::ErrorKind::InvalidInput)?;
        backing.mapping.use_small_pages(part.start, part.end - part.start)
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
            let file = &self.files.get(region.file)?.file;
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
            let file = &self.files.get(region.file)?.file;
            let end = region.offset + region.bytes;
            let data = file.next_data(region.offset + into).ok()?.filter(|&at| at < end)?;
            let hole = file.next_hole(data).ok()?.min(end);
            Some((Gpa(region.gpa.0 + (data - region.offset)), hole - data))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_regions() -> Arc<Ram> {
        let file = RamFile::create("ram-test", 4 << 20).unwrap();
        let mapping = Mapping::new(&file, 0, 4 << 20).unwrap();
        let region = |gpa, hva, offset| Region {
            gpa: Gpa(gpa),
            bytes: 2 << 20,
            hva: Hva(hva),
            file: 0,
            offset,
        };
        let regions = vec![region(4 << 30, 0x9000_0000, 2 << 20), region(0, 0x7000_0000, 0)];
        Arc::new(Ram::new(regions, vec![Backing { file, mapping }]).unwrap())
    }

    #[test]
    fn translates_both_ways_and_not_beyond() {
        let ram = two_regions();
        assert_eq!(ram.bytes(), 4 << 20);
        assert_eq!(ram.place(Gpa((4 << 30) + 8)).unwrap().hva, Hva(0x9000_0008));
        assert_eq!(ram.gpa(Hva(0x7000_1000)), Some(Gpa(0x1000)));
        assert_eq!(ram.gpa(Hva(0x7020_0000)), None);
        assert_eq!(ram.place(Gpa(2 << 20)), None);
        assert_eq!(ram.place(Gpa(u64::MAX)), None);
        assert_eq!(ram.range(FrameRange::new(Gfn(511), 2)), None);
    }

    #[test]
    fn populates_and_punches() {
        let ram = two_regions();
        let frames = FrameRange::new(Gfn(1 << 20), 2);
        ram.populate(frames).unwrap();
        assert_eq!(ram.next_populated(Gpa(0)), Some((Gpa(4 << 30), 8192)));
        assert_eq!(ram.word(Gpa(4 << 30)), Some(0));
        assert!(ram.is_full(frames).unwrap());
        assert!(!ram.is_full(FrameRange::new(Gfn(1 << 20), 3)).unwrap());
        Puncher::new(Arc::clone(&ram)).punch(frames).unwrap();
        assert!(ram.is_hole(frames).unwrap());
        assert_eq!(ram.next_populated(Gpa(0)), None);
    }

    #[test]
    fn what_is_gone_is_no_ram() {
        let backing = |name| {
            let file = RamFile::create(name, 2 << 20).unwrap();
            let mapping = Mapping::new(&file, 0, 2 << 20).unwrap();
            Backing { file, mapping }
        };
        let region = |gpa, hva, file| Region {
            gpa: Gpa(gpa),
            bytes: 2 << 20,
            hva: Hva(hva),
            file,
            offset: 0,
        };
        let regions = vec![region(0, 0x7000_0000, 0), region(4 << 30, 0x9000_0000, 1)];
        let ram = Arc::new(Ram::new(regions, vec![backing("stays"), backing("goes")]).unwrap());
        let (end, frames) = (ram.end(), FrameRange::new(Gfn(1 << 20), 2));
        ram.populate(frames).unwrap();
        ram.set_gone(1);
        assert_eq!((ram.place(Gpa(4 << 30)), ram.gpa(Hva(0x9000_0000))), (None, None));
        assert_eq!((ram.clip(frames), ram.here(frames.start)), (None, None));
        assert!(
            Puncher::new(Arc::clone(&ram)).punch(frames).is_err() && ram.is_hole(frames).is_err()
        );
        assert_eq!((ram.bytes(), ram.first_bytes(), ram.end()), (2 << 20, 4 << 20, end));
        assert_eq!((ram.regions().count(), ram.regions_in(1).count()), (1, 1));
        assert_eq!((ram.next_populated(Gpa(0)), ram.resident_bytes().unwrap()), (None, 0));
        assert!(ram.place(Gpa(0)).is_some() && ram.place(Gpa(4096)).is_some());
    }

    #[test]
    fn a_layout_that_overlaps_is_refused() {
        let file = RamFile::create("ram-test", 4 << 20).unwrap();
        let mapping = Mapping::new(&file, 0, 4 << 20).unwrap();
        let region = Region { gpa: Gpa(0), bytes: 2 << 20, hva: Hva(0), file: 0, offset: 0 };
        let again = Region { gpa: Gpa(1 << 20), ..region };
        assert!(Ram::new(vec![region, again], vec![Backing { file, mapping }]).is_err());
    }
}
