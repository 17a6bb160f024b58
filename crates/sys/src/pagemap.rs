//! Which pages of another process are mapped, and to which page frames: proc_pid_pagemap(5).

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use ebb_units::{FRAME_BYTES, Hva};

use crate::process::Process;
use crate::uffd::HvaRange;

/// `struct page_region`, `include/uapi/linux/fs.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const _: () = assert!(size_of::<ScanArg>() == 96);
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u64 = 3 << 30 | (size_of::<ScanArg>() as u64) << 16 | 0x66 << 8 | 16;
const PAGE_IS_PRESENT: u64 = 1 << 3;
/// The entry is neither empty nor present. In shared memory it is a page that the kernel moves at
/// this moment, or a marker of userfaultfd.
const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// The entry is not protected by userfaultfd. Its markers are protected.
const PAGE_IS_WRITTEN: u64 = 1 << 1;
/// The categories that distinguish pages that are moved from markers. Asking for pages of a file
/// would, too, but makes the kernel look at each page: 10.5 instead of 2.9 ms for a GiB.
const RETURNED: u64 = PAGE_IS_PRESENT | PAGE_IS_WRITTEN;
/// Length of the vector. With longer ones, kernels were seen to repeat entries.
const REGIONS: usize = 512;
/// Bit of an entry of the file: the page is in memory.
const ENTRY_PRESENT: u64 = 1 << 63;
/// Bits of an entry of the file: the number of the page frame.
const ENTRY_FRAME: u64 = (1 << 55) - 1;
const ENTRY_BYTES: usize = size_of::<u64>();
/// Entries read at once.
const ENTRIES: u64 = 4096;

/// The page table of a process, for reading.
pub struct Pagemap {
    file: File,
}

impl Pagemap {
    /// Opens the page table of `process`.
    ///
    /// # Errors
    /// As open(2) of `/proc/PID/pagemap`.
    pub fn open(process: &Process) -> io::Result<Pagemap> {
        Ok(Pagemap { file: File::open(format!("/proc/{}/pagemap", process.pid()))? })
    }

    /// Visits the mapped parts of `range`, which is shared memory, in order. Pages that the kernel
    /// moves at this moment count as mapped, unless they are protected.
    ///
    /// # Errors
    /// `ENOTTY`: the kernel has no PAGEMAP_SCAN (it came with Linux 6.7).
    pub fn mapped(&self, range: HvaRange, visit: impl FnMut(HvaRange)) -> io::Result<()> {
        let asked = ScanArg {
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: RETURNED,
            ..ScanArg::default()
        };
        self.scan(range, &asked, visit)
    }

    /// Visits the regions of `range` that have what is asked for, and some of what is to be
    /// returned.
    fn scan(
        &self,
        range: HvaRange,
        asked: &ScanArg,
        mut visit: impl FnMut(HvaRange),
    ) -> io::Result<()> {
        let mut regions = [PageRegion::default(); REGIONS];
        let (mut start, end) = (range.start.0, range.start.0 + range.bytes);
        while start < end {
            let mut arg = ScanArg {
                size: size_of::<ScanArg>() as u64,
                start,
                end,
                vec: regions.as_mut_ptr() as u64,
                vec_len: REGIONS as u64,
                ..*asked
            };
            // SAFETY: `arg` is the struct whose size is encoded in the request, and its vector is
            // `regions` with its length.
            let got = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
            let count = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
            let found = regions.iter().take(count);
            for region in found.filter(|region| region.categories & asked.return_mask != 0) {
                visit(HvaRange { start: Hva(region.start), bytes: region.end - region.start });
            }
            // Without progress the walk would never end.
            if arg.walk_end <= start {
                return Err(io::ErrorKind::InvalidData.into());
            }
            start = arg.walk_end;
        }
        Ok(())
    }

    /// Whether the page at `address` is mapped to memory.
    ///
    /// # Errors
    /// As pread(2) of `/proc/PID/pagemap`.
    pub fn is_present(&self, address: Hva) -> io::Result<bool> {
        let mut bytes = [0; ENTRY_BYTES];
        self.file.read_exact_at(&mut bytes, address.0 / FRAME_BYTES * ENTRY_BYTES as u64)?;
        Ok(u64::from_ne_bytes(bytes) & ENTRY_PRESENT != 0)
    }

    /// Visits the parts of `range` that are mapped to memory, in order. Unlike [`Self::mapped`],
    /// this works for private memory and on all kernels.
    ///
    /// # Errors
    /// As pread(2) of `/proc/PID/pagemap`.
    pub fn present(&self, range: HvaRange, mut visit: impl FnMut(HvaRange)) -> io::Result<()> {
        let asked = ScanArg {
            category_mask: PAGE_IS_PRESENT,
            return_mask: PAGE_IS_PRESENT,
            ..ScanArg::default()
        };
        match self.scan(range, &asked, &mut visit) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                self.entries(range, |page, entry| {
                    if entry & ENTRY_PRESENT != 0 {
                        let start = Hva(range.start.0 + page * FRAME_BYTES);
                        visit(HvaRange { start, bytes: FRAME_BYTES });
                    }
                    Ok(())
                })
            }
            scanned => scanned,
        }
    }

    /// Visits the pages of `range` that are mapped to memory, in order: (number of the page in the
    /// range, number of its page frame).
    ///
    /// # Errors
    /// `PermissionDenied`: the kernel shows frames only with `CAP_SYS_ADMIN`.
    pub fn frames(&self, range: HvaRange, mut visit: impl FnMut(u64, u64)) -> io::Result<()> {
        self.entries(range, |page, entry| {
            match (entry & ENTRY_PRESENT != 0, entry & ENTRY_FRAME) {
                (false, _) => {}
                (true, 0) => return Err(io::ErrorKind::PermissionDenied.into()),
                (true, frame) => visit(page, frame),
            }
            Ok(())
        })
    }

    /// Visits the entries of all pages of `range`, in order, each with its number in the range.
    fn entries(
        &self,
        range: HvaRange,
        mut visit: impl FnMut(u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let first = range.start.0 / FRAME_BYTES;
        let (mut page, pages) = (0, range.bytes / FRAME_BYTES);
        while page < pages {
            let count = ENTRIES.min(pages - page);
            let mut bytes = vec![0; count as usize * ENTRY_BYTES];
            self.file.read_exact_at(&mut bytes, (first + page) * ENTRY_BYTES as u64)?;
            let (entries, _) = bytes.as_chunks::<ENTRY_BYTES>();
            for (page, entry) in (page..).zip(entries) {
                visit(page, u64::from_ne_bytes(*entry))?;
            }
            page += count;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::mapping::Mapping;
    use crate::ram_file::RamFile;

    #[test]
    fn pages_that_were_touched_are_mapped() {
        const BYTES: u64 = 16 << 20;
        let file = RamFile::create("pagemap", BYTES).unwrap();
        let mapping = Mapping::new(&file, 0, BYTES).unwrap();
        mapping.use_huge_pages(false).unwrap();
        // These are more runs than one vector takes.
        let touched: Vec<u64> = (0..BYTES / 4096).filter(|page| page % 3 == 0).collect();
        for page in &touched {
            mapping.populate(page * 4096, 4096).unwrap();
        }
        let own = Process::open(std::process::id() as i32).unwrap();
        let all = HvaRange { start: mapping.address(), bytes: BYTES };
        let mut seen = Vec::new();
        let scan = Pagemap::open(&own).unwrap().mapped(all, |part| {
            let first = (part.start.0 - all.start.0) / 4096;
            seen.extend(first..first + part.bytes / 4096);
        });
        match scan {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                eprintln!("SKIPPED: the kernel has no PAGEMAP_SCAN");
            }
            result => {
                result.unwrap();
                assert_eq!(seen, touched);
            }
        }
    }

    /// Each round leaves every second page free, so that the kernel has some to move.
    #[test]
    fn pages_that_the_kernel_moves_are_mapped() {
        const BYTES: u64 = 8 << 20;
        let compact = || fs::write("/proc/sys/vm/compact_memory", "1");
        if let Err(error) = compact() {
            return eprintln!("SKIPPED: the kernel moves pages for root only: {error}");
        }
        let pagemap = Pagemap::open(&Process::own().unwrap()).unwrap();
        let new = || {
            let file = RamFile::create("moved", BYTES).unwrap();
            let mapping = Mapping::new(&file, 0, BYTES).unwrap();
            mapping.use_huge_pages(false).unwrap();
            mapping
        };
        let all_are_seen = |mapping: &Mapping| {
            let (mut seen, start) = (0, mapping.address());
            match pagemap.mapped(HvaRange { start, bytes: BYTES }, |part| seen += part.bytes) {
                // `pages_that_were_touched_are_mapped` says that this is skipped.
                Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => true,
                result => result.map(|()| seen == BYTES).unwrap(),
            }
        };
        let is_done = AtomicBool::new(false);
        let missed = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Relaxed) {
                    compact().unwrap();
                }
            });
            let round = |_| {
                let (stays, goes) = (new(), new());
                for at in (0..BYTES).step_by(4096) {
                    stays.populate(at, 4096).unwrap();
                    goes.populate(at, 4096).unwrap();
                }
                drop(goes);
                (0..20).any(|_| !all_are_seen(&stays))
            };
            let missed = (0..150).filter(|&count| round(count)).count();
            is_done.store(true, Relaxed);
            missed
        });
        assert_eq!(missed, 0, "rounds in which a page was not seen");
    }

    #[test]
    fn only_touched_pages_are_present() {
        const BYTES: u64 = 8 << 12;
        let file = RamFile::create("present", BYTES).unwrap();
        let mapping = Mapping::new(&file, 0, BYTES).unwrap();
        mapping.populate(5 << 12, 4096).unwrap();
        let pagemap = Pagemap::open(&Process::own().unwrap()).unwrap();
        let mut found = Vec::new();
        let all = HvaRange { start: mapping.address(), bytes: BYTES };
        pagemap.present(all, |part| found.push((part.start.0 - all.start.0, part.bytes))).unwrap();
        assert_eq!(found, [(5 << 12, 4096)]);
        let at = |page: u64| pagemap.is_present(Hva(all.start.0 + (page << 12) + 7)).unwrap();
        assert_eq!([4, 5, 6].map(at), [false, true, false]);
    }

    #[test]
    fn only_pages_in_memory_have_frames() {
        const BYTES: u64 = 8 << 12;
        let file = RamFile::create("frames", BYTES).unwrap();
        let mapping = Mapping::new(&file, 0, BYTES).unwrap();
        mapping.populate(3 << 12, 4096).unwrap();
        let own = Process::open(std::process::id() as i32).unwrap();
        let all = HvaRange { start: mapping.address(), bytes: BYTES };
        let mut found = Vec::new();
        let read = Pagemap::open(&own).unwrap().frames(all, |page, _| found.push(page));
        match read {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                eprintln!("SKIPPED: the kernel hides frame numbers from who is not root");
            }
            result => {
                result.unwrap();
                assert_eq!(found, [3]);
            }
        }
    }
}
