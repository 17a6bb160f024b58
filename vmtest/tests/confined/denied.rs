//! What a confined QEMU is denied, and how that is reported.

use std::fs;
use std::path::PathBuf;

use ebb_vm::Qmp;
use serde_json::json;
use vmtest::{Host, permit, until};

use crate::{SECRET, about, guest};

fn secret(host: &Host, bytes: usize) -> PathBuf {
    let path = host.directory().join("secret.img");
    fs::write(&path, SECRET.repeat(bytes / SECRET.len())).expect("a file");
    permit(&path, 0o600);
    path
}

#[test]
fn files_of_root_alone_are_closed_to_qemu() {
    let host = Host::new();
    let path = secret(&host, 1 << 20);
    let vm = host.run(guest());
    let directory = host.run_directory().join("vms").join(vm.name());
    // The only directory of Ebb's that it has open.
    let entries = fs::read_dir(format!("/proc/{}/fd", vm.pid())).expect("it runs");
    let is_sockets = |path: &PathBuf| fs::read_link(path).is_ok_and(|at| at.ends_with("sockets"));
    let sockets = entries.flatten().map(|entry| entry.path()).find(is_sockets);
    let above = sockets.expect("a directory of sockets").join("../vm.json");
    for file in [path, directory.join("swap.key"), directory.join("vm.json"), above] {
        let arguments = json!({ "driver": "raw", "read-only": true, "node-name": "stolen",
            "file": { "driver": "file", "filename": file.display().to_string() } });
        let mut qmp = vm.open_qmp();
        let why = qmp.execute("blockdev-add", arguments).unwrap_err().to_string();
        assert!(why.contains("Permission denied"), "{}: {why}", file.display());
    }
}

#[test]
fn a_drive_that_qemu_may_not_open_is_reported_with_advice() {
    let host = Host::new();
    let path = secret(&host, 1 << 20);
    let drive = format!("-drive file={},if=virtio,format=raw,read-only=on", path.display());
    let line = "run --name a --memory 64M --kernel /bin/true";
    let why = host.ebb(&format!("{line} -- {drive}")).refused();
    for part in ["secret.img", "Permission denied", "--disk", "--user", "--privileged"] {
        assert!(why.contains(part), "{why}");
    }
    let why = host.ebb("run --name a --memory 64M -- -netdev bridge,id=n").refused();
    assert!(why.contains("filter of system calls") && why.contains("--privileged"), "{why}");
    let why = host.ebb(&format!("{line} --user nobody-at-all -- {drive}")).refused();
    assert!(why.contains("/etc/passwd"), "{why}");
    // Root's own file needs no capability.
    let vm = host.run(guest().user("root").qemu_args(&drive));
    let about = about(vm.pid());
    assert_eq!((about["Uid"].as_str(), about["CapEff"].as_str()), ("0 0 0 0", "0000000000000000"));
    assert_eq!((about["NoNewPrivs"].as_str(), about["Seccomp"].as_str()), ("1", "2"));
    assert!(vm.guest("sh busybox head -c 25 /dev/vda").contains(SECRET));
}

/// A migration by `exec:` starts a program, long after QEMU was started.
#[test]
fn a_qemu_that_its_filter_ended_is_reported() {
    let host = Host::new();
    let place = host.directory().join("open");
    fs::create_dir(&place).expect("a directory");
    permit(&place, 0o777);
    let socket = place.join("qmp.sock");
    let monitor = format!("-qmp unix:{},server=on,wait=off", socket.display());
    host.ebb(&format!("run --name a --memory 64M -- -S {monitor}")).ok();
    let mut qmp = Qmp::connect(&socket).expect("QEMU listens");
    // It ends before it answers.
    let _ = qmp.execute("migrate", json!({ "uri": "exec:true" }));
    until("its end to be on record", || host.log().contains("SIGSYS").then_some(()));
    until("the VM to be forgotten", || host.list().is_empty().then_some(()));
    let why = host.ebb("status a").refused();
    assert!(why.contains("SIGSYS") && why.contains("-sandbox"), "{why}");
    let why = host.ebb("run --name a --memory 64M -- -netdev tap,id=n").refused();
    assert!(why.contains("script=no") && why.contains("--privileged"), "{why}");
}

#[test]
fn a_privileged_vm_is_reported_as_such() {
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
    assert!(vm.ebb("status --verbose").ok().contains("--privileged"));
    until("the log to say so", || host.log().contains("--privileged").then_some(()));
}
