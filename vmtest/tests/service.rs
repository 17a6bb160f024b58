//! A failure of one VM concerns only that VM: a thread that panics, a QEMU that stands still, a
//! disk that cannot be used.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;

use ebb_api::State;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use vmtest::{Disk, Guest, Host, Neighbour, Vm, rounds, until};

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

fn state(host: &Host, vm: &Vm) -> Option<State> {
    host.list().into_iter().find(|line| line.name.as_str() == vm.name()).map(|line| line.state)
}

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).expect("a process"), signal).expect("it runs");
}

#[test]
fn a_panic_costs_a_moment_of_one_vms_service() {
    let host = Host::new();
    let vm = host.run(small().memory("512M").mode("strict"));
    let other = Neighbour::new(limited(&host));
    vm.guest("fill kept 60M");
    // The worker, the thread that reads faults, and a refill thread.
    for place in ["tick:3", "map:10", "map:400"] {
        host.set("EBB_FAIL", format!("{}:{place}", vm.name()));
        host.kill9();
        host.start();
        let before = host.log().matches("its service failed").count();
        let work = || {
            match place {
                "map:10" => {
                    vm.wait_trusted();
                    vm.reclaim();
                }
                "map:400" => drop(vm.ebb("limit 150M").ok()),
                _ => {}
            }
            vm.guest("fill load 200M");
        };
        let beside = other.times(|| {
            work();
            until(format_args!("a panic at {place}"), || {
                assert_eq!(vm.guest("check kept"), "0", "{place}");
                (host.log().matches("its service failed").count() > before).then_some(())
            });
        });
        assert_eq!(state(&host, other.vm()), Some(State::Managed), "{place}");
        until("it to be recovered again", || {
            (state(&host, &vm) == Some(State::Managed)).then_some(())
        });
        assert_eq!(vm.guest("check kept"), "0", "{place}");
        assert_eq!(vm.guest("check load"), "0", "{place}");
        vm.guest("free load");
        // The same work while nothing fails.
        beside.assert_unhindered(other.times(work), place);
        vm.guest("free load");
    }
    other.stop();
    assert_eq!(other.vm().guest("check a"), "0");
    let daemons = host.log().matches("listening on").count();
    assert_eq!(daemons, 4, "the daemon itself went on");
}

/// The guest's request waits for the next process, which carries it out.
#[test]
fn a_panic_of_a_disks_thread_costs_a_moment_of_its_vms_service() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "64M");
    let vm = host.run(small().own_disk(&disk));
    vm.guest("fill a 60M");
    host.set("EBB_FAIL", format!("{}:write:3", vm.name()));
    host.kill9();
    host.start();
    assert_eq!(vm.guest("disk /dev/vda 16M"), "0");
    let told = "its service failed: its disk ";
    until("the panic to be told", || host.log().contains(told).then_some(()));
    let events = host.ebb("events --type state").ok();
    assert!(events.contains(told), "{events}");
    until("it to be recovered", || (state(&host, &vm) == Some(State::Managed)).then_some(()));
    assert_eq!(vm.guest("disk /dev/vda 16M"), "0");
    assert_eq!(vm.guest("check a"), "0");
}

#[test]
fn a_stopped_qemu_delays_no_other_vm() {
    let host = Host::new();
    let (vm, other) = (limited(&host), host.run(small()));
    vm.status();
    signal(vm.pid(), Signal::STOP);
    // QEMU does not answer, but what is known of the VM can be read.
    let shown = vm.last_status();
    assert_eq!((shown.pid, shown.state), (vm.pid(), State::Managed));
    assert_eq!(host.list().len(), 2);
    host.ebb("pool 400M").ok();
    other.ebb("share 150M").ok();
    other.reclaim();
    // The recovery of all VMs does not wait for it either.
    host.kill9();
    host.start();
    assert_eq!(host.list().len(), 2);
    other.reclaim();
    signal(vm.pid(), Signal::CONT);
    assert_eq!(vm.guest("check a"), "0");
    vm.wait_trusted();
}

#[test]
fn a_disk_that_is_not_available_delays_one_vm_only() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "64M");
    let (vm, other) = (host.run(small().own_disk(&disk)), host.run(small()));
    vm.guest("fill a 60M");
    host.kill9();
    let image = File::open(disk.image()).expect("the image");
    flock(&image, FlockOperation::LockExclusive).expect("nobody else has it");
    assert_eq!(host.list().len(), 2);
    until("the other VM to be recovered", || {
        (state(&host, &other) == Some(State::Managed)).then_some(())
    });
    other.reclaim();
    assert_eq!(state(&host, &vm), Some(State::Recovering));
    drop(image);
    until("the VM to be recovered", || (state(&host, &vm) == Some(State::Managed)).then_some(()));
    assert_eq!(vm.guest("check a"), "0");
}

#[test]
fn the_first_command_after_a_death_starts_the_next_daemon() {
    let host = Host::new();
    let vm = host.run(small());
    vm.guest("fill a 60M");
    for _ in 0..rounds(40, 500) {
        // The command comes while the daemon is being killed, not after its end.
        signal(host.daemon().expect("a daemon runs"), Signal::KILL);
        assert_eq!(host.list().len(), 1);
    }
    assert_eq!(vm.guest("check a"), "0");
}

/// Sends a part of a request, and never the rest.
fn begin_request(socket: &Path) -> UnixStream {
    let mut client = UnixStream::connect(socket).expect("it listens");
    client.write_all(b"GET /").expect("it listens");
    client
}

#[test]
fn a_client_that_stops_keeps_nobody_from_the_end() {
    let host = Host::new();
    host.ebb("run --name a --memory 64M -- -S").ok();
    let of_vm = begin_request(&host.run_directory().join("vms/a/api.sock"));
    signal(host.list()[0].pid, Signal::KILL);
    until("the VM's process to end", || host.servers().is_empty().then_some(()));
    let daemon = host.daemon().expect("it runs");
    let socket = host.run_directory().join("ebbd.sock");
    let of_daemon = begin_request(&socket);
    signal(daemon, Signal::TERM);
    until("the end to begin", || UnixStream::connect(&socket).is_err().then_some(()));
    signal(daemon, Signal::TERM);
    until("the daemon to end", || host.daemon().is_none().then_some(()));
    drop((of_vm, of_daemon));
}
