//! What comes back before a detach, and what the kernel serves from then on. This process is the
//! guest.

use std::sync::atomic::Ordering::Relaxed;

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, available, page_of, watching};
use ebb_pager::{NothingKnown, Zeros};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use testkit::require;

const ALL: FrameRange = FrameRange::new(Gfn(0), 512);
const METADATA: Gfn = Gfn(3);
const ORDER: u8 = 6;
const BLOCK: FrameRange = FrameRange::block(Gfn(64), ORDER);
const SAVED: Gfn = Gfn(200);

#[test]
fn frames_that_read_as_zero_may_stay_non_resident() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    Machine::put(&machine.ram, SAVED, &page_of(9));
    let pager = watching(machine.parts());
    let claim = pager.blocks().claim(METADATA, BLOCK.start, ORDER).unwrap().expect("a claim");
    let mut blocks = vec![claim.commit(true, 0xaa).expect("nobody wants it")];
    pager.blocks().empty(&mut blocks, true).unwrap();
    let others: Vec<Gfn> = (128..512).map(Gfn).collect();
    let evicted = pager.evictor().evict(&others, &NothingKnown).unwrap();
    assert_eq!((evicted.saved, evicted.empty), (1, 383));

    let bytes = pager.returner().give_back_all(Zeros::Leave).unwrap();
    assert_eq!(bytes, (BLOCK.count + 1) * FRAME_BYTES);
    assert!(BLOCK.frames().all(|gfn| machine.in_file(gfn) == Some([0xaa; 4096])));
    assert_eq!(machine.in_file(SAVED), Some(page_of(9)));
    let of_zeros = others.iter().filter(|gfn| **gfn != SAVED);
    assert!(of_zeros.clone().all(|gfn| machine.in_file(*gfn).is_none()));

    // The detach fails after the kernel has served a touch.
    assert!(ALL.frames().all(|gfn| pager.ledger().content(gfn) == Content::Resident));
    pager.frames().unwatch_all().unwrap();
    let touched = Gfn(300);
    machine.guest().write(touched, &page_of(7));
    pager.frames().watch_all().unwrap();
    let evicted = pager.evictor().evict(&[touched], &NothingKnown).unwrap();
    assert_eq!(evicted.saved, 1);
    assert_eq!(pager.returner().give_back_all(Zeros::Leave).unwrap(), FRAME_BYTES);
    assert_eq!(machine.in_file(touched), Some(page_of(7)));
    assert_eq!(pager.counters().empty_frames.load(Relaxed), 0);
    assert!(of_zeros.filter(|gfn| **gfn != touched).all(|gfn| machine.in_file(*gfn).is_none()));
}
