use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::{Ledger, Tables};
use ebb_pager::{DigestKey, Grain, NoDevices, NoDisk, Parts};
use ebb_store::{Protection, SwapFile};
use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_sys::uffd::{Uffd, feature};
use ebb_units::Gpa;
use ebb_vm::Region;
use ebb_vm::ram::{Backing, Ram};

use super::*;

const HUGE: u64 = FRAMES_PER_HUGE * FRAME_BYTES;

/// A VM in this very process: two windows of RAM, a window that is none, and half a window.
pub(crate) struct Machine {
    pub(crate) pager: Pager,
    pub(crate) process: Process,
    guest: Mapping,
}

impl Machine {
    /// `None`: this host does not let the tests be a VMM.
    pub(crate) fn new() -> Option<Machine> {
        Machine::with_slots(2048)
    }

    /// With room for so many frames in its store.
    pub(crate) fn with_slots(slots: u64) -> Option<Machine> {
        let uffd = Uffd::new().ok()?;
        uffd.handshake(feature::needed()).ok()?;
        let bytes = 2 * HUGE + HUGE / 2;
        let file = RamFile::create("windows", bytes).unwrap();
        let (guest, mapping) = (small_pages(&file, bytes), small_pages(&file, bytes));
        let region = |gpa, offset, bytes| {
            let hva = ebb_units::Hva(guest.address().0 + offset);
            Region { gpa: Gpa(gpa), bytes, hva, file: 0, offset }
        };
        let regions = vec![region(0, 0, 2 * HUGE), region(3 * HUGE, 2 * HUGE, HUGE / 2)];
        let ram = Arc::new(Ram::new(regions, vec![Backing { file, mapping }]).unwrap());
        let run = tempfile::tempdir().unwrap();
        let ledger = Ledger::create(&run.path().join("ledger"), ram.end(), Tables::AtOnce).unwrap();
        let swap = run.path().join("swap");
        let store = SwapFile::open(&swap, run.path(), slots, Protection::Encrypted).unwrap();
        let (devices, disk) = (Box::new(NoDevices), Box::new(NoDisk));
        let grain = Grain::Frame;
        let digest_key = Arc::new(DigestKey::random().unwrap());
        let store = Box::new(store);
        let parts = Parts { ram, ledger, uffd, grain, devices, store, disk, digest_key };
        let pager = Pager::new(parts).unwrap().0;
        Some(Machine { pager, process: Process::own().unwrap(), guest })
    }

    /// The guest uses frames, which begin there in the file.
    fn touch(&self, first: u64, frames: u64) {
        self.guest.populate(first * FRAME_BYTES, frames * FRAME_BYTES).unwrap();
    }

    /// The same, and each then holds something of its own.
    pub(crate) fn write(&self, first: u64, frames: u64) {
        self.touch(first, frames);
        for frame in first..first + frames {
            let words = self.guest.words(frame * FRAME_BYTES, 2).unwrap();
            words.iter().zip(frame..).for_each(|(word, value)| word.store(value, Relaxed));
        }
    }

    pub(crate) fn sources(&self) -> Sources<'_> {
        Sources { process: &self.process, guest: None, pins: false }
    }
}

fn small_pages(file: &RamFile, bytes: u64) -> Mapping {
    let mapping = Mapping::new(file, 0, bytes).unwrap();
    // A kernel without huge pages has no need to be told.
    let _ = mapping.use_huge_pages(false);
    mapping
}

/// The runs of frames that are told.
fn runs(tell: impl FnOnce(&mut dyn FnMut(FrameRange))) -> Vec<(u64, u64)> {
    let mut runs = Vec::new();
    tell(&mut |frames| frames.join(&mut runs));
    runs.into_iter().map(|run| (run.start.0, run.count)).collect()
}

#[test]
fn windows_are_looked_at_where_memory_is() {
    let Some(machine) = Machine::new() else {
        return eprintln!("SKIPPED: no userfaultfd");
    };
    let pagemap = Pagemap::open(&machine.process).unwrap();
    let (spare, heat) = (|gfn: Gfn| gfn == Gfn(5), |gfn: Gfn| gfn.index_in_huge() % 4);
    let pager = &machine.pager;
    let mut windows = Windows::new(machine.sources(), pager, &pagemap, &spare, &heat, true);
    assert_eq!(windows.next(HugeFrame(0)), None);
    machine.touch(4, 3);
    machine.touch(500, 20);
    // In the second region, behind the hole.
    machine.touch(1024 + 8, 2);
    let next = |from| windows.next(HugeFrame(from)).map(|window| window.0);
    assert_eq!([0, 1, 2, 3, 4].map(next), [Some(0), Some(1), Some(3), Some(3), None]);
    let mapped = |window| runs(|saw| windows.mapped(HugeFrame(window), saw).unwrap());
    if let Err(error) = windows.mapped(HugeFrame(0), &mut |_| {}) {
        return eprintln!("SKIPPED: the kernel has no PAGEMAP_SCAN: {error}");
    }
    assert_eq!(mapped(0), [(4, 3), (500, 12)]);
    assert_eq!(mapped(1), [(512, 8)]);
    assert_eq!(mapped(2), []);
    assert_eq!(mapped(3), [(1536 + 8, 2)]);
    let mut told = Vec::new();
    windows.look(HugeFrame(3), &mut |gfn, page| told.push((gfn, page)));
    let page = |heat| Page { has_disk: true, heat, ..Page::default() };
    assert_eq!(told, [(Gfn(1544), page(0)), (Gfn(1545), page(1))]);
    let all = runs(|saw| windows.look(HugeFrame(0), &mut |gfn, _| saw(FrameRange::new(gfn, 1))));
    assert_eq!(all, [(4, 3), (500, 12)]);
    assert_eq!([4, 5].map(|gfn| windows.may_go(Gfn(gfn))), [true, false]);
    // Nobody knows that any of them goes without being written.
    windows.begin(&[FrameRange::new(Gfn(4), 1)], true);
    assert!(!windows.may_go(Gfn(4)));
    windows.look(HugeFrame(0), &mut |gfn, page| assert!(page.stays, "{gfn:?}"));
}

#[test]
fn blocks_that_overlap_are_told_once() {
    let block = |head, order| Block { head: Gfn(head), order };
    let mut blocks = vec![block(0, 3), block(0, 3), block(4, 0), block(8, 1), block(9, 0)];
    apart(&mut blocks);
    assert_eq!(blocks, [block(0, 3), block(8, 1)]);
}

/// What follows a window costs nothing: to find where a run of memory ends is a walk over it.
#[test]
fn a_window_is_found_and_told_without_a_walk_over_all_memory() {
    let bytes = 256 << 20;
    let file = RamFile::create("run", bytes).unwrap();
    let mapping = small_pages(&file, bytes);
    let hva = ebb_units::Hva(mapping.address().0);
    let region = Region { gpa: Gpa(0), bytes, hva, file: 0, offset: 0 };
    let ram = Ram::new(vec![region], vec![Backing { file, mapping }]).unwrap();
    ram.populate(FrameRange::new(Gfn(0), bytes / FRAME_BYTES)).unwrap();
    let begin = std::time::Instant::now();
    assert_eq!(ram.next_populated(Gpa(0)), Some((Gpa(0), bytes)));
    let walk = begin.elapsed();
    let begin = std::time::Instant::now();
    let windows = (0..bytes / HUGE).map(HugeFrame);
    for window in windows.clone() {
        assert_eq!(ram.next_data(window.gpa()), Some(window.gpa()));
        let all = FrameRange::huge(window);
        assert_eq!(ram.populated_in(all).unwrap(), [all]);
    }
    let looks = begin.elapsed();
    // The walks would take half as long as one for each window.
    assert!(looks < walk * 16, "{looks:?}, and one walk {walk:?}");
    ram.punch(FrameRange::new(Gfn(3), 2)).unwrap();
    let told = runs(|saw| {
        ram.populated_in(FrameRange::huge(HugeFrame(0))).unwrap().into_iter().for_each(saw)
    });
    assert_eq!(told, [(0, 3), (5, 507)]);
}
