//! A VM with two memory back-ends, of which its VMM unplugs one. This process is the VMM.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_pager::testing::new_uffd;
use ebb_store::Page;
use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::Uffd;
use ebb_units::{FrameRange, Gfn, Gpa, Hva};
use ebb_vm::ram::Backing;
use ebb_vm::{Ram, Region};
use tempfile::TempDir;

pub const STAYS: FrameRange = FrameRange::new(Gfn(0), 512);
/// Memory that is unplugged: one huge frame, and a part of another.
pub const GOES: FrameRange = FrameRange::new(Gfn(512), 768);
pub const FILES: [FrameRange; 2] = [STAYS, GOES];

/// A VM with two memory back-ends, as its VMM has it.
pub struct Machine {
    pub files: Vec<RamFile>,
    pub guest: Vec<Option<Mapping>>,
    pub places: Vec<Hva>,
    pub uffd: Uffd,
    /// The slot that cannot be read.
    pub bad: Arc<AtomicU64>,
    pub run: TempDir,
}

pub fn small_pages(file: &RamFile) -> Mapping {
    let mapping = Mapping::new(file, 0, file.bytes().unwrap()).unwrap();
    // A kernel without huge pages need not be told.
    let _ = mapping.use_huge_pages(false);
    mapping
}

impl Machine {
    pub fn new() -> Machine {
        let files = FILES.map(|frames| RamFile::create("unplugged", frames.bytes()).unwrap());
        let guest: Vec<Mapping> = files.iter().map(small_pages).collect();
        let places = guest.iter().map(Mapping::address).collect();
        Machine {
            files: files.into(),
            guest: guest.into_iter().map(Some).collect(),
            places,
            uffd: new_uffd().unwrap(),
            bad: Arc::new(AtomicU64::new(u64::MAX)),
            run: tempfile::tempdir().unwrap(),
        }
    }

    pub fn ram(&self) -> Ram {
        let backing = |file: &RamFile| {
            let file = RamFile::from(file.as_fd().try_clone_to_owned().unwrap());
            let mapping = small_pages(&file);
            Backing::new(file, mapping)
        };
        let region = |(file, frames): (usize, &FrameRange)| Region {
            gpa: frames.start.gpa(),
            bytes: frames.bytes(),
            hva: self.places[file],
            file,
            offset: 0,
        };
        let regions = FILES.iter().enumerate().map(region).collect();
        Ram::new(regions, self.files.iter().map(backing).collect()).unwrap()
    }

    fn words(&self, gfn: Gfn) -> &[AtomicU64] {
        let file = FILES.iter().position(|frames| frames.contains(gfn)).unwrap();
        let at = Gpa(gfn.gpa().0 - FILES[file].start.gpa().0);
        self.guest[file].as_ref().unwrap().words(at.0, 512).unwrap()
    }

    pub fn write(&self, gfn: Gfn, page: &Page) {
        for (word, bytes) in self.words(gfn).iter().zip(page.as_chunks().0) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
    }

    pub fn reads(&self, gfn: Gfn, page: &Page) -> bool {
        let mut each = self.words(gfn).iter().zip(page.as_chunks().0);
        each.all(|(word, bytes)| word.load(Relaxed) == u64::from_ne_bytes(*bytes))
    }
}
