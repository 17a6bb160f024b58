use std::cell::Cell;
use std::process::{Child, Command, Stdio};

use ebb_store::StoreError;
use testkit::forge::Forge;

use super::*;
use crate::limit::judge::Sources;
use crate::limit::windows::machine::{Machine, NoVmm};

fn limiter() -> Option<Limiter> {
    let machine = Machine::new()?;
    Some(Limiter::new(&machine.process, &machine.pager, false).unwrap())
}

#[test]
fn steps_in_vain_end() {
    let Some(mut limiter) = limiter() else { return eprintln!("SKIPPED: no userfaultfd") };
    assert!(limiter.is_more(8, true));
    let steps = |limiter: &mut Limiter| (1..100).find(|_| !limiter.is_more(8, false));
    assert_eq!(steps(&mut limiter), Some(FRUITLESS_STEPS));
    // It ends as late the next time.
    assert_eq!(steps(&mut limiter), Some(FRUITLESS_STEPS));
}

#[test]
fn frames_that_need_no_room_are_tried_before_a_full_store_counts() {
    let Some(mut limiter) = limiter() else { return eprintln!("SKIPPED: no userfaultfd") };
    // A step that tried 8 frames was refused, after some (`any`) or none were evicted.
    let step = |limiter: &mut Limiter, error: io::Error, any| {
        let is_more = limiter.is_more(8, any);
        limiter.go_without_room(error, is_more)
    };
    let full = || io::Error::from(StoreError::Full);
    assert!((1..FRUITLESS_STEPS).all(|_| limiter.is_more(8, false)));
    assert!(step(&mut limiter, full(), false).is_ok());
    // Evictions before the step that was refused do not count, nor do a few wrong guesses.
    for any in [false, true] {
        assert!((1..FRUITLESS_STEPS).all(|_| step(&mut limiter, full(), false).is_ok()));
        assert_eq!(step(&mut limiter, full(), any).is_ok(), any);
        assert!(step(&mut limiter, full(), false).is_ok());
    }
    // Any other error is reported at once.
    let other = io::Error::from(io::ErrorKind::PermissionDenied);
    assert!(step(&mut limiter, other, true).is_err());
    assert!(limiter.no_room.is_none());
}

/// Another process in place of the VMM. This process has the swap file open: a VMM's would be a
/// disk, which pins memory. The other one has nothing open, and nothing mapped that could be
/// forgotten. It ends when its input does.
fn vmm() -> (Child, Process) {
    let null = Stdio::null;
    let cat = Command::new("cat").stdin(Stdio::piped()).stdout(null()).stderr(null()).spawn();
    let cat = cat.unwrap();
    let process = Process::open(cat.id() as i32).unwrap();
    (cat, process)
}

#[test]
fn a_step_tells_that_what_needs_room_has_none() {
    let Some(machine) = Machine::with_slots(8) else {
        return eprintln!("SKIPPED: no userfaultfd");
    };
    let (mut child, vmm) = vmm();
    let mut limiter = Limiter::new(&vmm, &machine.pager, false).unwrap();
    machine.write(0, 512);
    machine.pager.frames().watch_all().unwrap();
    let (pagemap, no, cold) = (limiter.pagemap(), |_| false, |_| 0);
    let of = Sources { process: &vmm, ..machine.sources() };
    let mut windows = Windows::new(of, (&machine.pager, &NoVmm), &pagemap, &no, &cold, false);
    // A turn of no time, in which there is a step nevertheless.
    let now = Instant::now();
    let marks = Marks { limit_bytes: 4096, high_bytes: 4096, low_bytes: 0 };
    assert_eq!(limiter.step(&mut windows, marks, now).unwrap(), Left::MoreWithoutRoom);
    let error = (0..100).find_map(|_| match limiter.step(&mut windows, marks, now) {
        Ok(left) => {
            assert_eq!(left, Left::MoreWithoutRoom);
            None
        }
        Err(error) => Some(error),
    });
    assert!(is_no_room(&error.unwrap()));
    // With nothing to evict, nothing is searched.
    assert_eq!(limiter.step(&mut windows, marks, now).unwrap(), Left::MoreWithoutRoom);
    limiter.end_search();
    assert_eq!(limiter.more(), Left::More);
    child.wait().unwrap();
}

#[test]
fn a_search_in_vain_is_not_begun_again_at_once() {
    let Some(machine) = Machine::new() else { return eprintln!("SKIPPED: no userfaultfd") };
    let (mut child, vmm) = vmm();
    let mut limiter = Limiter::new(&vmm, &machine.pager, false).unwrap();
    machine.write(0, 4);
    let (pagemap, stays, cold) = (limiter.pagemap(), Cell::new(0), |_| 0);
    let spare = |_| stays.replace(stays.get() + 1) < u64::MAX;
    let of = Sources { process: &vmm, ..machine.sources() };
    let mut windows = Windows::new(of, (&machine.pager, &NoVmm), &pagemap, &spare, &cold, false);
    let marks = Marks { limit_bytes: 4096, high_bytes: 4096, low_bytes: 0 };
    let end = Instant::now() + Duration::from_secs(60);
    limiter.began = Some(Instant::now() - Duration::from_secs(1));
    assert_eq!(limiter.step(&mut windows, marks, end).unwrap(), Left::Nothing);
    let asked = stays.get();
    assert!(asked > 0);
    assert_eq!(limiter.step(&mut windows, marks, end).unwrap(), Left::Nothing);
    assert_eq!(stays.get(), asked, "nothing is asked again");
    limiter.asked_at = None;
    let taken = machine.pager.residency().taken_bytes().unwrap();
    assert!(!limiter.asks(marks, taken), "nor the guest");
    // But it searches again once much more is taken.
    machine.write(4, 2);
    assert!(limiter.asks(marks, taken + 2 * FRAME_BYTES));
    limiter.began = Some(Instant::now() - Duration::from_secs(1));
    limiter.step(&mut windows, marks, end).unwrap();
    assert!(stays.get() > asked);
    // It also does once the reason may have changed.
    let asked = stays.get();
    limiter.step(&mut windows, marks, end).unwrap();
    assert_eq!(stays.get(), asked);
    limiter.end_search();
    limiter.step(&mut windows, marks, end).unwrap();
    assert!(stays.get() > asked);
    child.wait().unwrap();
}

/// The taken memory stays out of reach until something is evicted, not only until the next search.
#[test]
fn a_limit_is_out_of_reach_until_something_goes() {
    let Some(mut limiter) = limiter() else { return eprintln!("SKIPPED: no userfaultfd") };
    let marks = Marks { limit_bytes: 30, high_bytes: 20, low_bytes: 15 };
    assert_eq!(limiter.vain_mark(marks), None);
    limiter.vain = Some(Vain { until: Instant::now(), taken_bytes: 40 });
    assert!(!limiter.is_too_early(marks, 40), "it is looked for again");
    assert!(limiter.is_more(8, false));
    assert_eq!(limiter.vain_mark(marks), Some(45));
    assert!(limiter.is_more(8, true));
    assert_eq!(limiter.vain_mark(marks), None);
}

/// A burst leaves nothing behind that would end the next search too soon, or have it pause for too
/// long.
#[test]
fn a_search_begins_anew_where_nothing_had_to_go() {
    let Some(mut limiter) = limiter() else { return eprintln!("SKIPPED: no userfaultfd") };
    limiter.began = Some(Instant::now());
    assert!((1..FRUITLESS_STEPS).all(|_| limiter.is_more(8, false)));
    limiter.end_search();
    assert!(limiter.began.is_none());
    assert!((1..FRUITLESS_STEPS).all(|_| limiter.is_more(8, false)));
}

/// The evicted frames lie behind many windows of which nothing was evicted.
#[test]
fn a_sweep_passes_over_what_was_not_evicted() {
    let forge = Forge::with_free_blocks(4);
    let Some(machine) = Machine::forged_above(&forge, 3000) else {
        return eprintln!("SKIPPED: no userfaultfd");
    };
    let (mut child, vmm) = vmm();
    let mut limiter = Limiter::new(&vmm, &machine.pager, false).unwrap();
    machine.write(2048, 8);
    let kernel = machine.kernel();
    machine.pager.frames().watch_all().unwrap();
    let frames: Vec<Gfn> = (2048..2056).map(Gfn).collect();
    assert_eq!(machine.pager.evictor().evict(&frames, &ebb_pager::NothingKnown).unwrap().saved, 8);
    let (pagemap, no, cold) = (limiter.pagemap(), |_| false, |_| 0);
    let of =
        Sources { process: &vmm, guest: Some((&kernel, &|| true)), pins: false, hears_late: false };
    let windows = Windows::new(of, (&machine.pager, &NoVmm), &pagemap, &no, &cold, false);
    let dropped = || machine.pager.counters().dropped_frames.load(Relaxed);
    // Windows with one ledger word cost next to nothing.
    let late = Instant::now() + Duration::from_secs(60);
    limiter.sweeps = 5;
    limiter.sweep(&windows, late);
    assert_eq!((limiter.sweeps, dropped()), (5, 8));
    // Other windows end a sweep, even if nothing of them is non-resident any more.
    let count = machine.pager.ram().end().huge().0;
    (5..count).for_each(|window| drop(machine.pager.ledger().split(HugeFrame(window))));
    limiter.sweep(&windows, late);
    assert_eq!(limiter.sweeps, 5 + SWEEP_WORDS / FRAMES_PER_HUGE);
    // A sweep also ends in time.
    limiter.sweeps = 5;
    limiter.sweep(&windows, Instant::now());
    assert_eq!(limiter.sweeps, 6);
    child.wait().unwrap();
}
