//! A daemon that has not what it needs takes nothing from a VM that runs.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use vmtest::{Guest, Host, Vm, rounds, until};

const MIB: u64 = 1 << 20;

/// A daemon that may have so many descriptors, and where it says what it does.
struct Scarce {
    child: Child,
    log: PathBuf,
}

impl Scarce {
    fn start(host: &Host, descriptors: u32) -> Scarce {
        let log = host.directory().join(format!("scarce-{descriptors}.log"));
        let file = File::create(&log).expect("a log");
        let daemon = host.command("ebbd");
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={descriptors}")).arg(daemon.get_program());
        command.args(daemon.get_args()).stdin(Stdio::null());
        command.stdout(file.try_clone().expect("a log")).stderr(file);
        Scarce { child: command.spawn().expect("prlimit starts"), log }
    }

    /// Waits until it has said of so many VMs what comes of them, or has given up.
    fn wait(&mut self, vms: usize) {
        until(format_args!("word on {vms} VMs in {}", self.log.display()), || {
            let told = fs::read_to_string(&self.log).unwrap_or_default();
            let ended = self.child.try_wait().expect("its end").is_some();
            (ended || told.matches("taken up").count() >= vms).then_some(())
        });
    }
}

impl Drop for Scarce {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What is kept of a VM outside of its memory: without one of these files the rest is lost.
fn kept(host: &Host) -> Vec<PathBuf> {
    let run = host.run_directory();
    let swap = fs::read_dir(&run).expect("the run directory").flatten();
    let swap =
        swap.map(|entry| entry.path()).filter(|path| path.extension() == Some("swap".as_ref()));
    let vms = fs::read_dir(run.join("vms")).expect("VMs").flatten();
    let files = vms.flat_map(|vm| fs::read_dir(vm.path()).into_iter().flatten().flatten());
    let names = ["vm.json", "ledger", "swap.key", "swap.seals", "console.sock"];
    let files = files.filter(|file| names.iter().any(|name| file.file_name() == *name));
    let mut all: Vec<PathBuf> = files.map(|file| file.path()).chain(swap).collect();
    all.sort_unstable();
    all
}

fn evicted(host: &Host) -> Vm {
    let vm = host.run(Guest::debian("6.1-cloud").memory("256M").backing("small").cpus(1));
    vm.guest("fill a 100M");
    vm.ebb("limit 90M").ok();
    until("the limit to hold", || (vm.host_bytes() <= 90 * MIB).then_some(()));
    vm
}

#[test]
fn a_daemon_without_descriptors_removes_nothing() {
    let host = Host::new();
    let vms = [evicted(&host), evicted(&host), evicted(&host)];
    let before = kept(&host);
    assert_eq!(before.len(), 3 * 6, "{before:?}");
    host.kill9();
    // From one that cannot begin to one that lacks a few.
    let step = rounds(5, 1);
    for descriptors in (8..90).step_by(step as usize) {
        Scarce::start(&host, descriptors).wait(3);
        assert_eq!(kept(&host), before, "with {descriptors} descriptors");
    }
    host.start();
    for vm in &vms {
        assert_eq!(vm.guest("check a"), "0");
    }
}
