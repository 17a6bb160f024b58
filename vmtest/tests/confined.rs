//! What the QEMUs are that Ebb starts, and what they cannot do.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::json;
use vmtest::{Disk, Guest, Host, Vm, until};

const MIB: u64 = 1 << 20;
/// A QEMU's user is this and its process number.
const USERS: u64 = 0x7000_0000;
const SECRET: &str = "only root is to read this";

fn guest() -> Guest {
    Guest::debian("6.1-cloud").memory("512M")
}

/// The lines of `/proc/PID/status`.
fn about(pid: i32) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let word = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    lines.map(|(key, value)| (key.to_owned(), word(value))).collect()
}

fn assert_confined(vm: &Vm) {
    let (pid, about) = (vm.pid(), about(vm.pid()));
    let user = USERS + pid as u64;
    let four = format!("{user} {user} {user} {user}");
    let none = "0000000000000000";
    for (key, value) in [
        ("Uid", four.as_str()),
        ("Gid", &four),
        ("Groups", ""),
        ("NoNewPrivs", "1"),
        ("Seccomp", "2"),
        ("Umask", "0077"),
        ("CapInh", none),
        ("CapPrm", none),
        ("CapEff", none),
        ("CapBnd", none),
        ("CapAmb", none),
    ] {
        assert_eq!(about[key], value, "{key}");
    }
}

fn assert_has_only_what_it_needs(vm: &Vm, host: &Host) {
    let pid = vm.pid();
    let environment = fs::read(format!("/proc/{pid}/environ")).expect("it runs");
    let environment = String::from_utf8_lossy(&environment).into_owned();
    let names: Vec<&str> = { environment.split_terminator('\0') }
        .filter_map(|word| Some(word.split_once('=')?.0))
        .collect();
    assert_eq!(names, ["PATH"]);
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).expect("a limit");
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
    let directory = host.run_directory().join("vms").join(vm.name());
    let ours = ["qemu.log", "console.log", "sockets"].map(|name| directory.join(name));
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").flatten() {
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        let text = link.to_string_lossy();
        let known = ["socket:", "anon_inode:", "/memfd:", "/dev/null", "pipe:"];
        let known = known.iter().any(|begin| text.starts_with(begin)) || ours.contains(&link);
        assert!(known, "QEMU has {text}");
    }
    let words = fs::read(format!("/proc/{pid}/cmdline")).expect("it runs");
    let words = String::from_utf8_lossy(&words).into_owned();
    let daemon = host.daemon().expect("a daemon runs");
    assert!(!words.contains(&format!("/proc/{daemon}/")), "{words}");
}

#[test]
fn a_qemu_has_a_user_of_its_own_and_nothing_else() {
    let host = Host::new();
    host.set("EBB_TEST_SECRET", SECRET);
    let disk = Disk::new(&host, "disk", "64M");
    let vm = host.run(guest().own_disk(&disk));
    assert_confined(&vm);
    assert_has_only_what_it_needs(&vm, &host);
    let told = vm.status().confinement.expect("Ebb started it");
    assert!(!told.privileged && told.sandbox && told.lacks.is_empty(), "{told:?}");
    assert_eq!(u64::from(told.uid), USERS + vm.pid() as u64);

    let other = host.run(guest());
    assert_ne!(about(vm.pid())["Uid"], about(other.pid())["Uid"]);
    assert_confined(&other);
}

#[test]
fn a_confined_vm_lives_as_any_other() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "64M");
    let vm = host.run(guest().own_disk(&disk));
    vm.guest("fill a 200M");
    vm.ebb("limit 120M").ok();
    until("the limit to hold", || (vm.host_bytes() <= 120 * MIB).then_some(()));
    assert_eq!(vm.guest("check a"), "0");
    host.kill9();
    host.start();
    assert_eq!(vm.guest("check a"), "0");
    // QEMU connects to its disk again.
    vm.guest("sh busybox dd if=/dev/urandom of=/dev/vda bs=1M count=8 conv=fsync");
    assert!(vm.status().disks.requests > 0);
    vm.ebb("limit off").ok();
    vm.reboot();
    vm.wait_trusted();
    vm.reclaim();
    assert_confined(&vm);
    vm.power_off();
    until("its directory to go", || {
        (!host.run_directory().join("vms").join(vm.name()).exists()).then_some(())
    });
}

/// A VM that was let go is found again, though its command line names no socket.
#[test]
fn a_confined_vm_is_let_go_and_held_again() {
    let host = Host::new();
    let vm = host.run(guest());
    vm.detach();
    host.ebb(&format!("attach --name {} --pid {}", vm.name(), vm.pid())).ok();
    assert_eq!(vm.status().pid, vm.pid());
    assert_confined(&vm);
}

fn secret(host: &Host, bytes: usize) -> std::path::PathBuf {
    let path = host.directory().join("secret.img");
    fs::write(&path, SECRET.repeat(bytes / SECRET.len())).expect("a file");
    close(&path);
    path
}

fn close(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("its own file");
}

#[test]
fn what_is_roots_alone_is_closed_to_qemu() {
    let host = Host::new();
    let path = secret(&host, 1 << 20);
    let vm = host.run(guest());
    let key = host.run_directory().join("vms").join(vm.name()).join("swap.key");
    for file in [&path, &key] {
        let arguments = json!({ "driver": "raw", "read-only": true, "node-name": "stolen",
            "file": { "driver": "file", "filename": file.display().to_string() } });
        let mut qmp = vm.open_qmp();
        let why = qmp.execute("blockdev-add", arguments).unwrap_err().to_string();
        assert!(why.contains("Permission denied"), "{}: {why}", file.display());
    }
}

#[test]
fn a_drive_that_qemu_may_not_open_is_told_with_what_to_do() {
    let host = Host::new();
    let path = secret(&host, 1 << 20);
    let drive = format!("-drive file={},if=virtio,format=raw,read-only=on", path.display());
    let line = "run --name a --memory 64M --kernel /bin/true";
    let why = host.ebb(&format!("{line} -- {drive}")).refused();
    for part in ["secret.img", "Permission denied", "--disk", "--user", "--privileged"] {
        assert!(why.contains(part), "{why}");
    }
    let why = host.ebb("run --name a --memory 64M -- -incoming exec:true").refused();
    assert!(why.contains("-sandbox") && why.contains("--privileged"), "{why}");
    let why = host.ebb(&format!("{line} --user nobody-at-all -- {drive}")).refused();
    assert!(why.contains("/etc/passwd"), "{why}");
    // Root's own file needs no capability.
    let vm = host.run(guest().user("root").qemu_args(&drive));
    let about = about(vm.pid());
    assert_eq!((about["Uid"].as_str(), about["CapEff"].as_str()), ("0 0 0 0", "0000000000000000"));
    assert_eq!((about["NoNewPrivs"].as_str(), about["Seccomp"].as_str()), ("1", "2"));
    assert!(vm.guest("sh busybox head -c 25 /dev/vda").contains(SECRET));
}

#[test]
fn a_kernel_of_roots_alone_boots() {
    let host = Host::new();
    let mut guest = guest();
    guest.own_boot_files(host.directory(), 0o600);
    let vm = host.run(guest);
    assert_confined(&vm);
    vm.wait_trusted();
}

#[test]
fn a_privileged_vm_is_told_so() {
    let host = Host::new();
    host.set("EBB_TEST_SECRET", SECRET);
    let path = secret(&host, 1 << 20);
    let drive = format!("-drive file={},if=virtio,format=raw,read-only=on", path.display());
    let vm = host.run(guest().privileged().qemu_args(&drive));
    let about = about(vm.pid());
    assert_eq!((about["Uid"].as_str(), about["Seccomp"].as_str()), ("0 0 0 0", "0"));
    assert_ne!(about["CapEff"], "0000000000000000");
    let environment = fs::read(format!("/proc/{}/environ", vm.pid())).expect("it runs");
    assert!(String::from_utf8_lossy(&environment).contains(SECRET));
    assert!(vm.status().confinement.expect("Ebb started it").privileged);
    assert!(vm.ebb("status").ok().contains("--privileged"));
    assert!(host.log().contains("--privileged"));
}
