//! A daemon that lacks something takes nothing from a running VM.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use vmtest::{Guest, Host, Ran, Vm, rounds, until, until_or};

const MIB: u64 = 1 << 20;

/// A daemon with a bound on its descriptors, and its log.
struct Scarce {
    host: Host,
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
        command.envs(daemon.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.stdout(file.try_clone().expect("a log")).stderr(file);
        Scarce { host: host.clone(), child: command.spawn().expect("prlimit starts"), log }
    }

    /// Waits until it listens; `false`: it has ended.
    fn listens(&mut self) -> bool {
        let socket = self.host.run_directory().join("ebbd.sock");
        until("a daemon that listens, or ends", || {
            let listens = UnixStream::connect(&socket).is_ok();
            let ended = self.child.try_wait().expect("its end").is_some();
            (listens || ended).then_some(listens)
        })
    }

    /// Waits until it has reported on each VM, or has given up.
    fn wait(&mut self, vms: &[Vm]) {
        let log = || fs::read_to_string(&self.log).unwrap_or_default();
        let has_word = |name: &str| {
            ["recovered", "not recovered"]
                .iter()
                .any(|word| log().contains(&format!("{name}: {word}")))
        };
        let found = until_or(|| {
            let ended = self.child.try_wait().expect("its end").is_some();
            (ended || vms.iter().all(|vm| has_word(vm.name()))).then_some(())
        });
        assert!(found.is_some(), "no word on each VM: {}", log());
    }
}

impl Drop for Scarce {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.host.kill_servers();
    }
}

/// Files that a VM needs beside its memory: without one of them, the rest is lost.
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
    // From too few descriptors to begin to a few too few.
    let step = rounds(7, 1);
    for descriptors in (8..90).step_by(step as usize) {
        Scarce::start(&host, descriptors).wait(&vms);
        assert_eq!(kept(&host), before, "with {descriptors} descriptors");
    }
    host.start();
    for vm in &vms {
        assert_eq!(vm.guest("check a"), "0");
    }
    // A process that loses descriptors while it runs goes on with what it has.
    allow(&host, 3);
    for vm in &vms {
        assert_eq!(vm.guest("check a"), "0");
    }
    assert_eq!(kept(&host), before);
    allow(&host, 1 << 10);
    assert_eq!(host.list().len(), vms.len());
}

/// Forbids the processes of its VMs to open descriptors with this number or above.
fn allow(host: &Host, descriptors: u32) {
    let limit = format!("--nofile={descriptors}:{}", 1 << 10);
    for pid in host.servers() {
        Ran::of(Command::new("prlimit").args(["--pid", &pid.to_string(), &limit])).ok();
    }
}

/// What each descriptor of a process leads to.
fn descriptors(pid: i32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").flatten();
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.map(|link| link.to_string_lossy().into_owned()).collect()
}

#[test]
fn a_vm_that_cannot_be_served_is_left_as_it_was() {
    let host = Host::new();
    let vm = host.qemu(Guest::debian("6.1-cloud").memory("256M").mode("strict").cpus(1));
    vm.guest("fill a 60M");
    // Begins with a daemon that cannot begin, then allows one more each time, so that each place
    // fails once. Most of these places are in the VM's process, which has the same bound.
    let refused = (8..8 + 60).find(|&most| {
        let mut daemon = Scarce::start(&host, most);
        if !daemon.listens() {
            return false;
        }
        let ran = vm.try_attach();
        if ran.code == Some(0) {
            return true;
        }
        let left = descriptors(vm.pid()).iter().any(|link| link.contains("userfaultfd"));
        assert!(!left, "with {most} descriptors a userfaultfd is left in QEMU: {}", ran.stderr);
        let record = host.run_directory().join("vms").join(vm.name()).join("vm.json");
        assert!(!record.exists(), "with {most} descriptors it is on record: {}", ran.stderr);
        false
    });
    assert!(refused.is_some_and(|most| most > 16), "{refused:?}");
    // With enough descriptors, the VM is recovered.
    host.start();
    assert_eq!(vm.guest("check a"), "0");
    vm.detach();
    assert_eq!(vm.guest("check a"), "0");
}
