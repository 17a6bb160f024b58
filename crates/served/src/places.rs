//! Translates a front end's addresses into Ebb's. Ebb numbers a VM's frames as they were when it
//! was first managed. A memory device that is unplugged and plugged in again at another address
//! keeps its file, so the front end then has it at other addresses.

use std::io;
use std::sync::{Arc, PoisonError, RwLock, Weak};

use ebb_sys::guest_mapping;
use ebb_units::{FRAME_BYTES, FrameRange, Gpa};
use ebb_vhost::{DmaFault, Segment};
use ebb_vm::Ram;
use rustix::fs::fstat;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// The places in all memory that was asked about. A front end's memory changes only when memory is
/// plugged.
#[derive(Default)]
pub(crate) struct Places(RwLock<Vec<Known>>);

/// Memory that was asked about, as long as somebody uses it.
struct Known {
    memory: Weak<GuestMemoryMmap>,
    pieces: Arc<[Piece]>,
}

/// A run of the front end's memory that is also a run of Ebb's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Piece {
    /// The front end's address.
    gpa: u64,
    bytes: u64,
    /// Ebb's address.
    at: u64,
}

impl Places {
    /// Translates segments of `memory` into Ebb's addresses in `ram`; `None`: they are the same.
    /// Segments in none of its files are left out, since that memory is never reclaimed or evicted.
    ///
    /// # Errors
    /// The files cannot be identified.
    pub(crate) fn place(
        &self,
        memory: &Arc<GuestMemoryMmap>,
        ram: &Ram,
        segments: &[Segment],
    ) -> Result<Option<Vec<Segment>>, DmaFault> {
        let pieces = self.pieces(memory, ram).map_err(|error| {
            tracing::error!("the memory that a front end shares: {error}");
            DmaFault::NotNow(segments.first().map(|segment| segment.gpa).unwrap_or_default())
        })?;
        let is_same = pieces.iter().all(|piece| piece.gpa == piece.at);
        let is_inside = |segment: &Segment| pieces.iter().any(|piece| piece.holds(*segment));
        if is_same && segments.iter().all(is_inside) {
            return Ok(None);
        }
        let each = segments.iter();
        Ok(Some(each.flat_map(|segment| pieces.iter().filter_map(|p| p.part(*segment))).collect()))
    }

    /// Removes frames from this process's page table, in all memory that was asked about.
    pub(crate) fn forget(&self, frames: FrameRange) {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        for Known { memory, pieces } in known.iter() {
            let Some(memory) = memory.upgrade() else { continue };
            let theirs = pieces.iter().filter_map(|piece| piece.theirs(frames));
            for (region, frames) in theirs.flat_map(|part| memory.iter().map(move |it| (it, part)))
            {
                if let Err(error) = guest_mapping::forget(region, frames) {
                    tracing::debug!("{frames:?} of a device's view: {error}");
                }
            }
        }
    }

    fn pieces(&self, memory: &Arc<GuestMemoryMmap>, ram: &Ram) -> io::Result<Arc<[Piece]>> {
        // A weak pointer keeps its address from being used again, so an equal address means the
        // same memory.
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let is_it = |known: &&Known| known.memory.as_ptr() == Arc::as_ptr(memory);
        if let Some(known) = known.iter().find(is_it) {
            return Ok(Arc::clone(&known.pieces));
        }
        drop(known);
        let pieces: Arc<[Piece]> = pieces(memory, ram)?.into();
        let new = Known { memory: Arc::downgrade(memory), pieces: Arc::clone(&pieces) };
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|known| known.memory.strong_count() > 0);
        known.push(new);
        Ok(pieces)
    }
}

fn pieces(memory: &GuestMemoryMmap, ram: &Ram) -> io::Result<Vec<Piece>> {
    let files = ram.files().iter().map(|backing| backing.identity());
    let files = files.collect::<io::Result<Vec<_>>>()?;
    let mut pieces = Vec::new();
    for shared in memory.iter() {
        let from = shared.file_offset().ok_or(io::ErrorKind::InvalidInput)?;
        let stat = fstat(from.file())?;
        let is_in = |file: usize| files.get(file) == Some(&(stat.st_dev, stat.st_ino));
        let end = from.start().saturating_add(shared.len());
        for region in ram.regions().filter(|region| is_in(region.file)) {
            let start = region.offset.max(from.start());
            let end = end.min(region.offset + region.bytes);
            if start < end {
                pieces.push(Piece {
                    gpa: shared.start_addr().0 + (start - from.start()),
                    bytes: end - start,
                    at: region.gpa.0 + (start - region.offset),
                });
            }
        }
    }
    Ok(pieces)
}

impl Piece {
    fn holds(&self, segment: Segment) -> bool {
        let inside = segment.gpa.0.checked_sub(self.gpa);
        inside.is_some_and(|at| at + u64::from(segment.bytes) <= self.bytes)
    }

    /// The part of these frames of Ebb's that lies in the piece, at the front end's addresses.
    fn theirs(&self, frames: FrameRange) -> Option<FrameRange> {
        let start = frames.start.gpa().0.max(self.at);
        let end = frames.end().gpa().0.min(self.at + self.bytes);
        let count = end.checked_sub(start)? / FRAME_BYTES;
        Some(FrameRange::new(Gpa(self.gpa + (start - self.at)).gfn(), count))
    }

    /// The part of a segment that lies in the piece, at Ebb's addresses.
    fn part(&self, segment: Segment) -> Option<Segment> {
        let start = segment.gpa.0.max(self.gpa);
        let end = segment.gpa.0.saturating_add(segment.bytes.into()).min(self.gpa + self.bytes);
        let bytes = u32::try_from(end.checked_sub(start)?).ok().filter(|bytes| *bytes > 0)?;
        Some(Segment { gpa: Gpa(self.at + (start - self.gpa)), bytes })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;
    use ebb_sys::mapping::Mapping;
    use ebb_sys::pagemap::Pagemap;
    use ebb_sys::process::Process;
    use ebb_sys::ram_file::RamFile;
    use ebb_sys::uffd::HvaRange;
    use ebb_units::{Gfn, Hva};
    use ebb_vm::Region;
    use ebb_vm::ram::Backing;
    use vm_memory::{Bytes, FileOffset, GuestAddress};

    const BYTES: u64 = 0x4000;

    /// Two files: Ebb has the first one at 0 and the second one at 0x10000.
    fn ram() -> ([RamFile; 2], Ram) {
        let files = ["first", "second"].map(|name| RamFile::create(name, BYTES).unwrap());
        let backing = |file: &RamFile| {
            let file = RamFile::from(file.as_fd().try_clone_to_owned().unwrap());
            let mapping = Mapping::new(&file, 0, BYTES).unwrap();
            Backing::new(file, mapping)
        };
        let region = |file: u64| Region {
            gpa: Gpa(0x10000 * file),
            bytes: BYTES,
            hva: Hva(0x10_0000 * (file + 1)),
            file: file as usize,
            offset: 0,
        };
        let backings = files.iter().map(backing).collect();
        let ram = Ram::new((0..2).map(region).collect(), backings).unwrap();
        (files, ram)
    }

    fn shared(files: &[RamFile; 2], at: [u64; 2]) -> Arc<GuestMemoryMmap> {
        let again = |file: &RamFile| File::from(file.as_fd().try_clone_to_owned().unwrap());
        let mut table: Vec<_> = at.into_iter().zip(files).collect();
        table.sort_by_key(|(gpa, _)| *gpa);
        let table = table.into_iter().map(|(gpa, file)| {
            (GuestAddress(gpa), BYTES as usize, Some(FileOffset::new(again(file), 0)))
        });
        Arc::new(GuestMemoryMmap::from_ranges_with_files(table).unwrap())
    }

    fn segment(gpa: u64, bytes: u32) -> Segment {
        Segment { gpa: Gpa(gpa), bytes }
    }

    #[test]
    fn what_lies_as_it_lay_is_where_it_is() {
        let (places, (files, ram)) = (Places::default(), ram());
        let memory = shared(&files, [0, 0x10000]);
        for segments in [vec![segment(0, 0x4000)], vec![segment(0x10800, 0x1000), segment(8, 8)]] {
            assert_eq!(places.place(&memory, &ram, &segments), Ok(None));
        }
        // Memory that Ebb does not know is left out.
        let far = places.place(&memory, &ram, &[segment(0x20000, 16), segment(0x3000, 16)]);
        assert_eq!(far, Ok(Some(vec![segment(0x3000, 16)])));
    }

    #[test]
    fn what_was_plugged_in_again_at_another_address_is_found() {
        let (places, (files, ram)) = (Places::default(), ram());
        let before = shared(&files, [0, 0x10000]);
        assert_eq!(places.place(&before, &ram, &[segment(0x10000, 8)]), Ok(None));
        let after = shared(&files, [0, 0x40000]);
        let of = |memory, segments: &[Segment]| places.place(memory, &ram, segments);
        let moved = of(&after, &[segment(0x1000, 64), segment(0x40800, 0x1000)]);
        assert_eq!(moved, Ok(Some(vec![segment(0x1000, 64), segment(0x10800, 0x1000)])));
        // Nothing of Ebb's is there any more.
        assert_eq!(of(&after, &[segment(0x10000, 8)]), Ok(Some(Vec::new())));
        let exchanged = shared(&files, [0x10000, 0]);
        let found = of(&exchanged, &[segment(0x10000, 8), segment(0x1000, 8)]);
        assert_eq!(found, Ok(Some(vec![segment(0, 8), segment(0x11000, 8)])));
    }

    /// Each device has a mapping of its own.
    #[test]
    fn all_memory_that_somebody_has_is_known() {
        let (places, (files, ram)) = (Places::default(), ram());
        let memories = [shared(&files, [0, 0x10000]), shared(&files, [0, 0x40000])];
        for memory in &memories {
            places.place(memory, &ram, &[segment(0, 8)]).unwrap();
            memory.write_obj(7_u64, GuestAddress(0)).unwrap();
        }
        places.forget(FrameRange::new(Gfn(0), 1));
        let pagemap = Pagemap::open(&Process::own().unwrap()).unwrap();
        for memory in &memories {
            let at = Hva(memory.iter().next().unwrap().as_ptr().addr() as u64);
            let range = HvaRange { start: at, bytes: BYTES };
            pagemap.mapped(range, |part| panic!("{part:?} is mapped")).unwrap();
        }
        let [first, _second] = memories;
        drop(first);
        places.place(&shared(&files, [0, 0x20000]), &ram, &[segment(0, 8)]).unwrap();
        assert_eq!(places.0.read().unwrap().len(), 2, "what nobody has is forgotten");
    }

    #[test]
    fn frames_are_forgotten_where_the_front_end_has_them() {
        let (places, (files, ram)) = (Places::default(), ram());
        let memory = shared(&files, [0, 0x40000]);
        let frames = |start, count| FrameRange::new(Gfn(start), count);
        // Nobody has asked about any memory yet.
        places.forget(frames(0, 4));
        places.place(&memory, &ram, &[segment(0x40000, 8)]).unwrap();
        let here = memory.iter().nth(1).unwrap();
        let at = Hva(here.as_ptr().addr() as u64);
        let pagemap = Pagemap::open(&Process::own().unwrap()).unwrap();
        let mapped = || {
            let (mut bytes, all) = (0, HvaRange { start: at, bytes: BYTES });
            pagemap.mapped(all, |part| bytes += part.bytes).unwrap();
            bytes / FRAME_BYTES
        };
        for gpa in (0x40000..0x44000).step_by(0x1000) {
            memory.write_obj(gpa, GuestAddress(gpa)).unwrap();
        }
        for (forgotten, left) in [(frames(0, 4), 4), (frames(0x11, 1), 3), (frames(0, 0x100), 0)] {
            places.forget(forgotten);
            assert_eq!(mapped(), left, "{forgotten:?}");
        }
        assert_eq!(memory.read_obj::<u64>(GuestAddress(0x42000)).unwrap(), 0x42000);
    }
}
