//! Races for a frame's word. A thread that gives a frame content locks its word first, and by then
//! another thread may have changed it. Here that has happened: each function is called with what
//! its caller had seen before.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::thread;

use ebb_inspect::PageWords;
use ebb_ledger::Content;
use ebb_store::PageBuffer;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use testkit::{require, until};

use super::*;
use crate::fault::read_ahead::ReadAhead;
use crate::fault::sentry::Sentry;
use crate::frames::words::Served;
use crate::testing::{Machine, available, page_of, serve, watching};
use crate::{Committed, Judge, NothingKnown, OpenGate, Witness};

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

fn committed(pager: &Pager, fill: u8) -> Vec<Committed<'_>> {
    let claim = pager.blocks().claim(METADATA, BLOCK.start, ORDER).unwrap().expect("a claim");
    vec![claim.commit(true, fill).expect("nobody wants it")]
}

/// All of the guest's memory is saved before its huge frame is to get zeros.
#[test]
fn a_huge_frame_that_was_saved_meanwhile_gets_no_zeros() {
    require!(available());
    let machine = Machine::of(Grain::Huge);
    machine.ram.populate(ALL).unwrap();
    ALL.frames().for_each(|gfn| Machine::put(&machine.ram, gfn, &page_of(gfn.0 + 2)));
    let pager = watching(machine.parts());
    let frames: Vec<Gfn> = ALL.frames().collect();
    assert_eq!(pager.evictor().evict(&frames, &NothingKnown).unwrap().saved, ALL.count);
    assert!(matches!(
        pager.installer().install_huge(Gfn(5), Content::Resident).unwrap(),
        Served::Busy
    ));
    assert!(pager.ram().is_hole(ALL).unwrap());
    let _threads = serve(&pager, 1);
    let guest = machine.guest();
    assert!(ALL.frames().all(|gfn| guest.read(gfn) == page_of(gfn.0 + 2)));
}

#[test]
fn a_frame_that_was_saved_meanwhile_gets_no_fill() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    let pager = watching(machine.parts());
    pager.blocks().empty(&mut committed(&pager, 0xaa), true).unwrap();
    let (gfn, seen) = (Gfn(70), pager.ledger().content(Gfn(70)));
    assert_eq!(seen, Content::Empty { fill: 0xaa, hard: false });
    assert!(matches!(pager.installer().install(gfn, seen).unwrap(), Served::Done));
    assert_eq!(machine.in_file(gfn), Some([0xaa; 4096]));
    Machine::put(&machine.ram, gfn, &page_of(7));
    assert_eq!(pager.evictor().evict(&[gfn], &NothingKnown).unwrap().saved, 1);
    assert!(matches!(pager.installer().install(gfn, seen).unwrap(), Served::Busy));
    assert!(machine.in_file(gfn).is_none());
    let _threads = serve(&pager, 1);
    assert!(machine.guest().read(gfn) == page_of(7));
}

/// Each check of what the VM takes tells the evictor.
#[test]
fn no_fault_waits_for_room_while_the_evictor_waits() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    let pager = watching(machine.parts());
    let looks = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&looks);
    pager.room().on_pressure(move || {
        count.fetch_add(1, SeqCst);
    });
    pager.room().set_marks(0, 0);
    pager.room().evictor_waits().store(true, SeqCst);
    pager.room().wait_for_room();
    assert_eq!(looks.load(SeqCst), 0);
    pager.room().evictor_waits().store(false, SeqCst);
    pager.room().wait_for_room();
    assert!(looks.load(SeqCst) > 1);
}

/// Whoever closes a gate may not know who else has one open, or which marks were set meanwhile.
#[test]
fn nobody_waits_for_room_while_a_gate_is_open() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    let pager = watching(machine.parts());
    let room = pager.room();
    let waits = || (room.is_over_limit(), room.may_halt());
    let (first, second) = (OpenGate::for_touches(room), OpenGate::for_faults(room));
    room.set_marks(0, 0);
    room.halt_above(0);
    assert_eq!(waits(), (false, false));
    let third = OpenGate::for_faults(room);
    drop(first);
    assert_eq!(waits(), (false, true));
    drop(second);
    assert_eq!(waits(), (false, true), "one is open");
    drop(third);
    assert_eq!(waits(), (true, true));
    let for_touches = OpenGate::for_touches(room);
    assert_eq!(waits(), (true, false));
    drop(for_touches);
    room.lift();
    assert_eq!(waits(), (false, false));
}

/// The guest goes on behind what it read before, with almost no room left.
#[test]
fn no_more_comes_at_once_than_there_is_room_for() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    ALL.frames().for_each(|gfn| Machine::put(&machine.ram, gfn, &page_of(gfn.0 + 2)));
    let pager = watching(machine.parts());
    let frames: Vec<Gfn> = ALL.frames().collect();
    assert_eq!(pager.evictor().evict(&frames, &NothingKnown).unwrap().saved, ALL.count);
    let mut buffer = PageBuffer::new(128);
    let mut comes = |first: u64| {
        let gfn = ALL.frames().find(|gfn| {
            gfn.0 >= first && !says(&pager, FrameRange::new(*gfn, 1), Content::Resident)
        });
        let before = pager.residency().taken_bytes().unwrap();
        assert!(matches!(
            pager.faults().refiller().refill_ahead(gfn.unwrap(), &mut buffer).unwrap(),
            Served::Done
        ));
        (pager.residency().taken_bytes().unwrap() - before) / FRAME_BYTES
    };
    assert!(comes(0) > 4);
    let taken = pager.residency().taken_bytes().unwrap();
    pager.room().set_marks(taken, taken + 2 * FRAME_BYTES);
    assert_eq!(comes(64), 4);
    // Not even the pages before it come.
    assert_eq!(comes(133), 1);
}

/// However long ago its content went.
#[test]
fn what_comes_back_at_the_limit_is_missed() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    let pager = watching(machine.parts());
    let (room, residency) = (pager.room(), pager.residency());
    let counted = |gfn| {
        let comeback = residency.count_refill(gfn, || room.is_at_limit());
        residency.count_hits(7, comeback);
        let counters = pager.counters();
        [&counters.refaulted_frames, &counters.missed_frames].map(|count| count.load(SeqCst))
    };
    assert_eq!(counted(Gfn(1)), [0, 0], "there is no limit");
    let taken = residency.taken_bytes().unwrap();
    room.set_marks(taken + 8 * FRAME_BYTES, taken + 9 * FRAME_BYTES);
    assert_eq!(counted(Gfn(2)), [0, 0], "there is room");
    room.set_marks(taken + 8 * FRAME_BYTES, taken + 16 * FRAME_BYTES);
    assert_eq!(counted(Gfn(3)), [0, 8]);
    room.set_marks(taken + FRAME_BYTES, u64::MAX);
    assert_eq!(counted(Gfn(4)), [0, 8], "nothing can go");
}

/// The guest goes on behind frames that read as zero, without room left.
#[test]
fn without_room_a_touch_gets_one_frame_of_zeros() {
    require!(available());
    let machine = Machine::small();
    let pager = watching(machine.parts());
    pager.room().set_marks(u64::MAX - 1, u64::MAX - 1);
    let mut ahead = ReadAhead::default();
    let mut comes = || {
        let before = pager.residency().taken_bytes().unwrap();
        let gfn = (0..).map(Gfn).find(|gfn| pager.ram().is_hole(FrameRange::new(*gfn, 1)).unwrap());
        let served = pager.installer().install_ahead(gfn.unwrap(), Content::Resident, &mut ahead);
        assert!(matches!(served.unwrap(), Served::Done));
        (pager.residency().taken_bytes().unwrap() - before) / FRAME_BYTES
    };
    assert!((0..4).map(|_| comes()).max() > Some(1));
    pager.room().set_marks(0, 0);
    assert!((0..4).all(|_| comes() == 1));
}

/// A thread tries again and again to lock a huge frame of which one frame is locked. Each time it
/// locks the others for a moment, and faults for them leave their mark.
#[test]
fn who_asks_while_a_huge_frame_is_tried_goes_on() {
    require!(available());
    let machine = Machine::small();
    let pager = watching(machine.parts());
    let _threads = serve(&pager, 0);
    pager.frames().split(Gfn(0).huge()).unwrap();
    let held = pager.ledger().lock_frame(Gfn(511)).unwrap();
    let (is_done, guest) = (Arc::new(AtomicBool::new(false)), machine.guest());
    let touching = {
        let is_done = Arc::clone(&is_done);
        thread::spawn(move || {
            let zeros = (0..500).all(|gfn| guest.read(Gfn(gfn)) == page_of(0));
            is_done.store(true, SeqCst);
            zeros
        })
    };
    until("the guest to go on", || {
        let busy = (0..1000).all(|_| {
            let tried = pager.installer().install_huge(Gfn(0), Content::Resident).unwrap();
            matches!(tried, Served::Busy)
        });
        assert!(busy);
        is_done.load(SeqCst).then_some(())
    });
    assert!(touching.join().unwrap());
    assert!(!held.abandon());
}

#[test]
fn what_was_unplugged_meanwhile_stays_so() {
    require!(available());
    let machine = Machine::small();
    let pager = watching(machine.parts());
    pager.pluggable().watch_pluggable(vec![ALL], Arc::new(Deaf)).unwrap();
    pager.pluggable().unplug(ALL).unwrap();
    assert!(pager.installer().refill(ALL).unwrap());
    assert!(says(&pager, ALL, Content::Unplugged));
}

#[test]
fn a_watch_that_is_another_blocks_by_now_stays() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    Machine::put(&machine.ram, METADATA, &page_of(9));
    let pager = watching(machine.parts());
    pager.blocks().empty(&mut committed(&pager, 0), true).unwrap();
    let last = BLOCK.end();
    assert!(matches!(pager.installer().restore(METADATA, last, ORDER).unwrap(), Served::Busy));
    assert!(says(&pager, BLOCK, Content::Empty { fill: 0, hard: false }));
    let watch = Content::Watch { head: BLOCK.start, order: ORDER };
    assert_eq!(pager.ledger().unlocked(METADATA), Some(watch));
    pager.installer().restore_watched(METADATA).unwrap();
    assert!(says(&pager, ALL, Content::Resident));
    // With the block back, there is nothing left to restore.
    assert!(matches!(pager.installer().restore_watched(METADATA).unwrap(), Served::Done));
}

#[test]
fn a_watch_that_is_another_blocks_by_the_time_it_is_to_end_stays() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    let pager = watching(machine.parts());
    pager.blocks().empty(&mut committed(&pager, 0), true).unwrap();
    let watch = pager.ledger().content(METADATA);
    let seen = Content::Watch { head: BLOCK.end(), order: ORDER };
    pager.returner().end_watch(METADATA, seen).unwrap();
    assert_eq!(pager.ledger().unlocked(METADATA), Some(watch));
    pager.returner().end_watch(METADATA, watch).unwrap();
    assert_eq!(pager.ledger().unlocked(METADATA), Some(Content::Resident));
}

/// A kernel that writes to a frame's metadata between any two looks of a witness, so that no two of
/// them agree.
struct Restless(Arc<Ram>);

impl Witness for Restless {
    fn looks_freed(&self, _: Gfn, read: &dyn Fn(Gpa) -> Option<PageWords>) -> bool {
        let word = |words: PageWords| words[0].load(SeqCst);
        let look = || read(METADATA.gpa()).map(word);
        let first = look();
        self.0.words(METADATA.gpa(), 1).unwrap()[0].fetch_add(1, SeqCst);
        first.is_some() && first == look()
    }
}

/// A judge whose kernel used all frames when they were evicted.
struct AllUsed;

impl Judge for AllUsed {
    fn is_dead(&self, _: Gfn) -> bool {
        false
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![true; frames.len()]
    }
}

/// Metadata of neighbours is read together. What looks freed in one such read is not freed yet.
#[test]
fn neighbours_that_look_freed_once_come_back() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    ALL.frames().for_each(|gfn| Machine::put(&machine.ram, gfn, &page_of(gfn.0 + 2)));
    let pager = watching(machine.parts());
    pager.residency().believe(Some(Arc::new(Restless(Arc::clone(pager.ram())))));
    let frames: Vec<Gfn> = BLOCK.frames().collect();
    assert_eq!(pager.evictor().evict(&frames, &AllUsed).unwrap().saved, BLOCK.count);
    let mut buffer = PageBuffer::new(128);
    let refiller = pager.faults().refiller();
    assert!(matches!(refiller.refill_ahead(BLOCK.start, &mut buffer).unwrap(), Served::Done));
    let came = BLOCK.frames().filter(|gfn| machine.in_file(*gfn).is_some()).count();
    assert!(came > 1, "with neighbours");
    let is_lost =
        |gfn: &Gfn| pager.ledger().content(*gfn) == Content::Empty { fill: 0, hard: false };
    assert_eq!(BLOCK.frames().find(is_lost), None);
}
