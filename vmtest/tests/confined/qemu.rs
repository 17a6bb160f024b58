//! A QEMU has a user and a control group of its own, and its guest lives as any other.

use std::fs;
use std::ops::Range;
use std::path::Path;

use vmtest::{Disk, Host, Vm, require, until};

use crate::{FILES, MIB, SECRET, about, guest, privileges};

/// Range of QEMUs' users.
const USERS: Range<u32> = 0x7000_0000..0x7ffe_0000;

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
