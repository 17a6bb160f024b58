//! The memory of a process that is a guest's RAM. Backends follow each other, in guest-physical
//! order, at offsets from 0.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use ebb_sys::pagemap::Pagemap;
use ebb_sys::process::{Process, Vma};
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::HvaRange;
use ebb_units::Hva;
use ebb_vm::command_line::{CommandLine, RamBlock};

/// Most RAM of a VM, in bytes.
const RAM_BYTES_MAX: u64 = 64 << 40;

/// Longest command line and list of mappings of a VMM, in bytes: several times those of real ones.
pub(crate) const COMMAND_LINE_MAX: u64 = 1 << 20;
pub(crate) const MAPS_MAX: u64 = 16 << 20;
/// Longest path in a message, in characters.
const PATH_MAX: usize = 128;

/// Why the RAM of a process was not found.
#[derive(Debug, thiserror::Error)]
pub enum NoRam {
    /// The process may not be inspected, or has ended.
    #[error("cannot look into process {pid}: {source}")]
    Io {
        /// The process.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// No mapping has the size of the RAM.
    #[error("its command line gives {bytes} bytes of RAM, and no mapping of it has that size")]
    NotMapped {
        /// Size of the backend that was not found.
        bytes: u64,
    },
    /// The command line gives more than any VM has.
    #[error("its command line gives {0} bytes of RAM, and at most 64 TiB are looked at")]
    TooLarge(u64),
    /// The RAM is in a file on a disk.
    #[error("its RAM is in {0}, which is no memory: only tmpfs, hugetlbfs and memfds are read")]
    OnDisk(String),
}

/// A guest's RAM in its VMM.
pub(crate) struct Ram {
    process: Process,
    blocks: Vec<Block>,
    bytes: u64,
}

/// One backend.
struct Block {
    /// Where it begins among all.
    start: u64,
    bytes: u64,
    place: Place,
}

enum Place {
    /// In a file, from this offset on.
    File(RamFile, u64),
    /// In private memory of the process.
    Private { memory: File, pagemap: Pagemap, address: Hva },
}

/// A run of mappings that continue each other.
struct Row<'a> {
    first: &'a Vma,
    bytes: u64,
}

impl Ram {
    /// Finds the RAM that the command line gives.
    pub(crate) fn find(process: Process, line: &CommandLine) -> Result<Ram, NoRam> {
        let mut ram = Ram { process, blocks: Vec::new(), bytes: 0 };
        ram.open(line)?;
        Ok(ram)
    }

    /// Closes its files, which would keep the memory of a process that ends.
    pub(crate) fn close(&mut self) {
        self.blocks.clear();
    }

    /// Whether it can be read.
    pub(crate) fn is_open(&self) -> bool {
        !self.blocks.is_empty()
    }

    /// Finds it again, after it was closed.
    pub(crate) fn open(&mut self, line: &CommandLine) -> Result<(), NoRam> {
        let process = &self.process;
        let pid = process.pid();
        let io = |source| NoRam::Io { pid, source };
        let mappings = process.mappings_within(MAPS_MAX).map_err(io)?;
        let asked = line.ram();
        let bytes = line.ram_bytes();
        if bytes > RAM_BYTES_MAX {
            return Err(NoRam::TooLarge(bytes));
        }
        let (mut blocks, mut start, mut found) = (Vec::new(), 0, Vec::new());
        for RamBlock { bytes, .. } in asked {
            let first = place_of(&mappings, bytes, &found).ok_or(NoRam::NotMapped { bytes })?;
            found.push(first.start);
            let on_disk = || NoRam::OnDisk(first.name.chars().take(PATH_MAX).collect());
            let place = Place::of(process, first).map_err(io)?.ok_or_else(on_disk)?;
            blocks.push(Block { start, bytes, place });
            start += bytes;
        }
        (self.blocks, self.bytes) = (blocks, start);
        Ok(())
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The process that has it.
    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    /// Reads bytes of one frame. `None`: it is not in memory.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) -> Option<()> {
        let (block, into) = self.block(offset)?;
        match &block.place {
            Place::File(file, first) => {
                let at = first + into;
                // What is swapped out counts as data, and a read would bring it in.
                let is_here = file.next_data(at).ok()? == Some(at)
                    && file.cached_bytes(at, to.len() as u64).ok()? != Some(0);
                is_here.then(|| file.read_at(at, to).ok())?
            }
            Place::Private { memory, pagemap, address } => {
                let at = Hva(address.0 + into);
                let is_present = pagemap.is_present(at).ok()?;
                is_present.then(|| memory.read_exact_at(to, at.0).ok())?
            }
        }
    }

    /// Visits what is in memory of `bytes` bytes from a frame on, as `(offset, bytes)`, frame
    /// aligned and in order.
    pub(crate) fn present(&self, offset: u64, bytes: u64, mut visit: impl FnMut(u64, u64)) {
        let end = offset.saturating_add(bytes);
        for block in &self.blocks {
            let (from, to) = (offset.max(block.start), end.min(block.start + block.bytes));
            if from < to {
                let range = (from - block.start, to - block.start);
                // What cannot be looked up counts as not in memory.
                let _ = block.present(range, |at, bytes| visit(block.start + at, bytes));
            }
        }
    }

    /// How much is in memory of `bytes` bytes from a frame on, in bytes.
    pub(crate) fn present_bytes(&self, offset: u64, bytes: u64) -> u64 {
        if let Some((Block { place: Place::File(file, first), bytes: all, .. }, into)) =
            self.block(offset)
            && bytes <= all - into
            && let Ok(Some(cached)) = file.cached_bytes(first + into, bytes)
        {
            return cached;
        }
        let mut present = 0;
        self.present(offset, bytes, |_, bytes| present += bytes);
        present
    }

    /// Its memory in the host, in bytes. What the host has swapped out of a file of RAM counts, too.
    /// For private RAM this includes other private memory of the
    /// VMM, as far as the RAM's size has room for that.
    pub(crate) fn resident_bytes(&self) -> io::Result<u64> {
        let (mut resident, mut private) = (0, 0);
        for block in &self.blocks {
            match &block.place {
                Place::File(file, _) => resident += file.resident_bytes()?.min(block.bytes),
                Place::Private { .. } => private += block.bytes,
            }
        }
        match private {
            0 => Ok(resident),
            _ => Ok(resident + self.process.anonymous_bytes()?.min(private)),
        }
    }

    fn block(&self, offset: u64) -> Option<(&Block, u64)> {
        let mut blocks = self.blocks.iter();
        blocks.find_map(|block| {
            let into = offset.checked_sub(block.start)?;
            (into < block.bytes).then_some((block, into))
        })
    }
}

impl Block {
    /// As [`Ram::present`], with offsets in this block.
    fn present(&self, (from, end): (u64, u64), mut visit: impl FnMut(u64, u64)) -> io::Result<()> {
        match &self.place {
            Place::File(file, first) => {
                let (mut at, end) = (first + from, first + end);
                while let Some(start) = file.next_data(at)?.filter(|start| *start < end) {
                    at = file.next_hole(start)?.min(end);
                    if at <= start {
                        break;
                    }
                    visit(start - first, at - start);
                }
                Ok(())
            }
            Place::Private { pagemap, address, .. } => {
                let range = HvaRange { start: Hva(address.0 + from), bytes: end - from };
                pagemap.present(range, |part| visit(part.start.0 - address.0, part.bytes))
            }
        }
    }
}

impl Place {
    /// Opens the RAM that begins in this mapping. `None`: it is in a file on a disk.
    fn of(process: &Process, first: &Vma) -> io::Result<Option<Place>> {
        if first.inode != 0 {
            let Some(file) = process.mapped_file(first)? else { return Ok(None) };
            return Ok(Some(Place::File(RamFile::from(OwnedFd::from(file)), first.offset)));
        }
        let (memory, pagemap) = (process.memory()?, Pagemap::open(process)?);
        Ok(Some(Place::Private { memory, pagemap, address: first.start }))
    }
}

/// Finds the first mapping of a backend of this size: mappings that continue each other, or one
/// alone. QEMU maps backends in their order, each below the one before, and files get their inode
/// numbers in this order.
pub(crate) fn place_of<'a>(mappings: &'a [Vma], bytes: u64, found: &[Hva]) -> Option<&'a Vma> {
    let rows = rows(mappings).into_iter().filter(|row| row.bytes == bytes).map(|row| row.first);
    let alone = mappings.iter().filter(|vma| is_ram(vma) && vma.bytes == bytes);
    let is_new = |vma: &&Vma| !found.contains(&vma.start);
    let order = |vma: &&Vma| (vma.inode, std::cmp::Reverse(vma.start));
    rows.filter(is_new).min_by_key(order).or_else(|| alone.filter(is_new).min_by_key(order))
}

/// Joins mappings that continue each other: the kernel splits one whose parts have other flags.
fn rows(mappings: &[Vma]) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    for vma in mappings.iter().filter(|vma| is_ram(vma)) {
        match rows.last_mut().filter(|row| row.continues_with(vma)) {
            Some(row) => row.bytes += vma.bytes,
            None => rows.push(Row { first: vma, bytes: vma.bytes }),
        }
    }
    rows
}

/// Whether a mapping may be RAM: writable memory that is not executed. Private memory has no name.
fn is_ram(vma: &Vma) -> bool {
    let is_private = vma.inode == 0 && vma.name.is_empty();
    vma.writable && !vma.executable && (vma.inode != 0 || is_private)
}

impl Row<'_> {
    fn continues_with(&self, next: &Vma) -> bool {
        let first = self.first;
        let same_file = next.inode == first.inode && next.name == first.name;
        let in_order = next.inode == 0 || next.offset == first.offset + self.bytes;
        same_file && in_order && next.start.0 == first.start.0 + self.bytes
    }
}

#[cfg(test)]
mod tests {
    use ebb_sys::process::parse_mappings;

    use super::*;

    fn start_of(maps: &str, bytes: u64, found: &[Hva]) -> Option<u64> {
        place_of(&parse_mappings(maps), bytes, found).map(|vma| vma.start.0)
    }

    #[test]
    fn a_backend_is_found_by_its_size() {
        let maps = "\
            100000-200000 rw-p 00000000 00:00 0 [heap]\n\
            400000-500000 rwxp 00000000 00:00 0\n\
            600000-700000 rw-p 00000000 00:00 0\n\
            800000-900000 rw-s 00000000 00:01 7 /memfd:memory-backend-memfd (deleted)\n";
        assert_eq!(start_of(maps, 1 << 20, &[]), Some(0x60_0000));
        assert_eq!(start_of(maps, 1 << 20, &[Hva(0x60_0000)]), Some(0x80_0000));
        assert_eq!(start_of(maps, 2 << 20, &[]), None);
    }

    #[test]
    fn parts_of_a_split_mapping_are_one_backend() {
        let maps = "\
            100000-180000 rw-s 00000000 00:01 7 /memfd:a\n\
            180000-200000 rw-s 00080000 00:01 7 /memfd:a\n\
            200000-280000 rw-s 00000000 00:01 8 /memfd:a\n";
        assert_eq!(start_of(maps, 1 << 20, &[]), Some(0x10_0000));
        assert_eq!(start_of(maps, 1 << 19, &[]), Some(0x20_0000));
    }

    #[test]
    fn backends_of_one_size_come_in_their_order() {
        let files = "\
            100000-200000 rw-s 00000000 00:01 8 /memfd:a\n\
            300000-400000 rw-s 00000000 00:01 7 /memfd:a\n";
        assert_eq!(start_of(files, 1 << 20, &[]), Some(0x30_0000));
        let private = "\
            100000-200000 rw-p 00000000 00:00 0\n\
            300000-400000 rw-p 00000000 00:00 0\n";
        assert_eq!(start_of(private, 1 << 20, &[]), Some(0x30_0000));
        assert_eq!(start_of(private, 1 << 20, &[Hva(0x30_0000)]), Some(0x10_0000));
    }
}
