//! A device that cannot wait, behind the IOMMU in software: what it may use when frames are
//! reclaimed, come back, or lose their memory to others. This process is the guest.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, Threads, available, page_of, serve, watching};
use ebb_pager::{NothingKnown, Pager, PagerParts, SoftIommu, Zeros};
use ebb_units::{FrameRange, Gfn};
use testkit::require;

/// The frame with the block's metadata.
const METADATA: Gfn = Gfn(3);
const ORDER: u8 = 6;
const BLOCK: FrameRange = FrameRange::block(Gfn(64), ORDER);

fn one(gfn: u64) -> FrameRange {
    FrameRange::new(Gfn(gfn), 1)
}

struct Daemon {
    pager: Arc<Pager>,
    iommu: Arc<SoftIommu>,
    _threads: Threads,
}

impl Daemon {
    /// Attaches a VM all of whose memory is resident.
    fn take(machine: &Machine) -> Daemon {
        machine.ram.populate(FrameRange::new(Gfn(0), 512)).unwrap();
        Daemon::over(machine, machine.parts())
    }

    /// Recovers the VM after another daemon.
    fn recover(machine: &Machine) -> Daemon {
        let mut parts = machine.parts_left();
        parts.ledger.recover(|frames, content| panic!("{frames:?} is locked: {content:?}"));
        let daemon = Daemon::over(machine, parts);
        daemon.pager.returner().settle().unwrap();
        daemon
    }

    fn over(machine: &Machine, parts: PagerParts) -> Daemon {
        let iommu = Arc::new(SoftIommu::new(&machine.ram));
        let pager = watching(PagerParts { devices: Box::new(Arc::clone(&iommu)), ..parts });
        let _threads = serve(&pager, 0);
        Daemon { pager, iommu, _threads }
    }

    /// Reclaims the block, and returns the number of frames that the host gets.
    fn empty(&self) -> u64 {
        // The thread that let the guest's write through may keep the word locked a little longer.
        let claim = testkit::until("a claim", || {
            self.pager.blocks().claim(METADATA, BLOCK.start, ORDER).unwrap()
        });
        let mut blocks = vec![claim.commit(true, 0).expect("nobody wants it")];
        self.pager.blocks().empty(&mut blocks, true).unwrap()
    }

    fn may_use(&self, frames: FrameRange) -> bool {
        let pinned = self.iommu.pin(frames).is_ok();
        if pinned {
            self.iommu.unpin(frames);
        }
        pinned
    }
}

#[test]
fn a_block_is_mapped_again_before_its_metadata_is_written() {
    require!(available());
    let machine = Machine::small();
    let daemon = Daemon::take(&machine);
    assert!(daemon.may_use(FrameRange::new(Gfn(0), 512)));
    for round in 2..5 {
        assert_eq!(daemon.empty(), BLOCK.count);
        assert!(BLOCK.frames().all(|gfn| !daemon.may_use(one(gfn.0))));
        assert!(daemon.may_use(FrameRange::new(Gfn(0), BLOCK.start.0)));
        machine.guest().write(METADATA, &page_of(round));
        assert!(daemon.may_use(FrameRange::new(Gfn(0), 512)));
    }
}

#[test]
fn a_frame_that_is_touched_early_is_mapped() {
    require!(available());
    let machine = Machine::small();
    let daemon = Daemon::take(&machine);
    daemon.empty();
    assert_eq!(machine.guest().read(Gfn(70)), page_of(0));
    assert!(daemon.may_use(one(70)) && !daemon.may_use(one(71)));
}

#[test]
fn a_block_that_a_device_uses_stays() {
    require!(available());
    let machine = Machine::small();
    let daemon = Daemon::take(&machine);
    Machine::put(&machine.ram, Gfn(70), &page_of(5));
    daemon.iommu.pin(one(70)).unwrap();
    assert_eq!(daemon.empty(), 0);
    assert!(daemon.may_use(BLOCK));
    machine.guest().write(METADATA, &page_of(2));
    assert_eq!(machine.guest().read(Gfn(70)), page_of(5));
    assert!(daemon.pager.evictor().evict(&[Gfn(70)], &NothingKnown).is_err());
    assert_eq!(daemon.pager.ledger().content(Gfn(70)), Content::Resident);
    daemon.iommu.unpin(one(70));
    assert_eq!(daemon.empty(), BLOCK.count);
}

/// The guest has not used the block since: only the device kept it.
#[test]
fn a_block_that_a_device_used_is_reclaimed_when_it_is_free() {
    require!(available());
    let machine = Machine::small();
    let daemon = Daemon::take(&machine);
    daemon.iommu.pin(one(70)).unwrap();
    assert_eq!(daemon.empty(), 0);
    assert_eq!(daemon.pager.ledger().runs().count(), 0);
    assert_eq!(daemon.pager.counters().empty_frames.load(Relaxed), 0);
    daemon.iommu.unpin(one(70));
    assert_eq!(daemon.empty(), BLOCK.count);
}

/// Hardware would still lead the device to the old page.
#[test]
fn what_others_punched_is_not_mapped_when_it_is_touched() {
    require!(available());
    let machine = Machine::small();
    let daemon = Daemon::take(&machine);
    machine.guest().punch(one(70)).unwrap();
    assert!(!daemon.may_use(one(70)));
    machine.guest().write(Gfn(70), &page_of(5));
    assert!(!daemon.may_use(one(70)) && daemon.may_use(one(71)));
    daemon.empty();
    machine.guest().write(METADATA, &page_of(2));
    assert!(daemon.may_use(BLOCK));
}

#[test]
fn the_next_daemon_knows_what_is_mapped() {
    require!(available());
    let machine = Machine::small();
    let daemon = Daemon::take(&machine);
    daemon.empty();
    drop(daemon);
    // The page wins: it came before the daemon could record it.
    machine.ram.populate(one(70)).unwrap();
    let daemon = Daemon::recover(&machine);
    assert!(daemon.may_use(one(63)) && daemon.may_use(one(70)));
    assert!(!daemon.may_use(one(69)) && !daemon.may_use(one(71)));
    daemon.pager.returner().give_back_all(Zeros::Fill).unwrap();
    assert!(daemon.may_use(FrameRange::new(Gfn(0), 512)));
}
