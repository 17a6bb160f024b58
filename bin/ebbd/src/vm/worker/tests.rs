//! Tests of what a worker does in what order, and what it passes on.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::thread;

use ebb_api::{EvictRequest, LimitRequest, ReclaimRequest, ResizeRequest};
use ebb_reclaim::limit::marks::Marks;
use ebb_sys::uffd::Uffd;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, HUGE_BYTES};
use testkit::forge;

use super::*;
use crate::model::record::{Record, SizeRecord};
use crate::model::share::Share;
use crate::vm::context::liveness::End;
use crate::vm::context::machine::qemu::Qemu;
use crate::vm::context::machine::{self, FILE_BYTES, Machine, Vmm};
use crate::vm::context::mailbox::Which;
use crate::vm::context::work::Work;
use crate::vm::limit;

const MIB: u64 = 1 << 20;
/// A limit, and a size, that a VM of 64 MiB can have.
const LESS: u64 = 60 * MIB;
/// Touches of a guest, each of which waits 0.1 s for room.
const TOUCHES: u64 = 300;

fn worker(cx: VmContext) -> Worker {
    let calibrated = Calibrated::at(cx.record.directory());
    Worker::new(cx, calibrated, Publisher::new().0)
}

/// Has the worker obey a command, and returns its answer.
fn ask<T>(
    worker: &mut Worker,
    command: impl FnOnce(oneshot::Sender<Answer<T>>) -> Command,
) -> Answer<T> {
    let (to, mut answer) = oneshot::channel();
    assert!(matches!(worker.obey(command(to)), Next::Go));
    answer.try_recv().expect("an answer")
}

fn limit(bytes: Option<u64>) -> LimitRequest {
    LimitRequest { bytes, low_bytes: None, high_bytes: None }
}

fn size(bytes: u64) -> ResizeRequest {
    ResizeRequest { bytes: Some(bytes), node: None, by: None, on_violation: None }
}

fn is_on_record(directory: &Path) -> bool {
    Record::load(directory).expect("what can be read").is_some()
}

#[test]
fn a_tick_looks_at_devices_then_at_the_guest_then_at_its_size() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let qemu = machine.boot(&mut cx);
    qemu.is("prelaunch");
    cx.record.note(|record| {
        record.begin = true;
        record.size = Some(SizeRecord { bytes: LESS, node: None, by: None });
    });
    let mut worker = worker(cx);
    assert!(matches!(worker.tick(), Next::Go));
    let asked = qemu.asked();
    let first = |name: &str| asked.iter().position(|asked| asked == name);
    // The guest goes on once it is known what its devices may ask for.
    let places = [
        "qom-list /machine/peripheral-anon",
        "cont",
        "info registers -a",
        "query-memory-size-summary",
    ]
    .map(first);
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{asked:?}");
    assert!(worker.cx.guest.guest().is_ok() && worker.cx.service.is_some());
}

/// QEMU itself may be the next to wait.
#[test]
fn while_the_guest_waits_for_room_a_tick_asks_of_devices_alone() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let qemu = machine.boot(&mut cx);
    qemu.is("paused");
    cx.record.note(|record| (record.begin, record.limit_bytes) = (true, Some(LESS)));
    cx.no_room = Some("the swap file is full".into());
    let mut worker = worker(cx);
    assert!(worker.cx.waits() && matches!(worker.tick(), Next::Go));
    let asked = qemu.asked();
    let is_asked = |name: &str| asked.iter().any(|asked| asked == name);
    assert!(is_asked("qom-list /machine/peripheral"), "{asked:?}");
    assert!(!is_asked("cont") && !is_asked("info registers -a"), "{asked:?}");
    // The turn of the limit has found that there is room.
    assert!(!worker.cx.waits());
    worker.tick();
    assert_eq!(qemu.told(), ["cont"]);
}

/// Ebb had stopped it, and it was migrated meanwhile.
#[test]
fn a_guest_that_has_left_does_not_go_on_here() {
    for (state, begins) in [("postmigrate", false), ("running", false), ("finish-migrate", true)] {
        let Some((mut cx, _machine)) = machine::context() else { return };
        let qemu = Qemu::of(&mut cx);
        qemu.is(state);
        cx.record.note(|record| record.begin = true);
        let mut worker = worker(cx);
        worker.begin();
        assert_eq!(qemu.told(), [""; 0], "{state}");
        assert_eq!(worker.cx.record.begin, begins, "{state}");
    }
}

#[test]
fn a_command_reaches_its_controller_while_somebody_waits_for_the_answer() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let _qemu = Qemu::of(&mut cx);
    let mut worker = worker(cx);
    let set = ask(&mut worker, |to| Command::Limit(limit(Some(LESS)), to)).expect("a limit");
    assert_eq!((set.bytes, worker.cx.record.limit_bytes), (Some(LESS), Some(LESS)));
    let (to, answer) = oneshot::channel();
    drop(answer);
    assert!(matches!(worker.obey(Command::Limit(limit(None), to)), Next::Go));
    assert_eq!(worker.cx.record.limit_bytes, Some(LESS), "the client was told that it failed");
    let lifted = ask(&mut worker, |to| Command::Limit(limit(None), to)).expect("no limit");
    assert_eq!((lifted.bytes, worker.cx.record.limit_bytes), (None, None));
    let refused = ask(&mut worker, |to| {
        Command::Reclaim(ReclaimRequest::default(), Which::All, Arc::default(), to)
    });
    let why = refused.expect_err("nobody knows the guest").to_string();
    assert!(why.starts_with("the guest is not trusted: "), "{why}");
    let share = Share { bytes: LESS, lower_percent: 100, upper_percent: 100 };
    ask(&mut worker, |to| Command::Share(Some(share), to)).expect("a share");
    assert_eq!(worker.cx.record.limit_bytes, Some(LESS));
    let refused = ask(&mut worker, |to| Command::Limit(limit(None), to));
    let why = refused.expect_err("the pool decides").to_string();
    assert!(why.contains("the pool sets its limit"), "{why}");
}

#[test]
fn a_limit_has_one_owner() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let _qemu = Qemu::of(&mut cx);
    let mut worker = worker(cx);
    let piloted = |worker: &Worker| (worker.cx.record.limit_bytes, worker.cx.record.is_piloted);
    let pilot = |worker: &mut Worker, bytes| ask(worker, |to| Command::PilotLimit(bytes, to));
    pilot(&mut worker, Some(LESS)).expect("nobody else's");
    assert_eq!(piloted(&worker), (Some(LESS), true));
    let why = pilot(&mut worker, Some(1)).expect_err("too little").to_string();
    assert!(why.contains("below what keeps this guest alive"), "{why}");
    assert_eq!(piloted(&worker), (Some(LESS), true));

    ask(&mut worker, |to| Command::Limit(limit(Some(LESS - MIB)), to)).expect("a limit");
    for bytes in [Some(LESS), None] {
        let told = pilot(&mut worker, bytes).map_err(|why| why.to_string());
        assert_eq!(piloted(&worker), (Some(LESS - MIB), false), "{told:?}");
        assert!(bytes.is_none() || told.is_err_and(|why| why.contains("ebb limit has set")));
    }

    ask(&mut worker, |to| Command::Limit(limit(None), to)).expect("no limit");
    pilot(&mut worker, Some(LESS)).expect("nobody else's again");
    let share = Share { bytes: LESS, lower_percent: 100, upper_percent: 100 };
    ask(&mut worker, |to| Command::Share(Some(share), to)).expect("a share");
    let why = pilot(&mut worker, Some(LESS)).expect_err("the pool's").to_string();
    assert!(why.contains("the pool sets its limit"), "{why}");
    pilot(&mut worker, None).expect("it has none to lift");
    assert_eq!(piloted(&worker), (Some(LESS), false));
}

/// QEMU may answer late just then: its guest waits for memory.
#[test]
fn for_a_higher_limit_of_the_pilots_qemu_is_not_asked_of_its_devices() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let qemu = Qemu::of(&mut cx);
    let mut worker = worker(cx);
    let mut is_asked = |bytes| {
        ask(&mut worker, |to| Command::PilotLimit(bytes, to)).expect("nobody else's");
        qemu.asked().iter().any(|asked| asked.starts_with("qom-list "))
    };
    assert!(is_asked(Some(LESS - 2 * MIB)), "memory in use may be evicted from now on");
    assert!(!is_asked(Some(LESS)) && !is_asked(None));
}

#[test]
fn an_eviction_ends_between_two_steps_once_it_is_cancelled() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let _qemu = Qemu::of(&mut cx);
    machine.touch(FrameRange::new(Gfn(0), FILE_BYTES / FRAME_BYTES));
    let mut worker = worker(cx);
    let evict = |worker: &mut Worker, work: &Arc<Work>| {
        let request = EvictRequest { bytes: FILE_BYTES };
        ask(worker, |to| Command::Evict(request, Arc::clone(work), to)).expect("a report")
    };
    let cancelled = Arc::<Work>::default();
    cancelled.cancel();
    let report = evict(&mut worker, &cancelled);
    assert_eq!((report.saved_bytes, report.stopped_by.as_str()), (0, "it was cancelled"));
    let whole = Arc::<Work>::default();
    let report = evict(&mut worker, &whole);
    assert!(report.saved_bytes > 0, "{report:?}");
    let progress = whole.progress();
    assert_eq!((progress.done_bytes, progress.total_bytes), (report.saved_bytes, Some(FILE_BYTES)));
}

#[test]
fn compressed_memory_is_the_pilots_while_the_limit_is() {
    let Some((mut cx, _machine)) = machine::context() else { return };
    let _qemu = Qemu::of(&mut cx);
    let mut worker = worker(cx);
    let set = |worker: &Worker| worker.cx.record.piloted_compressed_bytes;
    let pilot = |worker: &mut Worker, bytes| ask(worker, |to| Command::PilotCompressed(bytes, to));
    pilot(&mut worker, None).expect("there is nothing to take back");
    pilot(&mut worker, Some(MIB)).expect("nobody else's");
    assert_eq!(set(&worker), Some(MIB));
    let why = pilot(&mut worker, Some(u64::MAX)).expect_err("too much").to_string();
    assert!(why.contains("more compressed memory than its store is made for"), "{why}");
    assert_eq!((set(&worker), worker.cx.record.compressed_bytes()), (Some(MIB), MIB));
    pilot(&mut worker, None).expect("none");
    assert_eq!((set(&worker), worker.cx.record.compressed_bytes()), (None, 0));

    pilot(&mut worker, Some(MIB)).expect("nobody else's");
    ask(&mut worker, |to| Command::Limit(limit(Some(LESS)), to)).expect("a limit");
    assert_eq!(set(&worker), None, "whose limit it is, says how it is kept");
    let why = pilot(&mut worker, Some(MIB)).expect_err("an operator's").to_string();
    assert!(why.contains("ebb limit has set its limit"), "{why}");
}

/// A VM with a trusted guest that gives up memory by its balloon.
fn ballooning() -> Option<(Worker, Machine, Qemu)> {
    let (mut cx, machine) = machine::context()?;
    let qemu = machine.boot(&mut cx);
    qemu.balloons(FILE_BYTES, 512 * MIB);
    let mut worker = worker(cx);
    let report = ask(&mut worker, |to| Command::Resize(size(LESS), to)).expect("a target");
    assert_eq!(report.wanted_bytes, LESS);
    assert!(qemu.told().contains(&format!("balloon {LESS}")));
    let cx = &worker.cx;
    assert!(cx.guest.witness().is_some() && cx.record.kernel.is_some());
    Some((worker, machine, qemu))
}

#[test]
fn a_reset_reaches_every_controller() {
    let Some((mut worker, _machine, qemu)) = ballooning() else { return };
    qemu.reports("RESET");
    ask(&mut worker, Command::Ready).expect("it obeys");
    let cx = &worker.cx;
    assert_eq!(cx.guest.guest().err(), Some("it was reset and is booting"));
    assert!(cx.guest.witness().is_none() && cx.record.kernel.is_none());
    assert_eq!(qemu.told(), [format!("balloon {FILE_BYTES}")]);
}

#[test]
fn a_kernel_that_runs_no_more_is_forgotten_and_keeps_its_balloon() {
    let Some((mut worker, _machine, qemu)) = ballooning() else { return };
    worker.route(Some(End::Unknown));
    let cx = &worker.cx;
    let why = cx.guest.guest().expect_err("it runs no more");
    assert!(why.contains("vCPUs"), "{why}");
    assert!(cx.guest.witness().is_none() && cx.record.kernel.is_none());
    assert_eq!(qemu.told(), [""; 0]);
}

#[test]
fn for_a_device_that_came_memory_is_back_before_the_guest_goes_on() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let qemu = Qemu::of(&mut cx);
    let frames = FrameRange::new(Gfn(0), 8);
    machine.evict(&mut cx, frames);
    let mut worker = worker(cx);
    let evicted = |worker: &Worker| {
        let ledger = worker.cx.pager.ledger();
        frames.frames().filter(|gfn| ledger.content(*gfn).is_evicted()).count()
    };
    let room = Arc::clone(worker.cx.pager.room());
    room.set_marks(FRAME_BYTES, HUGE_BYTES);
    room.halt_above(HUGE_BYTES);
    worker.look_at_devices();
    assert_eq!((evicted(&worker), qemu.told().len()), (8, 0));
    assert_eq!((room.marks(), room.halts_above()), ((FRAME_BYTES, HUGE_BYTES), HUGE_BYTES));
    qemu.plugs("vfio-pci");
    worker.look_at_devices();
    assert_eq!(evicted(&worker), 0);
    // From now on nobody makes room.
    assert_eq!((room.marks(), room.halts_above()), ((u64::MAX, u64::MAX), u64::MAX));
    assert_eq!(qemu.told(), ["stop", "cont"]);
    assert!(!worker.cx.record.begin && worker.devices.why_stopped().is_none());
}

/// A VM with a limit on record, which takes so much. Nobody has inspected its guest.
fn over_limit(taken_bytes: u64) -> Option<(Worker, Machine, Qemu, Marks)> {
    let (mut cx, machine) = machine::context()?;
    let qemu = machine.boot(&mut cx);
    cx.record.note(|record| record.limit_bytes = Some(LESS));
    machine.touch(FrameRange::new(Gfn(0), taken_bytes / FRAME_BYTES));
    cx.begin_to_evict().expect("it is watched");
    limit::slow_faults(&cx);
    let marks = cx.marks().expect("it has a limit");
    let mut worker = worker(cx);
    worker.look_at_devices();
    Some((worker, machine, qemu, marks))
}

fn looks_for_the_guest(asked: &[String]) -> bool {
    asked.iter().any(|asked| asked == "info registers -a")
}

/// A search of a large VM's memory takes seconds.
#[test]
fn faults_wait_for_room_while_the_guest_is_looked_for() {
    let high_bytes = Marks::new(LESS, None, None).high_bytes;
    let Some((mut worker, _machine, qemu, marks)) = over_limit(high_bytes - MIB / 2) else {
        return;
    };
    worker.apply_limit();
    assert!(looks_for_the_guest(&qemu.asked()) && worker.cx.guest.guest().is_ok());
    let saw = qemu.saw_marks();
    assert!(saw.iter().all(|saw| *saw == marks.pressure()), "{saw:?}");
}

#[test]
fn above_the_high_mark_room_is_made_before_the_guest_is_looked_for() {
    let Some((mut worker, _machine, qemu, marks)) = over_limit(FILE_BYTES) else { return };
    worker.apply_limit();
    assert!(!looks_for_the_guest(&qemu.asked()) && worker.limit.evicted().frames() > 0);
    assert!(matches!(worker.tick(), Next::Go));
    assert!(looks_for_the_guest(&qemu.asked()) && worker.cx.guest.guest().is_ok());
    let saw = qemu.saw_marks();
    assert!(saw.iter().all(|saw| *saw == marks.pressure()), "{saw:?}");
}

/// QEMU waits for a processor that touches memory without room. Each touch waits 0.1 s while QEMU
/// answers, so all of them take longer than anybody waits for an answer.
#[test]
fn a_question_that_waits_for_waiting_faults_is_answered() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let qemu = machine.boot(&mut cx);
    cx.begin_to_evict().expect("it is watched");
    cx.serve_again();
    cx.expect_refills().expect("threads");
    cx.pager.room().set_marks(0, 0);
    let mut worker = worker(cx);
    let asks: [fn(&mut Worker) -> bool; 2] = [Worker::confirm, |worker| {
        worker.look_at_devices();
        worker.cx.reaching.is_complete
    }];
    for (first, ask) in (forge::FIRST_SPARE.0..).step_by(2 * TOUCHES as usize).zip(asks) {
        let ((begin, begins), (end, ends)) = (mpsc::channel(), mpsc::channel());
        qemu.waits_for(move || {
            begin.send(()).expect("a guest");
            ends.recv().expect("the guest goes on");
        });
        let words = machine.words(Gfn(0).gpa(), (FILE_BYTES / 8) as usize);
        let answered = thread::scope(|scope| {
            scope.spawn(move || {
                begins.recv().expect("a question");
                for gfn in (first..first + 2 * TOUCHES).step_by(2).map(Gfn) {
                    words[(gfn.gpa().0 / 8) as usize].store(1, Relaxed);
                }
                end.send(()).expect("QEMU");
            });
            ask(&mut worker)
        });
        assert!(answered);
    }
}

#[test]
fn the_worker_ends_with_qemu() {
    let Some((mut cx, machine)) = machine::context() else { return };
    cx.record.note(|_| {});
    let directory = cx.record.directory().to_owned();
    let mut worker = worker(cx);
    assert!(matches!(worker.obey(Command::FaultsEnded(Ok(()))), Next::Go), "it runs");
    assert!(worker.cx.service.is_some() && is_on_record(&directory));
    drop(machine.vmm);
    let next = worker.obey(Command::FaultsEnded(Ok(())));
    assert!(matches!(next, Next::End(None)));
    assert!(!is_on_record(&directory));
}

#[test]
fn a_vm_that_leaves_is_left_alone_until_its_userfaultfd_is_closed() {
    let Some((mut cx, machine)) = machine::context() else { return };
    let qemu = Qemu::of(&mut cx);
    let uffd = Uffd::new().expect("as the VM's own");
    // Its third descriptor is the userfaultfd.
    let open = Vmm::with(uffd.as_fd().try_clone_to_owned().expect("a descriptor"));
    cx.process = open.process();
    cx.record.note(|record| record.leaving = Some(2));
    let directory = cx.record.directory().to_owned();
    let mut worker = worker(cx);
    assert!(matches!(worker.tick(), Next::Go));
    assert!(is_on_record(&directory) && worker.cx.is_to_stay().is_err());
    worker.cx.process = machine.vmm.process();
    assert!(matches!(worker.tick(), Next::End(None)));
    assert!(!is_on_record(&directory));
    assert_eq!(qemu.asked(), [""; 0]);
}
