//! Memory in huge pages and in parts of them: no page of zeros may come where content is evicted.
//! This process is the guest.

use std::io::{PipeReader, PipeWriter};
use std::sync::{Arc, Mutex, PoisonError};

use ebb_pager::testing::{self, Machine, Threads, serve, watching};
use ebb_pager::{Grain, NothingKnown, Pager, PagerParts, Zeros};
use ebb_store::Page;
use ebb_sys::folios;
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa, HugeFrame};
use rustix::fs::sendfile;
use testkit::{HostSetting, require};

const ATTEMPTS: usize = 1000;
const ALL: FrameRange = FrameRange::new(Gfn(0), 512);

fn available(setting: Result<HostSetting, String>) -> Result<HostSetting, String> {
    testing::available()?;
    folios::Folios::open().map_err(|error| format!("nobody tells large folios: {error}"))?;
    setting
}

/// Lock on the host's settings: one test at a time changes them.
static SETTINGS: Mutex<()> = Mutex::new(());

/// Returns what a frame holds.
fn page(gfn: Gfn) -> Page {
    let mut page = [0; FRAME_BYTES as usize];
    page[..8].copy_from_slice(&(gfn.0 + 1).to_ne_bytes());
    page
}

struct Daemon {
    machine: Machine,
    pager: Arc<Pager>,
    _threads: Threads,
}

impl Daemon {
    fn new(machine: Machine, grain: Grain) -> Daemon {
        let pager = watching(PagerParts { grain, ..machine.parts() });
        let _threads = serve(&pager, 1);
        Daemon { machine, pager, _threads }
    }

    fn fill(&self) {
        let guest = self.machine.guest();
        ALL.frames().for_each(|gfn| guest.write(gfn, &page(gfn)));
    }

    /// Returns the frames in which the guest does not find what [`Daemon::fill`] has put there.
    fn wrong(&self) -> Vec<Gfn> {
        let guest = self.machine.guest();
        ALL.frames().filter(|gfn| guest.read(*gfn) != page(*gfn)).collect()
    }
}

/// A huge frame is evicted except one frame, which the VMM has punched, as a balloon does. A device
/// writes to that hole by the daemon's own mapping, which may get huge pages.
#[test]
fn a_pin_on_a_hole_brings_no_huge_page() {
    let _alone = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let setting = available(HostSetting::shared_huge_pages());
    require!(setting.as_ref());
    let machine = Machine::small();
    let _ = machine.ram.files()[0].mapping.use_huge_pages(true);
    let daemon = Daemon::new(machine, Grain::Huge);
    let (pager, frame) = (&daemon.pager, FrameRange::new(Gfn(7), 1));
    daemon.fill();
    let (guest, all): (_, Vec<Gfn>) = (daemon.machine.guest(), ALL.frames().collect());
    assert_eq!(pager.evictor().evict(&all, &NothingKnown).unwrap().frames(), 512);
    assert!(guest.read(frame.start) == page(Gfn(7)));
    // The frame, and those that came with it.
    let back: Vec<Gfn> =
        ALL.frames().filter(|gfn| daemon.machine.in_file(*gfn).is_some()).collect();
    back.iter().for_each(|gfn| guest.punch(FrameRange::new(*gfn, 1)).unwrap());
    pager.devices().pin(frame, true).unwrap();
    Machine::put(pager.ram(), frame.start, &page(Gfn(7)));
    pager.devices().unpin(frame);
    let punched: Vec<Gfn> = back.into_iter().filter(|gfn| *gfn != frame.start).collect();
    assert!(punched.len() < 256 && daemon.wrong() == punched);
}

/// RAM begins in the middle of a huge frame, and with it the first huge page of the file. So each huge
/// frame has halves of two huge pages.
#[test]
fn what_shares_a_huge_page_with_its_neighbour_stays() {
    let _alone = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let setting = available(HostSetting::shared_huge_pages());
    require!(setting.as_ref());
    let machine = Machine::at(Gpa(1 << 20), 6 << 20);
    machine.allow_huge_pages(true);
    let daemon = Daemon::new(machine, Grain::Huge);
    let guest = daemon.machine.guest();
    let [first, neighbour] = [1, 2].map(|huge| FrameRange::huge(HugeFrame(huge)));
    first.frames().for_each(|gfn| guest.write(gfn, &page(gfn)));
    let all: Vec<Gfn> = first.frames().collect();
    let evicted = daemon.pager.evictor().evict(&all, &NothingKnown).unwrap().frames();
    // Brings the huge page whose other half is the first one's.
    for gfn in neighbour.frames() {
        guest.read(gfn);
    }
    let wrong = first.frames().filter(|gfn| guest.read(*gfn) != page(*gfn)).count();
    assert_eq!((evicted, wrong), (0, 0));
}

/// Makes a VM of small pages, all of whose memory came before huge pages were forbidden.
fn in_large_folios() -> Daemon {
    in_folios_of(Machine::small())
}

fn in_folios_of(machine: Machine) -> Daemon {
    machine.allow_huge_pages(true);
    let daemon = Daemon::new(machine, Grain::Frame);
    ALL.frames().for_each(|gfn| Machine::put(daemon.pager.ram(), gfn, &page(gfn)));
    daemon.machine.allow_huge_pages(false);
    daemon
}

/// Returns the frames of the second half of each 64 KiB.
fn half() -> Vec<Gfn> {
    ALL.frames().filter(|gfn| gfn.0 % 16 >= 8).collect()
}

/// Uses a page of the file, as an I/O does: its folio cannot be split for as long as the pipe
/// lives.
fn in_use(daemon: &Daemon, gfn: Gfn) -> (PipeReader, PipeWriter) {
    let pipe = std::io::pipe().unwrap();
    let (guest, mut offset) = (daemon.machine.guest(), gfn.gpa().0);
    // The pipe takes the page itself.
    let sent = sendfile(&pipe.1, guest.file(), Some(&mut offset), FRAME_BYTES as usize).unwrap();
    assert_eq!(sent, FRAME_BYTES as usize);
    pipe
}

/// Evicts all of [`half`]. Tries again, as a frame that has just come back may still be locked by
/// the thread that brought it.
fn evict_half(daemon: &Daemon) {
    let mut evicted = 0;
    for _ in 0..ATTEMPTS {
        evicted += daemon.pager.evictor().evict(&half(), &NothingKnown).unwrap().frames();
        if evicted == 256 {
            return;
        }
        std::thread::yield_now();
    }
    panic!("{evicted} of 256 frames were evicted");
}

/// Checks that frames in one large folio with a frame in use stay until that use has ended.
fn parts_go_once_they_can(daemon: &Daemon, frames_in_use: u64) {
    daemon.pager.folios().mind_large_folios(Process::own().unwrap()).unwrap();
    let used = in_use(daemon, Gfn(0));
    let evict = || daemon.pager.evictor().evict(&half(), &NothingKnown).unwrap().frames();
    assert_eq!(evict(), 256 - frames_in_use / 2);
    assert_eq!(daemon.wrong(), []);
    drop(used);
    evict_half(daemon);
    assert_eq!(daemon.wrong(), []);
}

#[test]
fn parts_of_a_huge_page_go_once_it_is_split() {
    let _alone = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let setting = available(HostSetting::shared_huge_pages());
    require!(setting.as_ref());
    parts_go_once_they_can(&in_large_folios(), 512);
}

#[test]
fn parts_of_a_folio_of_64_kib_go_once_it_is_split() {
    let _alone = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let setting = available(HostSetting::shared_folios(64));
    require!(setting.as_ref());
    // With this setting, its mappings begin where large folios fit.
    let huge_pages = HostSetting::shared_huge_pages();
    require!(huge_pages.as_ref());
    let machine = Machine::small();
    drop(huge_pages);
    // Otherwise folios would be of 2 MiB where the host's settings ask for them.
    let none_larger = HostSetting::no_shared_huge_pages();
    require!(none_larger.as_ref());
    let daemon = in_folios_of(machine);
    drop(none_larger);
    parts_go_once_they_can(&daemon, 16);
}

#[test]
fn what_cannot_be_split_goes_with_its_whole_huge_frame() {
    let _alone = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let setting = available(HostSetting::shared_huge_pages());
    require!(setting.as_ref());
    let daemon = in_large_folios();
    daemon.pager.folios().mind_large_folios(Process::own().unwrap()).unwrap();
    let _used = in_use(&daemon, Gfn(0));
    let all: Vec<Gfn> = ALL.frames().collect();
    assert_eq!(daemon.pager.evictor().evict(&all, &NothingKnown).unwrap().frames(), 512);
    assert_eq!(daemon.wrong(), []);
    // Frames that came back did so in small pages.
    evict_half(&daemon);
    assert_eq!(daemon.wrong(), []);
}

/// Holes do not keep other frames from eviction.
#[test]
fn frames_between_holes_go_one_by_one() {
    let _alone = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let setting = available(HostSetting::shared_huge_pages());
    require!(setting.as_ref());
    let daemon = in_large_folios();
    daemon.pager.folios().mind_large_folios(Process::own().unwrap()).unwrap();
    let guest = daemon.machine.guest();
    half().iter().for_each(|gfn| guest.punch(FrameRange::new(*gfn, 1)).unwrap());
    daemon.pager.devices().pin(FrameRange::new(Gfn(0), 1), false).unwrap();
    let all: Vec<Gfn> = ALL.frames().collect();
    assert_eq!(daemon.pager.evictor().evict(&all, &NothingKnown).unwrap().frames(), 511);
}

/// Makes a VM of huge pages, whose memory is in a huge page.
fn in_a_huge_page() -> Daemon {
    let machine = Machine::small();
    machine.allow_huge_pages(true);
    let daemon = Daemon::new(machine, Grain::Huge);
    daemon.fill();
    daemon.pager.folios().mind_large_folios(Process::own().unwrap()).unwrap();
    daemon
}

#[test]
fn what_is_broken_up_goes_frame_by_frame() {
    let _alone = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let setting = available(HostSetting::shared_huge_pages());
    require!(setting.as_ref());
    let daemon = in_a_huge_page();
    let (pager, huge) = (&daemon.pager, HugeFrame(0));
    assert_eq!(
        pager.evictor().evict(&half(), &NothingKnown).unwrap().frames(),
        0,
        "whole or not at all"
    );
    assert!(pager.folios().can_break_up(huge) && pager.folios().grain_of(huge) == Grain::Huge);
    let used = in_use(&daemon, Gfn(0));
    // The VMM's part, done by this process.
    daemon.machine.allow_huge_pages(false);
    pager.ram().use_small_pages(huge).unwrap();
    (0..2).for_each(|_| pager.folios().break_up(huge).unwrap());
    assert_eq!(pager.folios().grain_of(huge), Grain::Frame);
    let evicted = pager.evictor().evict(&half(), &NothingKnown).unwrap().frames();
    assert_eq!(evicted, 0, "it cannot be split as long as somebody uses it");
    drop(used);
    evict_half(&daemon);
    assert_eq!(daemon.wrong(), []);
    // Evicted as a whole, it comes back in small pages.
    let all: Vec<Gfn> = ALL.frames().collect();
    let mut evicted = 0;
    while evicted < 512 {
        evicted += pager.evictor().evict(&all, &NothingKnown).unwrap().frames();
    }
    evict_half_of_what_comes_back(&daemon);
}

/// Checks that a return of all content leaves no large folio.
fn evict_half_of_what_comes_back(daemon: &Daemon) {
    assert_eq!(daemon.wrong(), []);
    let _used = in_use(daemon, Gfn(0));
    evict_half(daemon);
    assert_eq!(daemon.wrong(), []);
}

/// Another process that maps the memory anew may bring large folios.
#[test]
fn nothing_stays_broken_up_where_memory_is_mapped_anew() {
    let _alone = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let setting = available(HostSetting::shared_huge_pages());
    require!(setting.as_ref());
    let daemon = in_a_huge_page();
    daemon.pager.folios().break_up(HugeFrame(0)).unwrap();
    daemon.pager.returner().give_back_all(Zeros::Fill).unwrap();
    assert_eq!(daemon.pager.folios().grain_of(HugeFrame(0)), Grain::Huge);
}

#[test]
fn nothing_is_broken_up_where_nobody_tells_large_folios() {
    let setting = available(HostSetting::shared_huge_pages());
    require!(setting.as_ref());
    let daemon = Daemon::new(Machine::small(), Grain::Huge);
    assert!(!daemon.pager.folios().can_break_up(HugeFrame(0)));
    let error = daemon.pager.folios().break_up(HugeFrame(0)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
    assert_eq!(daemon.pager.folios().grain_of(HugeFrame(0)), Grain::Huge);
}

/// The control, and the last safeguard: nothing looks for large folios, and parts that the kernel
/// leaves as zeros are found and put back.
#[test]
fn a_part_that_became_zeros_is_put_back() {
    let _alone = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let setting = available(HostSetting::shared_huge_pages());
    require!(setting.as_ref());
    let daemon = in_large_folios();
    let _used = in_use(&daemon, Gfn(0));
    let error = daemon.pager.evictor().evict(&half(), &NothingKnown).unwrap_err();
    assert!(error.to_string().contains("large folio"), "{error}");
    assert_eq!(daemon.wrong(), []);
}
