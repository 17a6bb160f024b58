//! Long operations as jobs: they go on by themselves, are seen, and stop where they are told to.
//!
//! An eviction is held at one of its steps (`EBB_FAIL`), so that the tests need not be faster.

use ebb_api::{ErrorCode, Event, EventType, Job, JobKind, JobState, SizeState};
use vmtest::{Guest, Host, Vm, until, until_fits, until_or};

const MIB: u64 = 1 << 20;

fn guest() -> Guest {
    Guest::debian("6.1-cloud").memory("512M").cpus(1)
}

fn run(host: &Host) -> Vm {
    let vm = host.run(guest());
    vm.wait_trusted();
    vm
}

fn jobs(host: &Host) -> Vec<Job> {
    serde_json::from_str(&host.ebb("jobs --json").ok()).expect("jobs")
}

fn job(host: &Host, id: u64) -> Job {
    jobs(host).into_iter().find(|job| job.id == id).expect("it is known")
}

/// Begins a job, and returns its number.
fn begin(vm: &Vm, line: &str) -> u64 {
    let printed = vm.ebb(&format!("{line} --background")).ok();
    printed.trim_end().parse().expect("a number alone")
}

fn wait_for(host: &Host, id: u64, is_meant: impl Fn(&Job) -> bool) -> Job {
    until_or(|| Some(job(host, id)).filter(&is_meant)).unwrap_or_else(|| panic!("{:?}", jobs(host)))
}

fn wait_end(host: &Host, id: u64) -> Job {
    wait_for(host, id, |job| job.state.is_over())
}

/// Waits until an eviction is held at a step, with some of it done.
fn wait_held(host: &Host, id: u64) -> Job {
    wait_for(host, id, |job| job.progress.is_some_and(|progress| progress.done > 0))
}

/// What is told of a job.
fn told(host: &Host, id: u64) -> Vec<JobState> {
    let lines = host.ebb("events --json --type job").ok();
    let events = lines.lines().map(|line| serde_json::from_str::<Event>(line).expect("an event"));
    let figures = events.inspect(|event| assert_eq!(event.kind, EventType::Job));
    let figures = figures.filter_map(|event| event.job);
    figures.filter(|figures| figures.id == id).map(|figures| figures.state).collect()
}

/// Waits until exactly this is told of a job: its end is listed before it is told.
fn wait_told(host: &Host, id: u64, states: &[JobState]) {
    let wanted = format!("{states:?} to be told of job {id}");
    until_fits(wanted, || told(host, id), |seen| seen == states);
}

#[test]
fn a_reclaim_and_a_detach_go_on_by_themselves() {
    let host = Host::new();
    let vm = host.qemu(guest());
    vm.attach();
    vm.wait_trusted();
    vm.guest("fill kept 50M");
    vm.guest("fill freed 200M");
    vm.guest("free freed");
    let before = vm.host_bytes();
    let reclaim = begin(&vm, "reclaim");
    let ended = wait_end(&host, reclaim);
    assert_eq!((ended.kind, ended.state), (JobKind::Reclaim, JobState::Done), "{ended:?}");
    let report = ended.reclaim.expect("a report");
    assert!(report.bytes > 100 * MIB && vm.host_bytes() + 100 * MIB < before, "{report:?}");
    wait_told(&host, reclaim, &[JobState::Waiting, JobState::Done]);

    let limited = wait_end(&host, begin(&vm, "reclaim --bytes 1M"));
    assert!(limited.id > reclaim && limited.state == JobState::Done, "{limited:?}");
    let detach = wait_end(&host, begin(&vm, "detach"));
    assert_eq!((detach.state, detach.detach.is_some()), (JobState::Done, true), "{detach:?}");
    assert!(host.list().is_empty());
    assert_eq!(vm.guest("check kept"), "0");
    let refused = vm.ebb("reclaim --background").refused();
    assert!(refused.contains("there is no VM") || refused.contains("was detached"), "{refused}");
}

#[test]
fn an_eviction_is_seen_and_ends_between_two_steps() {
    let host = Host::new();
    host.set("EBB_FAIL", "vm0:step:4");
    let vm = run(&host);
    vm.guest("fill kept 200M");
    let evict = begin(&vm, "evict --bytes 1G");
    let held = wait_held(&host, evict);
    assert_eq!((held.state, held.can_cancel), (JobState::Running, true), "{held:?}");
    let progress = held.progress.expect("it is seen");
    assert_eq!(progress.total, Some(1024 * MIB));
    // One after the other.
    let next = begin(&vm, "reclaim");
    assert_eq!(job(&host, next).state, JobState::Waiting);
    let cancelled = vm.host().ebb(&format!("jobs cancel {next}")).ok();
    assert_eq!(cancelled, format!("job {next}: cancelled: nothing was done\n"));

    let cancelled = host.ebb(&format!("jobs cancel {evict} --json")).ok();
    let cancelled: Job = serde_json::from_str(&cancelled).expect("a job");
    assert_eq!(cancelled.state, JobState::Cancelled, "{cancelled:?}");
    let report = cancelled.evict.expect("a report");
    // It was held after three steps, of 16 MiB each at most.
    let stopped_there = progress.done..=3 * 16 * MIB;
    assert!(stopped_there.contains(&report.saved_bytes), "{report:?}, {progress:?}");
    assert_eq!(report.stopped_by, "it was cancelled");
    wait_told(&host, evict, &[JobState::Waiting, JobState::Cancelled]);
    let refused = host.ebb(&format!("jobs cancel {evict}")).refused();
    assert!(refused.contains("has ended already: cancelled"), "{refused}");
    let list = host.ebb("jobs").ok();
    assert!(list.contains(" cancelled ") && list.contains(" evict "), "{list}");

    // The VM is as it would be after a shorter eviction.
    let again = wait_end(&host, begin(&vm, "evict --bytes 1G"));
    assert!(again.evict.as_ref().is_some_and(|report| report.saved_bytes > 0), "{again:?}");
    assert_eq!(vm.guest("check kept"), "0");
}

#[test]
fn a_job_ends_with_the_process_that_does_it_and_is_forgotten_with_the_daemon() {
    let host = Host::new();
    host.set("EBB_FAIL", "vm0:step:3,vm1:step:3");
    let (first, second) = (run(&host), run(&host));
    for vm in [&first, &second] {
        vm.guest("fill kept 150M");
    }
    let evict = begin(&first, "evict --bytes 1G");
    wait_held(&host, evict);
    host.server(first.name()).into_iter().for_each(kill);
    let failed = wait_end(&host, evict);
    let code = failed.error.as_ref().and_then(|error| error.code);
    assert_eq!((failed.state, code), (JobState::Failed, Some(ErrorCode::OutcomeUnknown)));
    assert_eq!(first.guest("check kept"), "0");

    let other = begin(&second, "evict --bytes 1G");
    wait_held(&host, other);
    host.kill9();
    host.start();
    assert_eq!(jobs(&host), [], "a new daemon knows none");
    let refused = host.ebb(&format!("jobs cancel {other}")).refused();
    assert!(refused.contains(&format!("there is no job {other}")), "{refused}");
    let next = begin(&second, "reclaim");
    assert!(next > other, "numbers go on");
    assert_eq!(wait_end(&host, next).state, JobState::Done);
    for vm in [&first, &second] {
        assert_eq!(vm.guest("check kept"), "0");
    }
}

/// Kills a process.
fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
}

/// Has the VM shrink, which takes seconds, and cancels that under way. On a busy host it may end
/// before: then it is tried again.
fn shrink_cancelled_by(vm: &Vm, cancel: impl Fn(u64)) {
    for _ in 0..5 {
        let shrink = begin(vm, "resize 256M");
        cancel(shrink);
        let ended = wait_end(vm.host(), shrink);
        if ended.state == JobState::Cancelled {
            return;
        }
        assert_eq!(ended.state, JobState::Done, "{ended:?}");
        vm.ebb("resize 1G").ok_or_short();
    }
    panic!("each resize has ended before it was cancelled: {:?}", jobs(vm.host()));
}

#[test]
fn a_resize_is_followed_and_a_cancelled_one_drops_its_target() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").memory("1G").cpus(1));
    vm.wait_trusted();
    shrink_cancelled_by(&vm, |shrink| {
        let ran = host.ebb(&format!("jobs cancel {shrink} --json"));
        if ran.code != Some(0) {
            assert!(ran.refused().contains("has ended already"));
            return;
        }
        let cancelled: Job = serde_json::from_str(&ran.ok()).expect("a job");
        assert_eq!(cancelled.state, JobState::Cancelled, "{cancelled:?}");
    });
    let size =
        until("no target", || Some(vm.status().size).filter(|size| size.wanted_bytes.is_none()));
    assert_eq!(size.state, SizeState::Off);

    shrink_cancelled_by(&vm, |_| drop(vm.ebb("resize 1G").ok_or_short()));
    let grow = wait_end(&host, begin(&vm, "resize 900M"));
    assert_eq!(grow.state, JobState::Done, "{grow:?}");
    let report = grow.resize.expect("a report");
    assert_eq!(report.wanted_bytes, 900 * MIB);
    let progress = grow.progress.expect("it is seen");
    assert!(progress.total.is_some_and(|total| progress.done <= total), "{progress:?}");
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let host = Host::new();
    // A monitoring takes eight windows: more time than a busy host needs to cancel it.
    host.set("EBB_HEAT_WINDOW_MS", "5000");
    let vm = run(&host);
    for (line, why) in [
        ("jobs cancel 7", "there is no job 7"),
        ("jobs cancel seven", "invalid value 'seven'"),
        ("reclaim nobody --background", "there is no VM nobody"),
        ("resize vm0 off --node 0 --background", "belong to a size"),
        ("heat vm0 --background --svg a.svg", "cannot be used with"),
    ] {
        let refused = host.ebb(line).refused();
        assert!(refused.contains(why), "{line}: {refused}");
    }
    assert_eq!(jobs(&host), []);
    let heat = begin(&vm, "heat --fresh");
    wait_for(&host, heat, |job| job.state == JobState::Running);
    host.ebb(&format!("jobs cancel {heat}")).ok();
    let ended = wait_end(&host, heat);
    assert_eq!(ended.state, JobState::Cancelled);
    assert!(ended.text.contains("goes on to its end"), "{}", ended.text);
}
