//! Blocks that are committed, and then not reclaimed: they are again what they were. This process
//! is the guest.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, available, page_of, serve, watching};
use ebb_pager::{Grain, NothingKnown, Pager};
use ebb_store::Page;
use ebb_units::{FrameRange, Gfn};
use testkit::require;

const METADATA: Gfn = Gfn(3);
const ORDER: u8 = 6;
const BLOCK: FrameRange = FrameRange::block(Gfn(64), ORDER);
const ALL: FrameRange = FrameRange::new(Gfn(0), 512);
const POISONED: Gfn = Gfn(70);
const POISON: Page = [0xaa; 4096];

/// Commits a block and gives it up, as when the guest was reset between the record and the punch.
fn spare(pager: &Arc<Pager>) {
    let claim = pager.blocks().claim(METADATA, BLOCK.start, ORDER).unwrap().expect("a claim");
    pager.blocks().spare(vec![claim.commit(true, 0).expect("nobody wants it")]);
}

#[test]
fn what_is_spared_can_be_evicted_like_anything_else() {
    require!(available());
    for grain in [Grain::Frame, Grain::Huge] {
        let machine = Machine::of(grain);
        machine.ram.populate(ALL).unwrap();
        ALL.frames().for_each(|gfn| Machine::put(&machine.ram, gfn, &page_of(gfn.0 + 2)));
        let pager = watching(machine.parts());
        spare(&pager);
        assert_eq!(pager.ledger().runs().count(), 0);
        assert_eq!(pager.counters().empty_frames.load(Relaxed), 0);
        let frames: Vec<Gfn> = ALL.frames().collect();
        assert_eq!(pager.evictor().evict(&frames, &NothingKnown).unwrap().saved, ALL.count);
        let _threads = serve(&pager, 1);
        let guest = machine.guest();
        assert!(ALL.frames().all(|gfn| guest.read(gfn) == page_of(gfn.0 + 2)));
    }
}

#[test]
fn what_was_empty_of_it_stays_so() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    Machine::put(&machine.ram, POISONED, &POISON);
    let pager = watching(machine.parts());
    assert_eq!(pager.evictor().evict(&[POISONED], &NothingKnown).unwrap().empty, 1);
    spare(&pager);
    let empty = Content::Empty { fill: POISON[0], hard: false };
    assert!(pager.ledger().runs().eq([(FrameRange::new(POISONED, 1), empty)]));
    assert_eq!(pager.counters().empty_frames.load(Relaxed), 1);
    let _threads = serve(&pager, 1);
    assert!(machine.guest().read(POISONED) == POISON);
}
