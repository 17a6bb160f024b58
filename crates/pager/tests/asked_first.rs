//! The page that was touched is there before those that come with it. This process is the guest.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, available, page_of, serve, watching};
use ebb_pager::{IoMapping, NothingKnown, PagerParts};
use ebb_units::{FrameRange, Gfn};
use testkit::{require, until};

const ASKED: Gfn = Gfn(3);
const FRAMES: FrameRange = FrameRange::new(Gfn(0), 8);
const DEADLINE: Duration = Duration::from_secs(20);

/// Maps other frames for devices only once the guest has the one that it asked for.
#[derive(Default)]
struct Gate {
    has_gone_on: Mutex<bool>,
    changed: Condvar,
    was_late: AtomicBool,
}

struct Waits(Arc<Gate>);

impl IoMapping for Waits {
    fn map(&self, frames: FrameRange) -> io::Result<()> {
        if frames != FrameRange::new(ASKED, 1) {
            let gate = &self.0;
            let waits = |has_gone_on: &mut bool| !*has_gone_on;
            let has_gone_on = gate.has_gone_on.lock().unwrap();
            let waited = gate.changed.wait_timeout_while(has_gone_on, DEADLINE, waits);
            gate.was_late.fetch_or(waited.unwrap().1.timed_out(), SeqCst);
        }
        Ok(())
    }

    fn unmap(&self, _: FrameRange) -> bool {
        true
    }

    fn lost(&self, _: FrameRange) {}
}

#[test]
fn who_touched_a_page_goes_on_before_what_lies_around_is_there() {
    require!(available());
    let (machine, gate) = (Machine::small(), Arc::new(Gate::default()));
    machine.ram.populate(FRAMES).unwrap();
    let parts = PagerParts { devices: Box::new(Waits(Arc::clone(&gate))), ..machine.parts() };
    let pager = watching(parts);
    for gfn in FRAMES.frames() {
        Machine::put(&machine.ram, gfn, &page_of(gfn.0 + 20));
    }
    let frames: Vec<Gfn> = FRAMES.frames().collect();
    assert_eq!(pager.evictor().evict(&frames, &NothingKnown).unwrap().saved, 8);
    let _threads = serve(&pager, 1);
    let guest = machine.guest();
    let reader = thread::spawn({
        let gate = Arc::clone(&gate);
        move || {
            let found = guest.read(ASKED);
            *gate.has_gone_on.lock().unwrap() = true;
            gate.changed.notify_all();
            found
        }
    });
    assert!(reader.join().unwrap() == page_of(23));
    // All of them have come.
    let is_back = |gfn: &Gfn| pager.ledger().unlocked(*gfn) == Some(Content::Resident);
    until("those around it", || frames.iter().all(is_back).then_some(()));
    assert!(!gate.was_late.load(SeqCst));
    let guest = machine.guest();
    frames.iter().for_each(|&gfn| assert!(guest.read(gfn) == page_of(gfn.0 + 20), "{gfn:?}"));
}
