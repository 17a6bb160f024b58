//! Daemons that die, and what the next one finds of kept slots.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, available, page_of, serve};
use ebb_pager::{IoMapping, NothingKnown, Pager, PagerParts};
use ebb_units::{FrameRange, Gfn};
use testkit::require;

use crate::FRAMES;
use crate::daemon::{Daemon, first_of};

/// A device at which the daemon dies when frames are about to be punched, once that was asked for.
struct Dies(Arc<AtomicU64>);

impl IoMapping for Dies {
    fn map(&self, _: FrameRange) -> io::Result<()> {
        Ok(())
    }

    fn unmap(&self, _: FrameRange) -> bool {
        assert!(self.0.load(Relaxed) == 0, "the daemon dies here");
        true
    }

    fn lost(&self, _: FrameRange) {}
}

/// Either the words name the slots while the pages are still there, or the pages have come back,
/// and the next daemon knows of no kept slot.
#[test]
fn a_daemons_death_frees_what_no_word_names() {
    require!(available());
    for at_work in [true, false] {
        let (machine, dies) = (Machine::small(), Arc::new(AtomicU64::new(0)));
        let parts = PagerParts { devices: Box::new(Dies(Arc::clone(&dies))), ..machine.parts() };
        let daemon = Daemon::over(machine, parts).with_kept(FRAMES);
        if at_work {
            daemon.write(Gfn(2), &page_of(77));
            dies.store(1, Relaxed);
            catch_unwind(AssertUnwindSafe(|| daemon.evict(FRAMES))).unwrap_err();
        }
        let Daemon { machine, pager, _threads } = daemon;
        drop((_threads, pager));
        let mut parts = machine.parts_left();
        parts.ledger.recover(|_, _| ());
        let next = Pager::new(parts).unwrap().0;
        next.returner().settle().unwrap();
        assert_eq!(next.ledger().runs().count(), 0);
        assert_eq!(next.residency().store_usage().disk_slots_used, 0);
        next.frames().unprotect(FrameRange::new(Gfn(0), 512)).unwrap();
        let guest = machine.guest();
        for gfn in FRAMES.frames() {
            let page = if at_work && gfn.0 == 2 { page_of(77) } else { first_of(gfn) };
            assert!(guest.read(gfn) == page, "{gfn:?}");
        }
    }
}

/// A daemon of an older version protected frames that it called clean, and their words name the
/// slots.
#[test]
fn what_an_older_daemon_called_clean_is_plain_memory() {
    require!(available());
    let daemon = Daemon::new().with_kept(FRAMES);
    let Daemon { machine, pager, _threads } = daemon;
    drop(_threads);
    for (gfn, slot) in FRAMES.frames().zip(0..) {
        let _ = pager.ledger().lock_frame(gfn).unwrap().unlock(Content::Clean { slot });
    }
    machine.uffd().protect(pager.ram().hva_range(FRAMES).unwrap()).unwrap();
    // The VMM has punched one frame, as a balloon does.
    machine.guest().punch(FrameRange::new(Gfn(7), 1)).unwrap();
    drop(pager);
    let mut parts = machine.parts_left();
    parts.ledger.recover(|_, _| ());
    let next = Pager::new(parts).unwrap().0;
    next.returner().settle().unwrap();
    assert_eq!(next.ledger().runs().count(), 0);
    // Nothing serves faults: a protection that was left would hang this.
    let guest = machine.guest();
    FRAMES.frames().take(7).for_each(|gfn| guest.write(gfn, &page_of(77)));
    let next = Arc::new(next);
    next.frames().watch_all().unwrap();
    let _threads = serve(&next, 1);
    assert!(guest.read(Gfn(7)) == page_of(0) && guest.read(Gfn(6)) == page_of(77));
    let frames: Vec<Gfn> = FRAMES.frames().collect();
    assert_eq!(next.evictor().evict(&frames, &NothingKnown).unwrap().saved, 7);
    assert_eq!(next.residency().store_usage().disk_slots_used, 7);
}
