//! A huge frame that the guest's allocator has back, and touches, beside a device that cannot wait.
//! This process is the guest.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, available, page_of, serve, watching};
use ebb_pager::{IoMapping, Judge, Pager, PagerParts, Sharer, Sharing};
use ebb_units::{FrameRange, Gfn, HugeFrame};
use testkit::{require, until};

const ALL: FrameRange = FrameRange::new(Gfn(0), 512);
const TOUCHED: Gfn = Gfn(5);

/// A sharer by which the guest may have all of it at a touch.
struct Soft;

impl Sharer for Soft {
    fn sharing(&self, _: HugeFrame) -> Sharing {
        Sharing::Soft
    }

    fn installed(&self, _: HugeFrame, _: Duration) {}

    fn violated(&self, _: HugeFrame) {}
}

/// An evictor of the touched frame. Between its look at the frame and its record, the guest writes
/// the frame.
#[derive(Default)]
struct Evictor {
    pager: OnceLock<Arc<Pager>>,
    has_looked: AtomicBool,
    is_written: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Judge for Evictor {
    fn is_dead(&self, _: Gfn) -> bool {
        false
    }

    fn settled(&self, frames: &[Gfn]) -> Vec<bool> {
        vec![true; frames.len()]
    }

    fn in_use(&self, frames: &[Gfn]) -> Vec<bool> {
        self.has_looked.store(true, SeqCst);
        until("the guest's write", || self.is_written.load(SeqCst).then_some(()));
        vec![false; frames.len()]
    }
}

/// A device. When the pager asks whether there is one, the touched frame is evicted at that moment,
/// if nobody has locked it.
struct Beside(Arc<Evictor>);

impl IoMapping for Beside {
    fn map(&self, _: FrameRange) -> io::Result<()> {
        Ok(())
    }

    fn unmap(&self, _: FrameRange) -> bool {
        true
    }

    fn lost(&self, _: FrameRange) {}

    fn any(&self) -> bool {
        let evictor = &self.0;
        if let Some(pager) = evictor.pager.get()
            && pager.ledger().unlocked(TOUCHED) == Some(Content::Resident)
        {
            let (pager, judge) = (Arc::clone(pager), Arc::clone(evictor));
            let evict = move || {
                pager.evictor().evict(&[TOUCHED], &*judge).unwrap();
            };
            *evictor.thread.lock().unwrap() = Some(thread::spawn(evict));
            until("a look", || evictor.has_looked.load(SeqCst).then_some(()));
        }
        true
    }
}

/// The evictor protects a frame once its word is free. A protection that ended only then would be
/// the evictor's, and what the guest writes next would be lost.
#[test]
fn its_protection_ends_before_its_word_is_free() {
    require!(available());
    let machine = Machine::small();
    machine.ram.populate(ALL).unwrap();
    let evictor = Arc::new(Evictor::default());
    let devices = Box::new(Beside(Arc::clone(&evictor)));
    let pager = watching(PagerParts { devices, ..machine.parts() });
    pager.installer().share(Some(Arc::new(Soft)));
    let _threads = serve(&pager, 1);
    let held = pager.residency().lock_huge(TOUCHED.huge()).expect("nobody else works on it");
    let held = held.record().ok().expect("no device uses it");
    pager.residency().empty_huge([&held].into_iter()).unwrap();
    held.settle(false);
    assert!(evictor.pager.set(Arc::clone(&pager)).is_ok());
    let guest = machine.guest();
    guest.write(TOUCHED, &page_of(7));
    evictor.is_written.store(true, SeqCst);
    let resident = |content: &Content| *content == Content::Resident;
    until("the frame", || pager.ledger().unlocked(Gfn(511)).filter(resident));
    if let Some(thread) = evictor.thread.lock().unwrap().take() {
        thread.join().unwrap();
    }
    assert!(guest.read(TOUCHED) == page_of(7));
    assert_eq!(pager.evictor().evict(&[TOUCHED], &*evictor).unwrap().saved, 1);
    assert!(guest.read(TOUCHED) == page_of(7));
}
