//! A huge frame that a daemon had reclaimed in the guest's allocator when it died. The guest may be
//! another one by the time of the recovery. This process is the guest.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, Threads, available, page_of, serve, watching};
use ebb_pager::{IoMapping, LockedHuge, Pager, PagerParts, SoftIommu};
use ebb_units::{FrameRange, Gfn};
use testkit::require;

const ALL: FrameRange = FrameRange::new(Gfn(0), 512);
const TAKEN: Content = Content::Empty { fill: 0, hard: true };

/// Has a daemon lock a huge frame, all of it resident, and record it as hard-reclaimed. The daemon
/// dies after `more`.
fn dies(machine: &Machine, more: impl FnOnce(&Pager, &LockedHuge<'_>)) {
    machine.ram.populate(ALL).unwrap();
    let pager = watching(machine.parts());
    let held = pager.residency().lock_huge(Gfn(0).huge()).expect("nobody else works on it");
    let held = held.record().ok().expect("nobody uses it");
    more(&pager, &held);
    std::mem::forget(held);
}

struct Next {
    pager: Arc<Pager>,
    iommu: Arc<SoftIommu>,
    _threads: Threads,
}

impl Next {
    fn recover(machine: &Machine) -> Next {
        let mut parts = machine.parts_left();
        let mut held = Vec::new();
        parts.ledger.recover(|frames, content| held.push((frames, content)));
        assert_eq!(held, [(ALL, TAKEN)]);
        let iommu = Arc::new(SoftIommu::new(&machine.ram));
        let pager = watching(PagerParts { devices: Box::new(Arc::clone(&iommu)), ..parts });
        held.iter().for_each(|(frames, content)| {
            pager.residency().settle_locked(*frames, *content).unwrap()
        });
        pager.returner().settle().unwrap();
        let _threads = serve(&pager, 0);
        Next { pager, iommu, _threads }
    }

    fn empty(&self) -> u64 {
        self.pager.counters().empty_frames.load(Relaxed)
    }
}

#[test]
fn what_a_guest_wrote_after_its_reset_stays() {
    require!(available());
    let machine = Machine::small();
    dies(&machine, |_, _| {});
    // No daemon notices that: the page is there.
    let guest = machine.guest();
    ALL.frames().for_each(|gfn| guest.write(gfn, &page_of(gfn.0 + 2)));
    let next = Next::recover(&machine);
    assert!(ALL.frames().all(|gfn| guest.read(gfn) == page_of(gfn.0 + 2)));
    assert_eq!(next.pager.ledger().runs().count(), 0);
    assert!(!next.pager.ledger().is_split(Gfn(0).huge()), "it can be taken as a whole again");
    assert_eq!(next.empty(), 0);
    next.iommu.pin(ALL).expect("devices may use it");
    next.iommu.unpin(ALL);
    guest.write(Gfn(7), &page_of(7));
    assert!(guest.read(Gfn(7)) == page_of(7));
}

#[test]
fn what_a_guest_wrote_to_reclaimed_memory_stays() {
    require!(available());
    let machine = Machine::small();
    dies(&machine, |pager, held| pager.residency().empty_huge([held].into_iter()).unwrap());
    // As if the daemon died while it served a touch of it.
    Machine::put(&machine.ram, Gfn(9), &page_of(9));
    let next = Next::recover(&machine);
    let guest = machine.guest();
    assert!(guest.read(Gfn(9)) == page_of(9));
    assert_eq!(next.pager.ledger().content(Gfn(9)), Content::Resident);
    assert_eq!(next.pager.ledger().content(Gfn(10)), TAKEN);
    assert_eq!(next.empty(), 511);
}

#[test]
fn what_was_reclaimed_stays_so() {
    require!(available());
    let machine = Machine::small();
    dies(&machine, |pager, held| pager.residency().empty_huge([held].into_iter()).unwrap());
    let next = Next::recover(&machine);
    assert!(next.pager.ledger().runs().eq([(ALL, TAKEN)]));
    assert_eq!(next.empty(), 512);
    assert_eq!(next.iommu.pin(ALL), Err(Gfn(0)));
    let guest = machine.guest();
    assert!(guest.read(Gfn(9)) == page_of(0));
}

/// The daemon died after a touched frame got its memory and before its word was changed: a guest
/// that touches the rest of it goes on, and writes.
#[test]
fn what_had_its_memory_back_stays() {
    require!(available());
    let machine = Machine::small();
    dies(&machine, |pager, held| {
        pager.residency().empty_huge([held].into_iter()).unwrap();
        pager.ram().populate(ALL).unwrap();
    });
    machine.guest().write(Gfn(9), &page_of(9));
    let next = Next::recover(&machine);
    assert!(machine.guest().read(Gfn(9)) == page_of(9));
    assert_eq!(next.pager.ledger().runs().count(), 0);
}

/// The daemon died after it had unmapped the huge frame and before it recorded that, and the next
/// one in its recovery: no lock is left.
#[test]
fn what_devices_lost_without_a_record_is_theirs_again() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    let iommu = Arc::new(SoftIommu::new(&machine.ram));
    assert!(iommu.unmap(ALL));
    assert_eq!(iommu.pin(ALL), Err(Gfn(0)));
    let pager = watching(PagerParts { devices: Box::new(Arc::clone(&iommu)), ..machine.parts() });
    pager.residency().map_resident().unwrap();
    iommu.pin(ALL).expect("devices may use it");
    iommu.unpin(ALL);
}
