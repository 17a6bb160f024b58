//! Each VM has a process of its own. Its end concerns no other VM and not `ebbd`, and the end of
//! `ebbd` concerns no VM.

use std::fs::{self, File};
use std::thread;

use ebb_api::State;
use rustix::process::{Pid, Signal, kill_process};
use vmtest::{Guest, Host, Neighbour, Vm, permit, rounds, until};

const MIB: u64 = 1 << 20;

fn small() -> Guest {
    Guest::debian("6.1-cloud").memory("256M").backing("small").cpus(1)
}

/// A VM of which a part is evicted.
fn limited(host: &Host) -> Vm {
    let vm = host.run(small());
    vm.guest("fill a 100M");
    vm.ebb("limit 90M").ok();
    until("the limit to hold", || (vm.host_bytes() <= 90 * MIB).then_some(()));
    vm
}

fn server(host: &Host, vm: &Vm) -> i32 {
    until("the VM's process", || host.server(vm.name()))
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).expect("a process"), signal).expect("it runs");
}

fn is_managed(host: &Host, vm: &Vm) -> bool {
    host.list().iter().any(|line| line.name.as_str() == vm.name() && line.state == State::Managed)
}

#[test]
fn a_guest_does_not_notice_the_end_of_the_daemon() {
    let host = Host::new();
    let vm = limited(&host);
    let process = server(&host, &vm);
    for _ in 0..rounds(3, 20) {
        host.kill_daemon();
        assert_eq!(vm.guest("check a"), "0");
        assert_eq!(host.daemon(), None, "nobody has asked for one");
        // The next daemon finds the process, and goes on with it.
        until("the VM to be managed", || is_managed(&host, &vm).then_some(()));
        assert_eq!(server(&host, &vm), process);
        vm.ebb("limit 95M").ok();
        assert_eq!(vm.status().limit.bytes, Some(95 * MIB));
    }
    assert_eq!(vm.guest("check a"), "0");
    // The daemon that found it also notices its end.
    signal(process, Signal::KILL);
    until("the next process", || host.server(vm.name()).filter(|next| *next != process));
    assert_eq!(vm.guest("check a"), "0");
    vm.kill();
    until("the VM to be forgotten", || host.list().is_empty().then_some(()));
    until("its process to end", || host.servers().is_empty().then_some(()));
}

/// QEMU does not run yet when the daemon dies: the VM's process goes on with the start, and the
/// next daemon with the process.
#[test]
fn a_start_goes_on_without_the_daemon() {
    let host = Host::new();
    let place = host.directory().join("slow");
    fs::create_dir(&place).unwrap();
    permit(&place, 0o777);
    let [slow, started, go] = ["qemu", "started", "go"].map(|name| place.join(name));
    let waits =
        format!("touch {}; while [ ! -e {} ]; do sleep 0.1; done", started.display(), go.display());
    let text = format!("case \"$*\" in *ebb-qmp*) {waits};; esac\nexec qemu-system-x86_64 \"$@\"");
    fs::write(&slow, format!("#!/bin/sh\n{text}\n")).unwrap();
    permit(&slow, 0o755);
    host.set("EBB_QEMU", &slow);
    let run = "run --name slow --memory 64M -- -S";
    let starting = thread::spawn({
        let host = host.clone();
        move || host.ebb(run)
    });
    until("QEMU to be started", || started.exists().then_some(()));
    host.kill_daemon();
    starting.join().expect("ebb ends").refused();
    assert!(host.list().is_empty(), "it is not on record yet");
    let why = host.ebb(run).refused();
    assert!(why.contains("managed already"), "{why}");
    fs::write(&go, "").unwrap();
    until("the VM to be managed", || {
        host.list().iter().any(|line| line.state == State::Managed).then_some(())
    });
    assert_eq!(host.servers().len(), 1);
}

#[test]
fn a_process_that_ends_is_followed_by_the_next() {
    let host = Host::new();
    let (vm, other) = (limited(&host), limited(&host));
    let (others, daemon) = (server(&host, &other), host.daemon());
    for end in [Signal::KILL, Signal::ABORT, Signal::TERM] {
        let before = server(&host, &vm);
        signal(before, end);
        until("the next process", || host.server(vm.name()).filter(|next| *next != before));
        assert_eq!(vm.guest("check a"), "0");
        assert_eq!(other.guest("check a"), "0");
        until("the VM to be managed", || is_managed(&host, &vm).then_some(()));
    }
    assert_eq!((server(&host, &other), host.daemon()), (others, daemon));
}

#[test]
fn a_stopped_process_delays_no_other_vm() {
    let host = Host::new();
    let (vm, other) = (limited(&host), Neighbour::new(limited(&host)));
    let calm = other.times(|| ());
    vm.status();
    signal(server(&host, &vm), Signal::STOP);
    let refused = thread::spawn({
        let (host, name) = (host.clone(), vm.name().to_owned());
        move || host.ebb(&format!("limit {name} 100M")).refused()
    });
    let beside = other.times(|| {
        assert_eq!(host.list().len(), 2);
        assert_eq!(vm.last_status().pid, vm.pid());
    });
    beside.assert_unhindered(calm, "a process that is stopped");
    other.stop();
    assert_eq!(other.vm().guest("check a"), "0");
    other.vm().reclaim();
    let why = refused.join().expect("ebb ends");
    assert!(why.contains("has not answered for"), "{why}");
    signal(server(&host, &vm), Signal::CONT);
    assert_eq!(vm.guest("check a"), "0");
    vm.ebb("limit 95M").ok();
}

/// Many VMs that have not begun: their processes outlive `ebbd`, and the next `ebbd` starts all of
/// them again at once. The long form has as many as a large host.
#[test]
fn many_vms_are_served_at_once() {
    let host = Host::new();
    let count = rounds(8, 200) as usize;
    for vm in 0..count {
        host.ebb(&format!("run --name idle{vm} --memory 64M -- -S")).ok();
    }
    let managed = || host.list().iter().filter(|line| line.state == State::Managed).count();
    assert_eq!((managed(), host.servers().len()), (count, count));
    let before = host.servers();
    host.kill_daemon();
    host.start();
    until("the next daemon to find all", || (managed() == count).then_some(()));
    assert_eq!(host.servers(), before);
    host.kill_servers();
    until("all to be served again", || {
        let servers = host.servers();
        let are_new = servers.iter().all(|server| !before.contains(server));
        (are_new && servers.len() == count && managed() == count).then_some(())
    });
}

/// The worker of one VM loops for ever: its faults and all other VMs are served as before.
#[test]
fn an_endless_loop_in_one_process_delays_no_other_vm() {
    let host = Host::new();
    host.set("EBB_FAIL", "vm1:spin:1");
    let other = Neighbour::new(limited(&host));
    let calm = other.times(|| ());
    let vm = host.run(small().memory("128M"));
    let process = server(&host, &vm);
    until("its worker to loop", || (worker_ticks(process) > 200).then_some(()));
    other.times(|| ()).assert_unhindered(calm, "an endless loop");
    other.stop();
    assert_eq!(other.vm().guest("check a"), "0");
    assert_eq!(host.list().len(), 2);
    assert_eq!(vm.guest("ping"), "done");
    assert_eq!(server(&host, &vm), process, "it still loops");
}

/// Nobody waits until the worker has time to end a process of which another thread has panicked.
#[test]
fn a_panic_ends_a_process_whose_worker_loops() {
    let host = Host::new();
    let vm = host.run(small().memory("512M").mode("strict"));
    vm.guest("fill kept 60M");
    vm.wait_trusted();
    vm.reclaim();
    // The second failure comes while the guest takes reclaimed memory, of which it takes little before.
    host.set("EBB_FAIL", format!("{0}:spin:1,{0}:map:20", vm.name()));
    host.kill9();
    host.start();
    let process = server(&host, &vm);
    until("its worker to loop", || (worker_ticks(process) > 200).then_some(()));
    vm.guest("fill load 200M");
    until("the next process", || (server(&host, &vm) != process).then_some(()));
    until("the panic to be told", || host.log().contains("its service failed").then_some(()));
    until("it to be recovered", || is_managed(&host, &vm).then_some(()));
    assert_eq!(vm.guest("check kept"), "0");
    assert_eq!(vm.guest("check load"), "0");
}

/// Returns the processor time of the worker of a VM's process, in hundredths of a second.
fn worker_ticks(process: i32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("it runs").flatten();
    let stats = tasks.filter_map(|task| fs::read_to_string(task.path().join("stat")).ok());
    let worker = stats.filter(|stat| stat.contains("(worker)"));
    let user = |stat: String| {
        let rest = stat.rsplit(") ").next()?.split(' ').nth(11)?;
        rest.parse::<u64>().ok()
    };
    worker.filter_map(user).sum()
}

/// The ledger that the process maps is cut off, and the next look at it is a SIGBUS.
#[test]
fn a_sigbus_in_one_process_delays_no_other_vm() {
    let host = Host::new();
    let (vm, other) = (limited(&host), Neighbour::new(limited(&host)));
    let (before, others) = (server(&host, &vm), server(&host, other.vm()));
    let calm = other.times(|| ());
    let path = host.run_directory().join("vms").join(vm.name()).join("ledger");
    // Nothing changes in the ledger while its copy is made.
    signal(before, Signal::STOP);
    let copy = fs::read(&path).expect("the ledger");
    let ledger = File::options().write(true).open(&path).expect("the ledger");
    ledger.set_len(0).expect("it can be cut off");
    signal(before, Signal::CONT);
    thread::scope(|scope| {
        let reading = scope.spawn(|| vm.guest("check a"));
        let has_ended = || !host.servers().contains(&before) || host.server(vm.name()).is_none();
        let beside = other.times(|| until("the process to end", || has_ended().then_some(())));
        beside.assert_unhindered(calm, "a SIGBUS");
        // It has no ledger.
        until("the VM not to be managed", || (!is_managed(&host, &vm)).then_some(()));
        fs::write(&path, &copy).expect("the ledger");
        assert_eq!(reading.join().expect("the guest reads"), "0");
    });
    other.stop();
    assert_eq!(other.vm().guest("check a"), "0");
    assert_eq!(server(&host, other.vm()), others);
}
