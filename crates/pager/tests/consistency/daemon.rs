//! A daemon with all that it knows: the project's own pager, ledger, store and hashes, joined as
//! `ebbd` joins them.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_block::Hashes;
use ebb_ledger::{Content, Ledger, Tables};
use ebb_pager::testing::{Machine, page_of};
use ebb_pager::{
    Digest, DigestKey, FaultThread, GuestDisk, IoMapping, Pager, PagerParts, RefillThreads,
};
use ebb_store::{Loaded, Page, Protection, SavedBatch, Store, StoreError, StoreUsage, SwapFile};
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};

use crate::disk::FakeDisk;
use crate::fuse::Fuse;

/// A rule that is left out, to see that the test finds its absence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    Nothing,
    /// Frames that a block backs stay evicted when the block changes.
    Vacate,
    /// A block is still found by its old content.
    Forget,
    /// A frame that a device uses may be evicted.
    Pin,
}

pub struct Daemon {
    pub pager: Arc<Pager>,
    pub fuse: Arc<Fuse>,
    store: Arc<SwapFile>,
    device: Arc<Device>,
    faults: Option<FaultThread>,
    refills: Option<RefillThreads>,
}

/// The guest's disk, as far as it is private to the daemon.
pub struct Device {
    pager: Arc<Pager>,
    disk: Arc<FakeDisk>,
    hashes: Arc<Hashes>,
    fuse: Arc<Fuse>,
    broken: Broken,
}

impl Daemon {
    /// Attaches a VM, or (`recovers`) recovers one as the daemon before left it.
    pub fn over(machine: &Machine, disk: &Arc<FakeDisk>, broken: Broken, recovers: bool) -> Daemon {
        let path = machine.run().join("ledger");
        let mut held = Vec::new();
        let ledger = match recovers {
            false => Ledger::create(&path, machine.ram.end(), Tables::WhenSplit).unwrap(),
            true => {
                let mut ledger = Ledger::open(&path, machine.ram.end()).unwrap();
                ledger.recover(|frames, content| held.push((frames, content)));
                ledger
            }
        };
        let fuse = Arc::new(Fuse::new());
        let digest_key = Arc::new(DigestKey::new(&[7; 32]));
        let hashes = Arc::new(Hashes::new(64, Arc::clone(&digest_key)));
        let (run, slots) = (machine.run(), machine.ram.bytes() / FRAME_BYTES);
        let store = SwapFile::open(&machine.swap(), run, slots, Protection::Encrypted);
        let store = Arc::new(store.unwrap());
        let source =
            Source { disk: Arc::clone(disk), hashes: Arc::clone(&hashes), fuse: Arc::clone(&fuse) };
        let parts = PagerParts {
            puncher: machine.puncher(),
            ledger,
            uffd: machine.uffd(),
            grain: machine.grain,
            devices: Box::new(Points(Arc::clone(&fuse))),
            store: Box::new(FusedStore { store: Arc::clone(&store), fuse: Arc::clone(&fuse) }),
            disk: Box::new(source),
            digest_key,
        };
        let (pager, _) = Pager::new(parts).unwrap();
        if recovers {
            pager.returner().settle().unwrap();
            for (frames, _) in held.iter().filter(|(_, content)| *content == Content::Resident) {
                pager.frames().unprotect(*frames).unwrap();
            }
        }
        pager.frames().watch_all().unwrap();
        let pager = Arc::new(pager);
        let device = Arc::new(Device {
            pager: Arc::clone(&pager),
            disk: Arc::clone(disk),
            hashes,
            fuse: Arc::clone(&fuse),
            broken,
        });
        let this = Process::open(std::process::id() as i32).unwrap();
        let vmm = this.as_fd().try_clone_to_owned().unwrap();
        let refills = RefillThreads::start(&pager, 1).unwrap();
        let faults = FaultThread::start(Arc::clone(&pager), vmm, |why| {
            panic!("the fault thread ended: {why:?}")
        });
        pager.frames().wake_all().unwrap();
        let (faults, refills) = (Some(faults.unwrap()), Some(refills));
        Daemon { pager, fuse, store, device, faults, refills }
    }

    pub fn device(&self) -> Arc<Device> {
        Arc::clone(&self.device)
    }

    /// Returns what a non-resident frame holds by its word.
    pub fn non_resident_page(&self, content: Content, disk: &FakeDisk) -> Result<Page, StoreError> {
        let mut page = page_of(0);
        match content {
            Content::Empty { fill, .. } => page = [fill; FRAME_BYTES as usize],
            Content::Saved { slot } => self.store.load(slot, &mut page)?,
            Content::OnDisk { block } => page = disk.blocks()[block as usize],
            Content::Resident
            | Content::Clean { .. }
            | Content::Unplugged
            | Content::Watch { .. } => {}
        }
        Ok(page)
    }

    /// Returns the number of slots in use, and how many of them a word names or a frame keeps.
    pub fn slots(&self) -> (u64, u64) {
        let saved = |(_, content): &(FrameRange, Content)| matches!(content, Content::Saved { .. });
        let runs = self.pager.ledger().runs().filter(saved);
        let named: u64 = runs.map(|(frames, _)| frames.count).sum();
        let kept = self.pager.counters().clean_frames.load(Relaxed);
        (self.store.usage().disk_slots_used, named + kept)
    }

    /// Kills the daemon while the thread of this name, if any, is at work. What it had stays as it
    /// was, and nothing uses it.
    pub fn killed(mut self, at_work: Option<&str>) {
        let (faults, refills) = (self.faults.take(), self.refills.take());
        match at_work {
            Some("fault") => std::mem::forget((faults, refills)),
            Some(_) => {
                drop(faults);
                std::mem::forget(refills);
            }
            None => {
                drop(faults);
                drop(refills);
            }
        }
    }
}

impl Device {
    /// A read request: reads `count` blocks into consecutive frames. As `Job::tell` and `Port`.
    pub fn read(&self, block: u64, first: Gfn, count: u64) -> io::Result<()> {
        for (block, gfn) in (block..block + count).zip(FrameRange::new(first, count).frames()) {
            let page = self.disk.blocks()[block as usize];
            self.hashes.insert(block, &page);
            self.pinned(gfn, true, || Machine::put(self.pager.ram(), gfn, &page))?;
        }
        Ok(())
    }

    /// A write request.
    pub fn write(&self, first: Gfn, block: u64, count: u64) -> io::Result<()> {
        self.before_overwrite(block..block + count)?;
        for (block, gfn) in (block..block + count).zip(FrameRange::new(first, count).frames()) {
            let mut page = page_of(0);
            let frame = FrameRange::new(gfn, 1);
            self.pinned(gfn, false, || self.pager.ram().read(frame, &mut page))??;
            self.fuse.point();
            self.disk.blocks()[block as usize] = page;
            self.fuse.point();
            self.hashes.insert(block, &page);
        }
        Ok(())
    }

    /// A discard.
    pub fn discard(&self, blocks: Range<u64>) -> io::Result<()> {
        self.before_overwrite(blocks.clone())?;
        for block in blocks {
            self.fuse.point();
            self.disk.blocks()[block as usize] = page_of(0);
        }
        Ok(())
    }

    fn before_overwrite(&self, blocks: Range<u64>) -> io::Result<()> {
        if self.broken != Broken::Forget {
            self.hashes.forget(blocks.clone());
        }
        self.fuse.point();
        match self.broken {
            Broken::Vacate => Ok(()),
            _ => self.pager.devices().vacate(blocks),
        }
    }

    fn pinned<T>(&self, gfn: Gfn, replace: bool, copy: impl FnOnce() -> T) -> io::Result<T> {
        let frame = FrameRange::new(gfn, 1);
        if self.broken == Broken::Pin {
            return Ok(copy());
        }
        self.pager.devices().pin(frame, replace)?;
        self.fuse.point();
        let copied = copy();
        self.fuse.point();
        self.pager.devices().unpin(frame);
        Ok(copied)
    }
}

/// The disk as the pager sees it.
struct Source {
    disk: Arc<FakeDisk>,
    hashes: Arc<Hashes>,
    fuse: Arc<Fuse>,
}

impl GuestDisk for Source {
    fn find(&self, digest: &Digest) -> Option<u64> {
        self.fuse.point();
        self.hashes.find(digest)
    }

    fn read(&self, block: u64, pages: &mut [Page]) -> io::Result<()> {
        self.fuse.point();
        let blocks = self.disk.blocks();
        let there = blocks.get(block as usize..).ok_or(io::ErrorKind::UnexpectedEof)?;
        pages.iter_mut().zip(there).for_each(|(to, from)| *to = *from);
        Ok(())
    }
}

/// Points right before a punch, and right after a page has come.
struct Points(Arc<Fuse>);

impl IoMapping for Points {
    fn map(&self, _: FrameRange) -> io::Result<()> {
        self.0.point();
        Ok(())
    }

    fn unmap(&self, _: FrameRange) -> bool {
        self.0.point();
        true
    }

    fn lost(&self, _: FrameRange) {}
}

struct FusedStore {
    store: Arc<SwapFile>,
    fuse: Arc<Fuse>,
}

impl Store for FusedStore {
    fn save(&self, page: &Page) -> Result<u64, StoreError> {
        self.store.save(page)
    }

    fn save_batch(&self, pages: &[Page]) -> SavedBatch {
        self.fuse.point();
        let saved = self.store.save_batch(pages);
        self.fuse.point();
        saved
    }

    fn load(&self, slot: u64, page: &mut Page) -> Result<(), StoreError> {
        self.fuse.point();
        self.store.load(slot, page)
    }

    fn load_batch(&self, first: u64, pages: &mut [Page]) -> Result<Loaded, StoreError> {
        self.fuse.point();
        self.store.load_batch(first, pages)
    }

    fn load_some(
        &self,
        first: u64,
        pages: &mut [Page],
        which: &[usize],
        ready: &mut dyn FnMut(usize, &Page),
    ) -> Result<(), StoreError> {
        self.fuse.point();
        self.store.load_some(first, pages, which, ready)
    }

    fn release(&self, slot: u64) {
        self.fuse.point();
        self.store.release(slot);
    }

    fn trim(&self) -> Result<(), StoreError> {
        self.store.trim()
    }

    fn claim(&self, slot: u64) -> Result<(), StoreError> {
        self.store.claim(slot)
    }

    fn usage(&self) -> StoreUsage {
        self.store.usage()
    }
}
