//! Requests that make no sense are refused in one line, and change nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;

use ebb_vm::Qmp;
use vmtest::{Guest, Host, Ran, until_fits};

/// Checks that there is no VM, no record of one, and no process but the daemon.
fn assert_untouched(host: &Host) {
    let records = fs::read_dir(host.run_directory().join("vms")).map(|entries| entries.count());
    assert_eq!(records.unwrap_or(0), 0, "a record is left");
    // A helper may still be ending.
    let is_alone = |all: &Vec<String>| all.iter().all(|name| name == "ebbd");
    until_fits("no process but the daemon", || host.processes(), is_alone);
    assert!(host.list().is_empty());
}

fn assert_refused(host: &Host, line: &str, reason: &str) {
    let why = host.ebb(line).refused();
    assert!(why.contains(reason), "ebb {line}: {why}");
    assert_untouched(host);
}

#[test]
fn an_unknown_vm_is_named() {
    let host = Host::new();
    host.start();
    for line in ["status nobody", "reclaim nobody", "detach nobody", "auto nobody on"] {
        assert_refused(&host, line, "nobody");
    }
}

#[test]
fn a_setting_that_the_daemon_lacks_is_named() {
    let host = Host::new();
    host.start();
    let attach = "attach --name a --pid 2000000000";
    assert!(!host.ebb(attach).stderr.contains("warning"));
    host.set("EBB_SWAP_MAX", "64G");
    let said = host.ebb(attach).stderr;
    assert!(said.contains("warning: ebbd runs already, without your EBB_SWAP_MAX: "), "{said}");
}

#[test]
fn sizes_and_counts_out_of_range_are_named() {
    let host = Host::new();
    let run = |rest: &str| format!("run --name a --kernel /bin/true {rest}");
    assert_refused(&host, &run("--memory 1M"), "1 MiB");
    assert_refused(&host, &run("--memory 3T"), "3 TiB");
    assert_refused(&host, &run("--memory 67108865"), "67108865");
    assert_refused(&host, &run("--memory much"), "much");
    assert_refused(&host, &run("--memory 1G --cpus 0"), "0");
    assert_refused(&host, &run("--memory 1G --cpus 1000"), "1000");
    assert_refused(&host, &run("--memory 1G --min-order 11"), "11");
    assert_refused(&host, &run("--memory 1G --mode loose"), "loose");
    assert_refused(&host, "run --name ../a --memory 1G --kernel /bin/true", "../a");
}

#[test]
fn a_vm_that_cannot_boot_is_refused() {
    let host = Host::new();
    assert_refused(&host, "run --name a --memory 1G", "--kernel");
    assert_refused(&host, "run --name a --memory 1G --kernel /no/such/kernel", "/no/such/kernel");
    let no_option = "run --name a --memory 1G --kernel /bin/true -- -no-such-option";
    assert_refused(&host, no_option, "no-such-option");
    let port = "run --name a --memory 1G --kernel /bin/true -- -nic user,hostfwd=tcp::80-:80";
    assert_refused(&host, port, "Port 80 is for root");
}

#[test]
fn processes_that_are_no_vm_are_refused() {
    let host = Host::new();
    assert_refused(&host, "attach --name a --pid 999999999", "999999999");
    assert_refused(&host, "attach --name a --pid 0", "0");
    let own = std::process::id();
    assert_refused(&host, &format!("attach --name a --pid {own}"), "QMP");
    let socket = host.directory().join("no.sock").display().to_string();
    assert_refused(&host, &format!("attach --name a --pid {own} --qmp {socket}"), &socket);
}

#[test]
fn another_vms_control_socket_is_refused() {
    let host = Host::new();
    let vm = host.qemu(Guest::debian("6.1-cloud").memory("512M"));
    let socket = vm.own_qmp_socket().display().to_string();
    let line = format!("attach --name a --pid {} --qmp {socket}", std::process::id());
    let why = host.ebb(&line).refused();
    assert!(why.contains(&vm.pid().to_string()), "{why}");
    assert!(host.list().is_empty());
    assert_eq!(vm.guest("ping"), "done");
}

#[test]
fn a_control_socket_that_does_not_greet_says_why() {
    let host = Host::new();
    let vm = host.qemu(Guest::debian("6.1-cloud").memory("512M"));
    let attach = |socket: &Path| {
        let socket = socket.display();
        host.ebb(&format!("attach --name a --pid {} --qmp {socket}", vm.pid())).refused()
    };
    let client = Qmp::connect(&vm.own_qmp_socket()).expect("QMP");
    let why = attach(&vm.own_qmp_socket());
    assert!(why.contains("one client at a time"), "{why}");
    drop(client);
    // The socket of the guest's console.
    let why = attach(&vm.own_qmp_socket().with_file_name("console.sock"));
    assert!(why.contains("-qmp"), "{why}");
    assert!(host.list().is_empty());
    assert_eq!(vm.guest("ping"), "done");
}

#[test]
fn a_name_that_is_taken_is_refused() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M"));
    let why = host.ebb("run --name vm0 --memory 1G --kernel /bin/true").refused();
    assert!(why.contains("vm0"), "{why}");
    assert_eq!(host.list().len(), 1);
    assert_eq!(vm.status().pid, vm.pid());
}

#[test]
fn a_guest_of_unknown_kind_is_managed_but_not_reclaimed() {
    // Without a kernel, the VM stays in the firmware.
    let host = Host::new();
    host.ebb("run --name bare --memory 256M -- -boot menu=on").ok();
    let why = host.ebb("reclaim bare").refused();
    assert!(why.contains("not trusted"), "{why}");
    assert!(!host.list()[0].trusted);
    host.ebb("detach bare").ok();
}

#[test]
fn without_qemu_it_says_what_to_install() {
    let host = Host::new();
    let mut command = host.command("ebb");
    command.args(["run", "--name", "a", "--memory", "1G", "--kernel", "/bin/true"]);
    let why = Ran::of(command.env("PATH", "/nonexistent")).refused();
    assert!(why.contains("qemu-system-x86"), "{why}");
    assert_untouched(&host);
}

#[test]
fn without_privilege_it_asks_for_root() {
    let host = Host::new();
    host.start();
    // Others may look for the socket, and may not use it.
    for directory in [host.directory(), &host.run_directory()] {
        let mut permissions = fs::metadata(directory).unwrap().permissions();
        permissions.set_mode(permissions.mode() | 0o055);
        fs::set_permissions(directory, permissions).unwrap();
    }
    let mut command = host.command("ebb");
    let why = Ran::of(command.arg("list").uid(65534).gid(65534)).refused();
    assert!(why.contains("root"), "{why}");
    assert_untouched(&host);
}

#[test]
fn a_daemon_with_settings_that_cannot_be_does_not_start() {
    for (name, value, reason) in [
        ("EBB_HEAT_WINDOW_MS", "199", "give 200 or more"),
        ("EBB_HEAT_WINDOWS", "0", "needs 1 to 250 windows"),
        ("EBB_HEAT_PERIOD_S", "4", "do not fit into a period of 4s"),
        ("EBB_MOVE_RATE", "1M", "give 16 MiB or more, or 0"),
        ("EBB_COMPRESSED", "64K", "give 1 MiB or more, or 0"),
    ] {
        let host = Host::new();
        host.set(name, value);
        let why = Ran::of(&mut host.command("ebbd")).refused();
        assert!(why.contains(reason), "{name}={value}: {why}");
        assert_eq!(host.daemon(), None);
    }
}
