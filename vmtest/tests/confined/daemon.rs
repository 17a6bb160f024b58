//! What the daemon and its helpers give up, and what they leave behind.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use vmtest::{Disk, Host, permit, require, until};

use crate::{FILES, MIB, about, guest, privileges};

/// A user without privileges.
const NOBODY: u32 = 65534;
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
        permit(&file, mode);
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
