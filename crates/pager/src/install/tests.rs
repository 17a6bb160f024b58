//! Who gives a frame content holds its word first, and by then somebody else may have changed it.
//! Here that has happened: each function is called with what its caller had seen before.

#[allow(dead_code)]
#[path = "../../tests/consistency/machine.rs"]
mod machine;

use std::sync::Arc;

use ebb_ledger::Content;
use ebb_units::{FrameRange, Gfn};
use vmtest::require;

use super::Served;
use crate::guarded::Sentry;
use crate::pager::Pager;
use machine::{Machine, available, page_of, watching};

const ALL: FrameRange = FrameRange::new(Gfn(0), 512);
const METADATA: Gfn = Gfn(3);
const ORDER: u8 = 6;
const BLOCK: FrameRange = FrameRange::block(Gfn(64), ORDER);

struct Deaf;

impl Sentry for Deaf {
    fn touched(&self, _: Gfn, _: bool) {}
}

fn says(pager: &Pager, frames: FrameRange, content: Content) -> bool {
    frames.frames().all(|gfn| pager.ledger().content(gfn) == content)
}

#[test]
fn what_was_unplugged_meanwhile_stays_so() {
    require!(available());
    let machine = Machine::new();
    let pager = watching(machine.parts());
    pager.watch_pluggable(vec![ALL], Arc::new(Deaf)).unwrap();
    pager.guard(ALL).unwrap();
    assert!(pager.refill(ALL).unwrap());
    assert!(says(&pager, ALL, Content::Guarded));
}

#[test]
fn a_watch_that_is_another_blocks_by_now_stays() {
    require!(available());
    let machine = Machine::new();
    machine.ram.populate(ALL).unwrap();
    Machine::put(&machine.ram, METADATA, &page_of(9));
    let pager = watching(machine.parts());
    let claim = pager.claim(METADATA, BLOCK.start, ORDER).unwrap().expect("a claim");
    let committed = claim.commit(true, 0).expect("nobody wants it");
    pager.empty(&mut vec![committed], true).unwrap();
    let last = BLOCK.end();
    assert!(matches!(pager.restore(METADATA, last, ORDER).unwrap(), Served::Busy));
    assert!(says(&pager, BLOCK, Content::Empty { fill: 0, hard: false }));
    let watch = Content::Watch { head: BLOCK.start, order: ORDER };
    assert_eq!(pager.ledger().unlocked(METADATA), Some(watch));
    pager.restore_watched(METADATA).unwrap();
    assert!(says(&pager, ALL, Content::Resident));
    // Whoever has to see to it that the block is back is done with that.
    assert!(matches!(pager.restore_watched(METADATA).unwrap(), Served::Done));
}
