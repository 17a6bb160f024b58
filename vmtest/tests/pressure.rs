//! Under host pressure, free memory goes to the host, and not before.
//!
//! The host is never made short of memory: a threshold that is always met stands for pressure, one
//! that is never met for its end. Tasks that wait for memory do not count, as other tests cause some.

use std::fs;
use std::path::PathBuf;

use ebb_api::PressureStatus;
use vmtest::{Guest, Host, Vm, require, until, until_or};

const MIB: u64 = 1 << 20;
/// What a daemon logs when pressure begins and ends.
const BEGINS: &str = ": reclaiming from ";
const ENDS: &str = ": no VM is asked any more, ";

fn host() -> Host {
    let host = Host::new();
    host.set("EBB_PRESSURE_STALL", "0");
    host
}

fn run(host: &Host) -> Vm {
    let vm = host.run(Guest::debian("6.1-cloud").memory("768M").cpus(1));
    vm.wait_trusted();
    vm
}

/// Frees much memory of the guest, which the host still has.
fn free(vm: &Vm) -> u64 {
    vm.guest("fill a 400M");
    vm.guest("free a");
    let before = vm.host_bytes();
    assert!(before > 400 * MIB, "{before}");
    before
}

/// Waits until the host has that memory.
fn wait_taken(vm: &Vm, before: u64) {
    until("its free memory", || (vm.host_bytes() + 200 * MIB < before).then_some(()));
}

fn pressure(vm: &Vm) -> PressureStatus {
    vm.status().auto.pressure.expect("it reclaims under host pressure")
}

fn wait_watched(vm: &Vm) {
    let seen_by = until("ebbd to watch the host", || pressure(vm).seen_by);
    assert!(seen_by.starts_with("available memory"), "{seen_by}");
}

/// Waits until the watch has asked this VM once more, and so has looked at all others, too.
fn wait_round(vm: &Vm) {
    let before = pressure(vm).rounds;
    until("a round under pressure", || (pressure(vm).rounds > before).then_some(()));
}

#[test]
fn memory_is_reclaimed_under_pressure_and_not_before() {
    let host = host();
    let (vm, other) = (run(&host), run(&host));
    vm.ebb("auto on --when pressure --below 0").ok();
    other.ebb("auto on --when pressure --below 100%").ok();
    wait_watched(&vm);
    let before = free(&vm);
    for _ in 0..2 {
        wait_round(&other);
    }
    let status = vm.status().auto;
    assert_eq!((pressure(&vm).rounds, status.last), (0, None));
    assert!(vm.host_bytes() >= before, "nothing is taken from it");

    vm.ebb("auto on --below 100%").ok();
    wait_taken(&vm, before);
    let told = pressure(&vm);
    let why = told.why.expect("a round has begun");
    assert!(told.rounds > 0 && why.starts_with("host: available ") && why.contains(" below "));
    assert!(vm.ebb("auto").ok().contains(" rounds, the last "));
    until("the log to say so", || host.log().contains(BEGINS).then_some(()));

    for vm in [&vm, &other] {
        vm.ebb("auto on --below 0").ok();
    }
    until("the end of the pressure", || {
        let log = host.log();
        (log.rfind(ENDS) > log.rfind(BEGINS)).then_some(())
    });
    let rounds = pressure(&vm).rounds;
    let before = free(&vm);
    other.ebb("auto on --below 100%").ok();
    for _ in 0..2 {
        wait_round(&other);
    }
    assert_eq!(pressure(&vm).rounds, rounds);
    assert!(vm.host_bytes() >= before, "nothing is taken from it");
}

/// No command is given meanwhile: it would start the next daemon.
#[test]
fn without_a_daemon_intervals_count() {
    let host = host();
    let vm = run(&host);
    vm.ebb("auto on --when pressure --below 0 --interval 500ms").ok();
    wait_watched(&vm);
    let before = free(&vm);
    host.kill_daemon();
    wait_taken(&vm, before);
    assert_eq!(host.daemon(), None);
    wait_watched(&vm);
    assert_eq!(pressure(&vm).rounds, 0);
}

#[test]
fn the_mode_outlives_all_processes() {
    let host = host();
    let vm = run(&host);
    vm.ebb("auto on --when pressure --below 1%").ok();
    wait_watched(&vm);
    host.kill9();
    host.start();
    wait_watched(&vm);
    assert_eq!((vm.status().auto.on, vm.status().auto.below_percent), (true, Some(1)));
    vm.ebb("auto on --when interval").ok();
    assert_eq!(vm.status().auto.pressure, None);
}

#[test]
fn a_threshold_that_no_host_has_is_refused() {
    let host = host();
    let vm = run(&host);
    let why = vm.ebb("auto on --when pressure --below 1000000G").refused();
    assert!(why.contains("the host has ") && why.contains("give less, or 100%"), "{why}");
    assert!(!vm.status().auto.on);
}

/// A control group with little memory, removed at the end.
struct Group(PathBuf);

impl Group {
    fn new(limit_bytes: u64) -> Result<Group, String> {
        let root = PathBuf::from("/sys/fs/cgroup/memory");
        let path = root.join(format!("ebb-pressure-{}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let group = Group(path);
        let limit = group.0.join("memory.limit_in_bytes");
        match fs::write(&limit, limit_bytes.to_string()) {
            Ok(()) => Ok(group),
            Err(error) => Err(format!("{}: {error}", limit.display())),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let removed = until_or(|| fs::remove_dir(&self.0).is_ok().then_some(()));
        if removed.is_none() {
            eprintln!("{}: not removed", self.0.display());
        }
    }
}

/// VMs are in other groups, which that limit does not hold for.
#[test]
fn a_control_group_of_the_daemon_alone_does_not_count() {
    let group = Group::new(200 * MIB);
    require!(group.as_ref());
    let host = host();
    let (vm, other) = (run(&host), run(&host));
    let daemon = host.daemon().expect("a daemon runs");
    let members = group.as_ref().map(|group| group.0.join("cgroup.procs")).expect("a group");
    fs::write(members, daemon.to_string()).expect("the daemon joins the group");
    // The host has more than that, and the group never.
    vm.ebb("auto on --when pressure --below 201M").ok();
    other.ebb("auto on --when pressure --below 100%").ok();
    wait_watched(&vm);
    for _ in 0..2 {
        wait_round(&other);
    }
    assert_eq!(pressure(&vm).rounds, 0);
}

#[test]
fn a_threshold_of_a_vm_that_reclaims_at_intervals_is_refused() {
    let host = host();
    let vm = run(&host);
    let why = vm.ebb("auto on --below 5%").refused();
    assert!(why.contains("belongs to --when pressure: give both"), "{why}");
    assert!(!vm.status().auto.on);
}
