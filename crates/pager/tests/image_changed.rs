//! A disk image that another program changes while it backs memory, or that cannot be read. This
//! process is the guest.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread;

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, Threads, available, page_of, serve};
use ebb_pager::{Digest, DigestKey, Digests, GuestDisk, NothingKnown, Pager, PagerParts};
use ebb_store::Page;
use ebb_units::{FrameRange, Gfn};
use testkit::{require, until};

const FRAMES: u64 = 8;

/// An image that the daemon serves, and that others can write. One block may be unreadable.
#[derive(Clone)]
struct Image(Arc<Mutex<Vec<Page>>>, Arc<DigestKey>, Arc<AtomicU64>);

const EIO: i32 = 5;
const NO_BLOCK: u64 = u64::MAX;

impl Image {
    fn put(&self, block: u64, page: Page) {
        self.0.lock().unwrap()[block as usize] = page;
    }
}

impl GuestDisk for Image {
    fn find(&self, digest: &Digest) -> Option<u64> {
        let is_it = |block: &Page| self.1.digest(block) == *digest;
        self.0.lock().unwrap().iter().position(is_it).map(|at| at as u64)
    }

    fn read(&self, block: u64, pages: &mut [Page]) -> io::Result<()> {
        if (block..block + pages.len() as u64).contains(&self.2.load(Relaxed)) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        let blocks = self.0.lock().unwrap();
        pages.iter_mut().zip(&blocks[block as usize..]).for_each(|(to, from)| *to = *from);
        Ok(())
    }
}

struct Daemon {
    pager: Arc<Pager>,
    _threads: Threads,
}

impl Daemon {
    fn over(machine: &Machine, parts: PagerParts, image: &Image) -> Daemon {
        let (disk, digest_key) = (Box::new(image.clone()), Arc::clone(&image.1));
        let parts = PagerParts { disk, digest_key, ..parts };
        let pager = Arc::new(Pager::new(parts).unwrap().0);
        let digests = machine.run().join("digests");
        pager.residency().compare_with(Digests::open(&digests, machine.ram.end(), 1).unwrap());
        pager.frames().watch_all().unwrap();
        let _threads = serve(&pager, 1);
        Daemon { pager, _threads }
    }
}

/// Returns a daemon over a VM whose frames are all backed by the image.
fn evicted(machine: &Machine, image: &Image) -> Daemon {
    let daemon = Daemon::over(machine, machine.parts(), image);
    let (guest, frames) = (machine.guest(), (0..FRAMES).map(Gfn));
    frames.clone().for_each(|gfn| guest.write(gfn, &page_of(gfn.0 + 20)));
    let evicted =
        daemon.pager.evictor().evict(&frames.collect::<Vec<Gfn>>(), &NothingKnown).unwrap();
    assert_eq!(evicted.on_disk, FRAMES);
    daemon
}

fn image() -> Image {
    let blocks = (0..FRAMES).map(|block| page_of(block + 20)).collect();
    let key = Arc::new(DigestKey::random().unwrap());
    Image(Arc::new(Mutex::new(blocks)), key, Arc::new(AtomicU64::new(NO_BLOCK)))
}

/// Checks that frame 3 waits until its block is again what it was, and that the frames around it
/// come back.
fn check(machine: &Machine, daemon: &Daemon, image: &Image) {
    let (guest, asking) = (machine.guest(), machine.guest());
    let foreign = page_of(99);
    image.put(3, foreign);
    let waiting = thread::spawn(move || asking.read(Gfn(3)));
    let why = until("the change to be told", || daemon.pager.faults().failure());
    assert!(why.to_string().contains("was changed by somebody else"), "{why}");
    (0..FRAMES)
        .filter(|n| *n != 3)
        .for_each(|n| assert!(guest.read(Gfn(n)) == page_of(n + 20), "frame {n}"));
    assert!(!waiting.is_finished(), "it got what somebody else wrote");
    assert_eq!(daemon.pager.ledger().content(Gfn(3)), Content::OnDisk { block: 3 });
    assert!(daemon.pager.devices().vacate(3..4).is_err(), "its block may not be written");
    assert!(daemon.pager.ram().is_hole(FrameRange::new(Gfn(3), 1)).unwrap());
    image.put(3, page_of(23));
    assert!(waiting.join().unwrap() == page_of(23));
}

#[test]
fn a_frame_waits_while_its_block_is_not_what_it_was() {
    require!(available());
    let (machine, image) = (Machine::small(), image());
    let daemon = evicted(&machine, &image);
    check(&machine, &daemon, &image);
}

#[test]
fn a_frame_waits_while_its_block_cannot_be_read() {
    require!(available());
    let (machine, image) = (Machine::small(), image());
    let daemon = evicted(&machine, &image);
    let (guest, asking) = (machine.guest(), machine.guest());
    image.2.store(3, Relaxed);
    let waiting = thread::spawn(move || asking.read(Gfn(3)));
    let (why, gfn) = until("the failure to be told", || daemon.pager.faults().failed());
    assert_eq!((why.raw_os_error(), gfn), (Some(EIO), Gfn(3)));
    (0..FRAMES)
        .filter(|n| *n != 3)
        .for_each(|n| assert!(guest.read(Gfn(n)) == page_of(n + 20), "frame {n}"));
    assert!(!waiting.is_finished(), "it got what nobody has read");
    assert!(daemon.pager.devices().vacate(3..4).is_err(), "its block may not be written");
    image.2.store(NO_BLOCK, Relaxed);
    assert!(waiting.join().unwrap() == page_of(23));
}

/// Whether a refill thread sleeps.
fn is_any_parked() -> bool {
    // clock_nanosleep(2).
    const SLEEP: &str = "230 ";
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    // A thread that has ended has no such file.
    let text = |task: &PathBuf, name| std::fs::read_to_string(task.join(name)).unwrap_or_default();
    let mut refills = tasks.filter(|task| text(task, "comm") == "refill\n");
    refills.any(|task| text(&task, "syscall").starts_with(SLEEP))
}

/// There is one refill thread: a touch of a frame that cannot be brought back does not keep it.
#[test]
fn nobody_else_waits_for_a_frame_that_waits() {
    require!(available());
    let (machine, image) = (Machine::small(), image());
    let daemon = evicted(&machine, &image);
    image.put(3, page_of(99));
    let (guest, asking, other) = (machine.guest(), machine.guest(), Gfn(100));
    let waiting = thread::spawn(move || asking.read(Gfn(3)));
    until("the change to be told", || daemon.pager.faults().failure());
    let asked = || daemon.pager.counters().retried.load(Relaxed);
    let before = asked();
    until("the frame to be asked for again", || {
        assert!(!is_any_parked());
        (asked() >= before + 3).then_some(())
    });
    guest.write(other, &page_of(40));
    assert_eq!(daemon.pager.evictor().evict(&[other], &NothingKnown).unwrap().saved, 1);
    assert!(guest.read(other) == page_of(40));
    image.put(3, page_of(23));
    assert!(waiting.join().unwrap() == page_of(23));
}

#[test]
fn so_it_does_after_a_daemons_death() {
    require!(available());
    let (machine, image) = (Machine::small(), image());
    drop(evicted(&machine, &image));
    let daemon = Daemon::over(&machine, machine.parts_left(), &image);
    check(&machine, &daemon, &image);
}

#[test]
fn what_was_disk_backed_before_there_were_digests_returns_unchecked() {
    require!(available());
    let (machine, image) = (Machine::small(), image());
    drop(evicted(&machine, &image));
    std::fs::remove_file(machine.run().join("digests")).unwrap();
    let _daemon = Daemon::over(&machine, machine.parts_left(), &image);
    let guest = machine.guest();
    (0..FRAMES).for_each(|n| assert!(guest.read(Gfn(n)) == page_of(n + 20), "frame {n}"));
}
