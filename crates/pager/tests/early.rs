//! Frames of a reclaimed block that the guest used before it wrote the block's metadata, as a
//! kernel does that knows nothing of the last one's blocks: they keep their content when the rest
//! of the block comes back. This process is the guest.

use std::io;
use std::sync::{Arc, Mutex};

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, Threads, available, page_of, serve, watching};
use ebb_pager::{Digest, DigestKey, GuestDisk, IoMapping, NothingKnown, Pager, PagerParts, Zeros};
use ebb_store::Page;
use ebb_units::{FrameRange, Gfn};
use testkit::{require, until};

const METADATA: Gfn = Gfn(3);
const ORDER: u8 = 6;
const BLOCK: FrameRange = FrameRange::block(Gfn(64), ORDER);
const EARLY: Gfn = Gfn(70);
const ALL: FrameRange = FrameRange::new(Gfn(0), 512);

/// The frames that devices may use.
#[derive(Clone, Default)]
struct Mapped(Arc<Mutex<Vec<Gfn>>>);

impl Mapped {
    fn has(&self, gfn: Gfn) -> bool {
        self.0.lock().unwrap().contains(&gfn)
    }
}

impl IoMapping for Mapped {
    fn map(&self, frames: FrameRange) -> io::Result<()> {
        self.0.lock().unwrap().extend(frames.frames());
        Ok(())
    }

    fn unmap(&self, frames: FrameRange) -> bool {
        self.0.lock().unwrap().retain(|gfn| !frames.contains(*gfn));
        true
    }

    fn lost(&self, _: FrameRange) {}
}

/// A disk of one block, which holds this page.
struct OnePage(Page, Arc<DigestKey>);

impl GuestDisk for OnePage {
    fn find(&self, digest: &Digest) -> Option<u64> {
        (*digest == self.1.digest(&self.0)).then_some(0)
    }

    fn read(&self, _: u64, pages: &mut [Page]) -> io::Result<()> {
        pages.fill(self.0);
        Ok(())
    }
}

struct Daemon {
    machine: Machine,
    pager: Arc<Pager>,
    mapped: Mapped,
    _threads: Threads,
}

impl Daemon {
    /// Makes a VM with a block that is empty and watched, of which the guest has used one frame all
    /// the same.
    fn new(resting: u64) -> Daemon {
        let machine = Machine::small();
        machine.ram.populate(ALL).unwrap();
        let mapped = Mapped::default();
        let devices = Box::new(mapped.clone());
        let parts = machine.parts();
        let disk = Box::new(OnePage(page_of(resting), Arc::clone(&parts.digest_key)));
        let pager = watching(PagerParts { devices, disk, ..parts });
        let _threads = serve(&pager, 1);
        let claim = pager.blocks().claim(METADATA, BLOCK.start, ORDER).unwrap().expect("a claim");
        let committed = claim.commit(true, 0).expect("nobody wants it");
        assert_eq!(pager.blocks().empty(&mut vec![committed], true).unwrap(), BLOCK.count);
        machine.guest().write(EARLY, &page_of(7));
        let daemon = Daemon { machine, pager, mapped, _threads };
        daemon.until_it_says(EARLY, |content| content == Content::Resident);
        daemon
    }

    /// Waits for the word: the thread that serves a fault may keep it locked a little longer than
    /// the guest waits.
    fn until_it_says(&self, gfn: Gfn, what: impl Fn(Content) -> bool) {
        until("the word", || self.pager.ledger().unlocked(gfn).filter(|now| what(*now)));
    }

    fn restored(&self) {
        self.machine.guest().write(METADATA, &page_of(2));
        self.until_it_says(METADATA, |content| content == Content::Resident);
        let others = || BLOCK.frames().filter(|gfn| *gfn != EARLY);
        assert!(others().all(|gfn| self.pager.ledger().content(gfn) == Content::Resident));
        assert!(others().all(|gfn| self.mapped.has(gfn)));
    }
}

#[test]
fn what_was_saved_of_a_block_stays_saved() {
    require!(available());
    let daemon = Daemon::new(99);
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    assert_eq!(pager.evictor().evict(&[EARLY], &NothingKnown).unwrap().saved, 1);
    let saved = pager.ledger().content(EARLY);
    assert!(matches!(saved, Content::Saved { .. }));
    daemon.restored();
    assert_eq!(pager.ledger().content(EARLY), saved);
    assert!(!daemon.mapped.has(EARLY), "no device finds anything there");
    assert!(guest.read(EARLY) == page_of(7));
    assert!(guest.read(Gfn(71)) == page_of(0));
    pager.returner().give_back_all(Zeros::Fill).unwrap();
    assert_eq!(pager.residency().store_usage().disk_slots_used, 0);
}

#[test]
fn disk_backed_frames_leave_the_disk() {
    require!(available());
    let daemon = Daemon::new(7);
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    assert_eq!(pager.evictor().evict(&[EARLY], &NothingKnown).unwrap().on_disk, 1);
    daemon.restored();
    assert_eq!(pager.ledger().content(EARLY), Content::OnDisk { block: 0 });
    pager.devices().vacate(0..1).unwrap();
    assert!(guest.read(EARLY) == page_of(7));
}

/// When everything comes back, the block comes before the saved content.
#[test]
fn what_was_saved_of_a_block_comes_back_with_all_else() {
    require!(available());
    let daemon = Daemon::new(99);
    let pager = &daemon.pager;
    assert_eq!(pager.evictor().evict(&[EARLY], &NothingKnown).unwrap().saved, 1);
    pager.returner().give_back_all(Zeros::Fill).unwrap();
    assert!(ALL.frames().all(|gfn| pager.ledger().content(gfn) == Content::Resident));
    assert!(daemon.machine.guest().read(EARLY) == page_of(7));
    assert!(BLOCK.frames().all(|gfn| daemon.mapped.has(gfn)));
}
