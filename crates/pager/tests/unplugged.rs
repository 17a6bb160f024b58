//! Memory that is plugged and unplugged while the VM runs: every touch of unplugged memory is
//! reported. This process is the guest.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, OnceLock};

use ebb_ledger::Content;
use ebb_pager::testing::{Machine, Threads, available, page_of, serve};
use ebb_pager::{IoMapping, NoDevices, NothingKnown, Pager, PagerParts, Sentry, SoftIommu};
use ebb_sys::numa;
use ebb_sys::process::Process;
use ebb_units::{FrameRange, Gfn};
use testkit::require;

const ALL: FrameRange = FrameRange::new(Gfn(0), 512);

/// Touches of unplugged frames, in order; `true`: a write.
#[derive(Default)]
struct Touches(Mutex<Vec<(u64, bool)>>);

impl Touches {
    fn take(&self) -> Vec<(u64, bool)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

impl Sentry for Touches {
    fn touched(&self, gfn: Gfn, write: bool) {
        self.0.lock().unwrap().push((gfn.0, write));
    }
}

type Act = Box<dyn Fn() + Send + Sync>;

/// What another thread does at the moment when a hole is about to be filled.
struct Beside(Arc<OnceLock<Act>>);

impl IoMapping for Beside {
    fn map(&self, _: FrameRange) -> io::Result<()> {
        Ok(())
    }

    fn unmap(&self, _: FrameRange) -> bool {
        true
    }

    fn lost(&self, _: FrameRange) {
        if let Some(act) = self.0.get() {
            act();
        }
    }

    fn any(&self) -> bool {
        false
    }
}

struct Daemon {
    machine: Machine,
    pager: Arc<Pager>,
    touches: Arc<Touches>,
    _threads: Threads,
}

impl Daemon {
    /// Makes a VM all of whose memory can be plugged, and is.
    fn new(devices: impl FnOnce(&Machine) -> Box<dyn IoMapping>) -> Daemon {
        let machine = Machine::small();
        machine.ram.populate(ALL).unwrap();
        let parts = PagerParts { devices: devices(&machine), ..machine.parts() };
        let pager = Arc::new(Pager::new(parts).unwrap().0);
        let touches = Arc::new(Touches::default());
        pager
            .pluggable()
            .watch_pluggable(vec![ALL], Arc::clone(&touches) as Arc<dyn Sentry>)
            .unwrap();
        let _threads = serve(&pager, 1);
        Daemon { machine, pager, touches, _threads }
    }

    fn plain() -> Daemon {
        Daemon::new(|_| Box::new(NoDevices))
    }

    fn resident_bytes(&self) -> u64 {
        self.machine.ram.resident_bytes().unwrap()
    }
}

#[test]
fn every_touch_of_unplugged_memory_is_reported() {
    require!(available());
    let daemon = Daemon::plain();
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    guest.write(Gfn(5), &page_of(7));
    pager.pluggable().unplug(ALL).unwrap();
    assert_eq!(daemon.resident_bytes(), 0);
    assert_eq!(pager.ledger().content(Gfn(511)), Content::Unplugged);
    let refused = pager.devices().pin(FrameRange::new(Gfn(5), 1), false).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    let refused = pager.devices().pin_soon(FrameRange::new(Gfn(5), 1), true).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(daemon.touches.take(), []);
    for gfn in (0..512).step_by(64) {
        assert_eq!(guest.read(Gfn(gfn)), page_of(0));
        guest.write(Gfn(gfn + 1), &page_of(3));
        assert_eq!(daemon.touches.take(), [(gfn, false), (gfn + 1, true)]);
    }
    // A second unplug takes the memory that the touches brought.
    pager.pluggable().unplug(ALL).unwrap();
    assert_eq!(daemon.resident_bytes(), 0);
    pager.pluggable().plug(ALL, false).unwrap();
    assert_eq!(daemon.resident_bytes(), 0);
    assert_eq!(guest.read(Gfn(5)), page_of(0));
    guest.write(Gfn(6), &page_of(9));
    assert_eq!(daemon.touches.take(), []);
    // Plugged memory keeps its content.
    pager.pluggable().plug(ALL, true).unwrap();
    assert_eq!((guest.read(Gfn(6)), daemon.resident_bytes()), (page_of(9), 2 << 20));
}

#[test]
fn what_a_device_uses_is_not_unplugged() {
    require!(available());
    let daemon = Daemon::plain();
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    guest.write(Gfn(5), &page_of(7));
    pager.devices().pin(FrameRange::new(Gfn(100), 1), false).unwrap();
    let refused = pager.pluggable().unplug(ALL).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ResourceBusy);
    assert_eq!((guest.read(Gfn(5)), daemon.touches.take()), (page_of(7), vec![]));
    pager.devices().unpin(FrameRange::new(Gfn(100), 1));
    pager.pluggable().unplug(ALL).unwrap();
    assert_eq!(daemon.resident_bytes(), 0);
    for frames in [FrameRange::new(Gfn(0), 511), FrameRange::new(Gfn(0), 1024)] {
        assert_eq!(
            pager.pluggable().unplug(frames).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }
}

#[test]
fn a_device_that_cannot_wait_is_kept_from_unplugged_memory() {
    require!(available());
    let mut iommu = None;
    let daemon = Daemon::new(|machine| {
        Box::new(Arc::clone(iommu.insert(Arc::new(SoftIommu::new(&machine.ram)))))
    });
    let (iommu, one) = (iommu.unwrap(), FrameRange::new(Gfn(9), 1));
    daemon.pager.pluggable().unplug(ALL).unwrap();
    assert!(iommu.pin(one).is_err());
    daemon.pager.pluggable().plug(ALL, false).unwrap();
    assert_eq!(daemon.machine.guest().read(Gfn(9)), page_of(0));
    assert!(iommu.pin(one).is_ok());
    iommu.unpin(one);
    assert_eq!(daemon.touches.take(), []);
}

#[test]
fn evicted_content_is_dropped_with_its_block() {
    require!(available());
    let daemon = Daemon::plain();
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    (0..512).for_each(|gfn| guest.write(Gfn(gfn), &page_of(gfn + 2)));
    let frames: Vec<Gfn> = (0..256).map(Gfn).collect();
    assert_eq!(pager.evictor().evict(&frames, &NothingKnown).unwrap().frames(), 256);
    assert!(pager.residency().store_usage().disk_slots_used > 0);
    // Some frames are back, and keep their slots.
    (0..16).for_each(|gfn| assert_eq!(guest.read(Gfn(gfn)), page_of(gfn + 2)));
    pager.pluggable().unplug(ALL).unwrap();
    assert_eq!((daemon.resident_bytes(), pager.residency().store_usage().disk_slots_used), (0, 0));
    pager.pluggable().plug(ALL, false).unwrap();
    assert_eq!((guest.read(Gfn(3)), guest.read(Gfn(300))), (page_of(0), page_of(0)));
}

/// Evicted or unplugged memory does not become resident by being looked for.
#[test]
fn only_what_is_in_memory_is_mapped_here() {
    require!(available());
    let daemon = Daemon::plain();
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    for gfn in [5, 6, 8] {
        guest.write(Gfn(gfn), &page_of(gfn));
    }
    assert_eq!(pager.evictor().evict(&[Gfn(5), Gfn(8)], &NothingKnown).unwrap().frames(), 2);
    let here = |gfn| {
        let this = Process::open(std::process::id() as i32).unwrap();
        let mut status = [0];
        let address = pager.ram().here(Gfn(gfn)).unwrap();
        numa::locate(&this, &[address], &mut status).unwrap();
        status[0] >= 0
    };
    pager.ram().unmap().unwrap();
    assert!(!here(6));
    assert!(pager.folios().map_here(Gfn(0).huge()).unwrap());
    assert_eq!([5, 6, 8, 511].map(here), [false, true, false, true]);
    assert!([5, 8].iter().all(|&gfn| daemon.machine.in_file(Gfn(gfn)).is_none()));
    assert_eq!([5, 8].map(|gfn| guest.read(Gfn(gfn))), [page_of(5), page_of(8)]);
    // Nothing is known of frames that another thread has locked.
    pager.ram().unmap().unwrap();
    let held = pager.ledger().lock_frame(Gfn(9)).unwrap();
    assert!(!pager.folios().map_here(Gfn(0).huge()).unwrap() && !here(6));
    assert!(!held.abandon());
    pager.pluggable().unplug(ALL).unwrap();
    assert!(pager.folios().map_here(Gfn(0).huge()).unwrap());
    assert_eq!((daemon.resident_bytes(), here(6)), (0, false));
}

/// A process that maps the memory without Ebb, as a vhost-user device's does, finds no hole where
/// memory is in use.
#[test]
fn who_maps_the_memory_by_itself_finds_what_is_in_use() {
    require!(available());
    let daemon = Daemon::plain();
    let (pager, guest) = (&daemon.pager, daemon.machine.guest());
    (0..8).for_each(|gfn| guest.write(Gfn(gfn), &page_of(gfn)));
    let frames: Vec<Gfn> = (0..8).map(Gfn).collect();
    assert_eq!(pager.evictor().evict(&frames, &NothingKnown).unwrap().frames(), 8);
    assert_eq!(guest.read(Gfn(7)), page_of(7));
    assert!((0..2).all(|gfn| daemon.machine.in_file(Gfn(gfn)).is_none()));
    pager.returner().give_back_in_use().unwrap();
    assert!(daemon.machine.in_file(Gfn(0)).is_none(), "it reads as zero by itself");
    assert!((1..8).all(|gfn| daemon.machine.in_file(Gfn(gfn)) == Some(page_of(gfn))));
    assert_eq!(pager.counters().saved_frames.load(SeqCst), 0);
}

/// While the fault thread fills an unplugged frame with zeros, the device plugs its memory, and
/// what is written there is saved: the zeros must not come after that.
#[test]
fn zeros_never_win_over_what_was_saved_meanwhile() {
    require!(available());
    let (beside, others_came) = (Arc::default(), Arc::new(AtomicBool::new(false)));
    let daemon = Daemon::new(|_| Box::new(Beside(Arc::clone(&beside))));
    let (pager, frame) = (&daemon.pager, Gfn(5));
    pager.pluggable().unplug(ALL).unwrap();
    let act: Act = {
        let (pager, others_came) = (Arc::downgrade(pager), Arc::clone(&others_came));
        Box::new(move || {
            let pager = pager.upgrade().unwrap();
            // Everybody locks the words first.
            let Some(held) = pager.residency().lock_huge(frame.huge()) else { return };
            held.abandon();
            pager.pluggable().plug(ALL, true).unwrap();
            Machine::put(pager.ram(), frame, &page_of(7));
            assert_eq!(pager.evictor().evict(&[frame], &NothingKnown).unwrap().saved, 1);
            others_came.store(true, SeqCst);
        })
    };
    assert!(beside.set(act).is_ok());
    let found = daemon.machine.guest().read(frame);
    assert!(found == page_of(if others_came.load(SeqCst) { 7 } else { 0 }));
    assert_eq!(daemon.touches.take(), [(5, false)]);
    // The words are free again.
    pager.pluggable().plug(ALL, true).unwrap();
}
