//! The users of QEMUs that Ebb starts, and what these QEMUs cannot do.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ebb_vm::Qmp;
use serde_json::json;
use vmtest::{Disk, Guest, Host, Vm, require, until};

const MIB: u64 = 1 << 20;
/// Range of QEMUs' users.
const USERS: Range<u32> = 0x7000_0000..0x7ffe_0000;
/// A user without privileges.
const NOBODY: u32 = 65534;
const SECRET: &str = "only root is to read this";

fn guest() -> Guest {
    Guest::debian("6.1-cloud").memory("512M")
}

/// The fields of `/proc/PID/status`.
fn about(pid: i32) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let word = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    lines.map(|(key, value)| (key.to_owned(), word(value))).collect()
}

fn assert_confined(vm: &Vm) {
    let about = about(vm.pid());
    let user: u32 =
        about["Uid"].split(' ').next().and_then(|uid| uid.parse().ok()).expect("a user");
    assert!(USERS.contains(&user), "{user}");
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
    assert_eq!(core.split_whitespace().nth(4), Some("1"), "{core}");
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

/// The control group of a process in a hierarchy of version 1 or 2 that has this controller.
fn control_group(pid: i32, controller: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it runs");
    let mut lines = text.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        rest.split_once(':')
    });
    let one = lines.clone().find(|(all, _)| all.split(',').any(|word| word == controller));
    let found = one.or_else(|| lines.find(|(all, _)| all.is_empty()));
    found.map(|(_, path)| path.to_owned()).unwrap_or_default()
}

/// Only root may read its kernel and its RAM disk, which are files, and all of its directory.
#[test]
fn a_qemu_has_a_user_of_its_own_and_nothing_else() {
    let host = Host::new();
    host.set("EBB_TEST_SECRET", SECRET);
    let disk = Disk::new(&host, "disk", "64M");
    let mut guest = guest();
    guest.own_boot_files(host.directory(), 0o600);
    let vm = host.run(guest.clone().own_disk(&disk));
    assert_confined(&vm);
    assert_has_only_what_it_needs(&vm, &host);
    let confinement = vm.status().confinement.expect("Ebb started it");
    assert!(!confinement.privileged && confinement.sandbox, "{confinement:?}");
    assert!(
        about(vm.pid())["Uid"].starts_with(&format!("{} ", confinement.uid)),
        "{confinement:?}"
    );

    host.kill9();
    host.start();
    assert_eq!(vm.status().confinement.map(|now| now.uid), Some(confinement.uid));

    let console = host.find("ebb-console").expect("it stands before the VM's console");
    assert_eq!(privileges(console), ["1", "2", FILES, FILES]);
    let other = host.run(guest);
    assert_ne!(about(vm.pid())["Uid"], about(other.pid())["Uid"]);
    assert_confined(&other);
    // A detached one is found again, though its command line names no socket.
    let was = other.status();
    other.detach();
    host.ebb(&format!("attach --name {} --pid {}", other.name(), other.pid())).ok();
    let assert_known = || {
        let now = other.status();
        assert_eq!(now.pid, other.pid());
        assert_eq!((now.console, now.console_log), (was.console.clone(), was.console_log.clone()));
        assert!(was.console.is_some() && was.confinement.is_some());
        assert_eq!(now.confinement, was.confinement);
        let text = other.ebb("status --verbose").ok();
        for line in ["\n  console       tail -f ", "\n  QEMU          user "] {
            assert!(text.contains(line), "{text}");
        }
    };
    assert_known();
    assert_confined(&other);
    host.kill9();
    host.start();
    assert_known();
}

/// It keeps to the limits of its group, and nothing is left of the group afterwards.
#[test]
fn a_qemu_is_in_a_control_group_of_its_own() {
    let host = Host::new();
    let vm = host.run(guest());
    let confinement = vm.status().confinement.expect("Ebb started it");
    if let Some(why) = confinement.lacks.iter().find(|why| why.contains("control group")) {
        require!(Err::<(), _>(why.clone()));
    }
    let maker = host.servers()[0];
    let assert_inside = || {
        let server = host.servers()[0];
        for (pid, below) in [(vm.pid(), "qemu"), (server, "ebb")] {
            for controller in ["memory", "pids"] {
                let (group, ours) =
                    (control_group(pid, controller), format!("/ebb/{}.{maker}/{below}", vm.name()));
                assert!(group.ends_with(&ours), "{controller}: {group}");
            }
        }
        assert_few_privileges(server);
    };
    assert_inside();
    // The next process enters the group, too.
    host.kill9();
    host.start();
    assert_inside();
    let of_vm: Vec<&Path> = confinement.cgroups.iter().filter_map(|group| group.parent()).collect();
    let limit = |names: [&str; 2]| -> u64 {
        let mut files = of_vm.iter().flat_map(|group| names.map(|name| group.join(name)));
        let text = files.find_map(|file| fs::read_to_string(file).ok()).expect("a limit");
        text.trim().parse().expect("a number")
    };
    let most = limit(["memory.max", "memory.limit_in_bytes"]);
    assert!((512 * MIB..4096 * MIB).contains(&most), "{most}");
    assert!(limit(["pids.max", "pids.max"]) < 2048);
    vm.power_off();
    until("the VM to be forgotten", || host.list().is_empty().then_some(()));
    until("its groups to go", || of_vm.iter().all(|group| !group.exists()).then_some(()));
    // A group that a detached VM with this name left does not matter.
    confinement
        .cgroups
        .iter()
        .for_each(|group| fs::create_dir_all(group).expect("a control group"));
    host.ebb("run --name vm0 --memory 64M -- -S").ok();
    let again =
        host.list().into_iter().find(|vm| vm.name.as_str() == "vm0").expect("it is managed");
    let (group, ours) = (control_group(again.pid, "pids"), host.servers()[0]);
    assert!(group.ends_with(&format!("/ebb/vm0.{ours}/qemu")), "{group}");
}

/// Each thread of a VM's process has only the capabilities and the calls that serving needs.
fn assert_few_privileges(server: i32) {
    // DAC_OVERRIDE, DAC_READ_SEARCH, KILL, IPC_LOCK, SYS_PTRACE, SYS_ADMIN and SYS_NICE.
    const SERVING: u64 = 0x00a8_4026;
    let tasks = fs::read_dir(format!("/proc/{server}/task")).expect("it runs");
    for task in tasks.flatten() {
        // It may have ended since it was listed.
        let Ok(text) = fs::read_to_string(task.path().join("status")) else { continue };
        let field = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            line.unwrap_or_default().trim().to_owned()
        };
        let name = field("Name");
        for set in ["CapPrm", "CapEff", "CapBnd"] {
            let has = u64::from_str_radix(&field(set), 16).expect("a mask");
            assert_eq!(has & !SERVING, 0, "{name}: {set}: {has:x}");
        }
        let bounds = ["Seccomp", "NoNewPrivs"].map(field);
        assert_eq!(bounds, ["2", "1"], "{name}");
    }
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

fn secret(host: &Host, bytes: usize) -> PathBuf {
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

/// A migration by `exec:` starts a program, long after QEMU was started.
#[test]
fn a_qemu_that_its_filter_ended_is_reported() {
    let host = Host::new();
    let place = host.directory().join("open");
    fs::create_dir(&place).expect("a directory");
    fs::set_permissions(&place, fs::Permissions::from_mode(0o777)).expect("its own file");
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

/// CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
const FILES: &str = "0000000000000006";

fn privileges(pid: i32) -> [String; 4] {
    let about = about(pid);
    ["NoNewPrivs", "Seccomp", "CapEff", "CapBnd"].map(|name| about[name].clone())
}

/// `SYS_MODULE` and `SYS_BOOT`, as bits.
const NEVER_NEEDED: u64 = 1 << 16 | 1 << 22;

#[test]
fn the_daemon_and_its_helpers_give_up_what_they_never_need() {
    let host = Host::new();
    host.start();
    let daemon = host.daemon().expect("a daemon runs");
    let status = about(daemon);
    assert_eq!(status["NoNewPrivs"], "1");
    for set in ["CapEff", "CapPrm", "CapBnd"] {
        let bits = u64::from_str_radix(&status[set], 16).expect("bits");
        assert_eq!(bits & NEVER_NEEDED, 0, "{set}: {bits:#x}");
        assert_ne!(bits, 0, "{set}");
    }
    let limits = fs::read_to_string(format!("/proc/{daemon}/limits")).expect("it runs");
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).expect("a limit");
    assert_eq!(core.split_whitespace().nth(4), Some("1"), "{core}");

    let mut disk = Disk::new(&host, "disk", "64M");
    disk.start();
    assert_eq!(privileges(disk.pid()), ["1", "2", FILES, FILES]);
    let relay = Helper::relay(&host);
    let none = "0000000000000000";
    assert_eq!(privileges(relay.0.id() as i32), ["1", "2", none, none]);
}

/// A subcommand of `ebbd`, killed when this is dropped.
struct Helper(Child);

impl Helper {
    fn relay(host: &Host) -> Helper {
        let socket = host.directory().join("front.sock");
        let mut command = Command::new(vmtest::assets::program_directory().join("ebbd"));
        command.arg("relay").arg("--socket").arg(&socket).stderr(Stdio::null());
        command.arg("--device").arg(host.directory().join("back.sock"));
        let relay = Helper(command.spawn().expect("ebbd starts"));
        let filtered = || about(relay.0.id() as i32)["Seccomp"] == "2";
        until("a relay", || (socket.exists() && filtered()).then_some(()));
        relay
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process's files in /proc belong to its user if it may be dumped, else to root.
#[test]
fn there_is_no_core_dump_of_what_serves_a_vm() {
    let host = Host::new();
    let path = |name: &str| host.directory().join(name);
    let image = path("disk.img");
    fs::File::create(&image).and_then(|file| file.set_len(MIB)).expect("an image");
    fs::create_dir(path("open")).expect("a directory");
    for (file, mode) in [(image.clone(), 0o666), (path("open"), 0o777)] {
        fs::set_permissions(file, fs::Permissions::from_mode(mode)).expect("its own file");
    }
    let socket = path("open").join("disk.sock");
    let mut command = Command::new(vmtest::assets::program_directory().join("ebbd"));
    command.arg("disk").arg("--socket").arg(&socket).arg("--image").arg(&image);
    let server = command.uid(NOBODY).gid(NOBODY).stderr(Stdio::null()).spawn();
    let server = Helper(server.expect("ebbd starts"));
    until("a disk to be served", || socket.exists().then_some(()));
    let pid = server.0.id() as i32;
    assert!(about(pid)["Uid"].starts_with(&NOBODY.to_string()));
    let owner = fs::metadata(format!("/proc/{pid}/maps")).expect("it runs").uid();
    assert_eq!(owner, 0);
}

#[test]
fn a_daemon_is_killed_later_than_others_and_its_qemus_are_not() {
    let host = Host::new();
    let vm = host.run(guest());
    let score = |pid: i32| -> i32 {
        let text = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("it runs");
        text.trim().parse().expect("a number")
    };
    assert_eq!(score(vm.pid()), 0);
    let may = u64::from_str_radix(&about(std::process::id() as i32)["CapEff"], 16).expect("bits");
    let resource = (may >> 24) & 1 == 1;
    require!(if resource { Ok(()) } else { Err("it takes CAP_SYS_RESOURCE, which is not here") });
    assert_eq!(score(host.daemon().expect("a daemon runs")), -900);
}

/// What is on a disk may stay there for ever.
#[test]
fn a_run_directory_on_a_disk_holds_keys_only_if_allowed() {
    let host = Host::new();
    require!(if host.is_on_disk() { Ok(()) } else { Err("temporary files are in memory") });
    host.set("EBB_ALLOW_KEYS_ON_DISK", "false");
    let why = host.ebb("run --name a --memory 64M --kernel /bin/true").refused();
    assert!(why.contains("--allow-keys-on-disk"), "{why}");
    let vm = host.qemu(guest());
    let why = vm.try_attach().refused();
    assert!(why.contains("--allow-keys-on-disk"), "{why}");
    assert!(host.list().is_empty());
}
