//! Tests of a limit on a VM whose VMM does nothing.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

use ebb_ledger::Content;
use ebb_store::StoreError;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn, HUGE_BYTES};
use rustix::io::Errno;
use testkit::{forge, target};

use super::demand::Refills;
use super::force::ByForce;
use super::*;
use crate::model::share::Share;
use crate::vm::context::machine::{self, FILE_BYTES, Machine, Vmm};
use crate::vm::context::mailbox::Command;

/// A limit that a VM of 64 MiB can have.
const LIMIT: u64 = 52 << 20;
const NO_MARKS: (u64, u64) = (u64::MAX, u64::MAX);

/// A VM with this limit on record, and without devices.
fn limited(limit_bytes: Option<u64>) -> Option<(VmContext, Machine)> {
    let (mut cx, machine) = machine::context()?;
    cx.reaching.is_complete = true;
    cx.record.note(|record| record.limit_bytes = limit_bytes);
    Some((cx, machine))
}

fn request(bytes: u64) -> LimitRequest {
    LimitRequest { bytes: Some(bytes), low_bytes: None, high_bytes: None }
}

fn begin_turn(limit: &mut Limit, cx: &mut VmContext) -> Turn {
    limit.begin_turn(cx, &mut OpenFiles::default())
}

#[test]
fn a_limit_that_cannot_be_kept_changes_nothing() {
    let Some((mut cx, _machine)) = limited(None) else { return };
    let mut limit = Limit::default();
    let mut refusal = |cx: &mut VmContext, bytes| {
        limit.set(cx, request(bytes)).expect_err("it is refused").to_string()
    };
    let why = refusal(&mut cx, 16 << 20);
    assert!(why.contains("below what keeps this guest alive"), "{why}");
    let why = refusal(&mut cx, FILE_BYTES);
    assert!(why.contains("limits nothing"), "{why}");
    cx.reaching.is_complete = false;
    let why = refusal(&mut cx, LIMIT);
    assert!(why.contains("memory in use is not evicted because of QEMU"), "{why}");
    assert_eq!((cx.record.limit_bytes, cx.record.evicts), (None, false));
}

#[test]
fn a_turn_evicts_down_to_the_low_mark() {
    let Some((mut cx, machine)) = limited(None) else { return };
    machine.touch(FrameRange::new(Gfn(0), (60 << 20) / FRAME_BYTES));
    let mut limit = Limit::default();
    limit.set(&mut cx, request(LIMIT)).expect("it can have it");
    limit.apply(&mut cx);
    let marks = cx.marks().expect("it has a limit");
    assert_eq!(begin_turn(&mut limit, &mut cx), Turn::Go(marks));
    let end = Instant::now() + Duration::from_secs(60);
    let steps = (0..100).take_while(|_| limit.step(&mut cx, marks, &|_| 0, end).0).count();
    let taken = cx.pager.residency().taken_bytes().expect("its RAM");
    assert!(taken <= marks.low_bytes, "{taken} after {steps} steps");
    assert!(limit.evicted().frames() > 0 && limit.why_not_kept(&cx, None).is_none());
    limit.end_turn(&cx, marks, false);
    assert_eq!(cx.pager.room().marks(), marks.pressure());
    assert!(machine.commands.try_recv().is_err());
    limit.end_turn(&cx, marks, true);
    assert!(matches!(machine.commands.try_recv(), Ok(Command::Pressure)), "it goes on");
}

#[test]
fn faults_need_no_turn_to_go_on_below_a_higher_limit() {
    let Some((mut cx, _machine)) = limited(Some(LIMIT)) else { return };
    slow_faults(&cx);
    let mut marks = |bytes| {
        cx.record.note(|record| record.limit_bytes = Some(bytes));
        Limit::default().apply(&mut cx);
        (cx.pager.room().marks(), cx.marks().expect("it has a limit").pressure())
    };
    let (higher, expected) = marks(LIMIT + (4 << 20));
    assert_eq!(higher, expected);
    let (lower, _) = marks(LIMIT);
    assert_eq!(lower, higher, "a turn makes room first");
}

/// A fault must not wait for room that nobody makes.
#[test]
fn beside_devices_that_nobody_knows_there_is_no_turn() {
    let Some((mut cx, _machine)) = limited(Some(LIMIT)) else { return };
    let mut limit = Limit::default();
    limit.apply(&mut cx);
    let marks = cx.marks().expect("it has a limit");
    limit.end_turn(&cx, marks, false);
    cx.reaching.is_complete = false;
    assert_eq!(begin_turn(&mut limit, &mut cx), Turn::Wait);
    assert_eq!(cx.pager.room().marks(), NO_MARKS);
    let why = limit.why_not_kept(&cx, None).expect("it is not kept");
    assert!(limit.is_idle() && why.contains("memory in use is not evicted"), "{why}");
    cx.reaching.is_complete = true;
    assert_eq!(begin_turn(&mut limit, &mut cx), Turn::Go(marks));
}

#[test]
fn after_a_store_failure_there_is_no_turn_for_a_while() {
    let Some((mut cx, _machine)) = limited(Some(LIMIT)) else { return };
    let marks = cx.marks().expect("it has a limit");
    let broken = StoreError::Medium(Errno::IO.into());
    for (error, waits) in [(StoreError::Full, true), (broken, false)] {
        let mut limit = Limit::default();
        limit.apply(&mut cx);
        assert_eq!(limit.note(&mut cx, Err(error.into())), Left::Nothing);
        assert_eq!(begin_turn(&mut limit, &mut cx), Turn::Wait);
        limit.end_turn(&cx, marks, false);
        // First touches wait for room, and for nothing else.
        let expected = match waits {
            true => (marks.high_bytes, marks.pressure()),
            false => (u64::MAX, NO_MARKS),
        };
        assert_eq!((cx.pager.room().halts_above(), cx.pager.room().marks()), expected);
        assert_eq!(cx.waits(), waits);
        assert!(limit.why_not_kept(&cx, None).is_some());
        // Another limit, or the same once more.
        limit.apply(&mut cx);
        assert!(!cx.waits() && limit.why_not_kept(&cx, None).is_none());
        assert_eq!(begin_turn(&mut limit, &mut cx), Turn::Go(marks));
    }
}

#[test]
fn the_pool_gives_a_vm_its_limit() {
    let Some((mut cx, _machine)) = limited(None) else { return };
    assert!(share::set(&mut cx, None).is_err() && !share::allow(&mut cx, Some(LIMIT)));
    let few = Share { bytes: LIMIT, lower_percent: 50, upper_percent: 100 };
    let why = share::set(&mut cx, Some(few)).expect_err("it is refused").to_string();
    assert!(why.contains("a lower limit of 26 MiB is below what keeps this guest alive"), "{why}");
    assert_eq!((cx.record.share, cx.record.limit_bytes), (None, None));
    let enough = Share { lower_percent: 100, ..few };
    assert!(share::set(&mut cx, Some(enough)).expect("it can have it"));
    assert_eq!((cx.record.share, cx.record.limit_bytes), (Some(enough), Some(LIMIT)));
    assert!(cx.record.evicts);
    assert!(share::allow(&mut cx, Some(LIMIT + HUGE_BYTES)));
    assert!(!share::allow(&mut cx, Some(LIMIT + HUGE_BYTES)), "as before");
    assert_eq!(cx.record.limit_bytes, Some(LIMIT + HUGE_BYTES));
    assert!(share::allow(&mut cx, Some(FILE_BYTES)));
    assert_eq!(cx.record.limit_bytes, None, "all of its memory");
    assert!(share::allow(&mut cx, Some(LIMIT)));
    assert!(share::set(&mut cx, None).expect("it can leave"));
    assert_eq!((cx.record.share, cx.record.limit_bytes), (None, None));
}

#[test]
fn by_force_frames_go_in_order_of_address() {
    let Some((mut cx, machine)) = limited(None) else { return };
    let frames = [0, FRAMES_PER_HUGE].map(Gfn);
    frames.iter().for_each(|gfn| machine.touch(FrameRange::new(*gfn, 1)));
    cx.begin_to_evict().expect("it is watched");
    let mut by_force = ByForce::new(&cx, FRAME_BYTES, false);
    assert!(by_force.step(&mut cx).0.expect("room"));
    let is_resident = |gfn: Gfn| cx.pager.ledger().content(gfn) == Content::Resident;
    assert_eq!(frames.map(is_resident), [false, true]);
    assert!(!by_force.step(&mut cx).0.expect("nothing is left to do"));
}

#[test]
fn by_force_all_memory_goes_but_what_is_read_in_place() {
    let Some((mut cx, machine)) = limited(None) else { return };
    let _qemu = machine.boot_trusted(&mut cx);
    cx.begin_to_evict().expect("it is watched");
    let (needed, others): (Vec<Gfn>, Vec<Gfn>) =
        (0..forge::FRAMES).map(Gfn).partition(|gfn| cx.guest.needs(*gfn));
    assert!(needed.len() as u64 >= forge::FRAMES * forge::PAGE_BYTES / FRAME_BYTES);
    let ram = Arc::clone(cx.pager.ram());
    let has_memory = |gfn: &&Gfn| !ram.is_hole(FrameRange::new(**gfn, 1)).expect("it is RAM");
    let to_go = others.iter().filter(has_memory).count();
    assert!(0 < to_go && to_go < others.len(), "{to_go} of {}", others.len());
    let mut by_force = ByForce::new(&cx, u64::MAX, false);
    while by_force.step(&mut cx).0.expect("room") {}
    let content = |gfn| cx.pager.ledger().content(gfn);
    assert!(needed.iter().all(|gfn| content(*gfn) == Content::Resident));
    assert!(!others.iter().any(|gfn| has_memory(&gfn)));
    // A hole is not evicted.
    assert_eq!(by_force.report(Instant::now(), None, None).saved_frames, to_go as u64);
}

#[test]
fn beside_direct_io_a_known_guest_tells_what_is_in_flight() {
    let Some((mut cx, machine)) = limited(None) else { return };
    let in_flight = |cx: &VmContext| may_tell_in_flight(cx, &mut OpenFiles::default());
    assert!(in_flight(&cx).expect("nothing pins its memory").is_none());
    let Some(vmm) = with_direct_io() else { return };
    cx.process = vmm.process();
    let why = in_flight(&cx).expect_err("nobody tells").to_string();
    assert!(why.contains("O_DIRECT") && why.contains("the guest is not trusted"), "{why}");
    let _qemu = machine.boot_trusted(&mut cx);
    assert!(in_flight(&cx).expect("the guest tells").is_some_and(|why| why.contains("O_DIRECT")));
}

/// Until the guest was looked for, nobody knows that nothing may be evicted.
#[test]
fn beside_direct_io_faults_wait_until_the_guest_was_looked_for() {
    let Some((mut cx, _machine)) = limited(Some(LIMIT)) else { return };
    let Some(vmm) = with_direct_io() else { return };
    cx.process = vmm.process();
    slow_faults(&cx);
    let (mut limit, marks) = (Limit::default(), cx.marks().expect("it has a limit"));
    limit.apply(&mut cx);
    assert_eq!(begin_turn(&mut limit, &mut cx), Turn::Wait);
    assert_eq!(cx.pager.room().marks(), marks.pressure());
    // While touches wait for room, nobody looks for the guest.
    cx.no_room = Some("the swap file is full".into());
    assert_eq!(begin_turn(&mut limit, &mut cx), Turn::Wait);
    assert_eq!((cx.waits(), cx.pager.room().marks()), (false, NO_MARKS));
    slow_faults(&cx);
    assert!(!cx.guest.confirm(&cx.pager, None, false, None));
    assert_eq!(begin_turn(&mut limit, &mut cx), Turn::Wait);
    assert_eq!(cx.pager.room().marks(), NO_MARKS);
}

/// A process with a file open that is not cached.
fn with_direct_io() -> Option<Vmm> {
    // The build directory, because not every file system has O_DIRECT.
    let disk = tempfile::NamedTempFile::new_in(target::target_directory()).expect("a file");
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(disk.path());
    if direct.is_err() {
        machine::skip("no O_DIRECT");
    }
    direct.ok().map(Vmm::with)
}

#[test]
fn what_the_last_kernel_asked_of_the_pool_is_void() {
    let (start, held_bytes) = (Instant::now(), 100 * HUGE_BYTES);
    let mut limit = Limit::default();
    let at = |touched| Refills { touched, ahead: 0 };
    limit.demand.look(start, at(0), held_bytes, None);
    let second = start + Duration::from_secs(1);
    assert!(limit.demand.look(second, at(9999), held_bytes, None).is_some());
    limit.stuck = Some("nothing more can be evicted".into());

    limit.on_reset();
    assert_eq!(limit.stuck, None);
    // The refills of the old kernel are no demand of the new one.
    let later = second + Duration::from_secs(1);
    assert_eq!(limit.demand.look(later, at(9999), held_bytes, None), None);
}
