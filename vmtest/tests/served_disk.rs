//! Disks served by `ebbd disk`: whatever dies, no byte is lost or wrong.

use std::process::Command;
use std::thread;
use std::time::Duration;

use vmtest::{Disk, Guest, Host, Ran, assets, busy_for, require, rounds};

const FILE_SYSTEMS: [&str; 3] = ["ext4", "xfs", "btrfs"];

fn tools() -> Result<(), String> {
    let missing = ["mkfs.ext4", "mkfs.xfs", "mkfs.btrfs"]
        .into_iter()
        .find(|program| Command::new(program).arg("-V").output().is_err());
    missing.map_or(Ok(()), |program| Err(format!("no {program}: run scripts/setup")))
}

#[test]
fn file_systems_keep_their_files() {
    require!(tools());
    for kind in FILE_SYSTEMS {
        let host = Host::new();
        let mut disk = Disk::new(&host, kind, "512M").formatted(kind).queues(2);
        disk.start();
        let vm = host.qemu(Guest::debian("6.1-cloud").served_disk(&disk));
        vm.guest(&format!("mount {kind} /dev/vda /mnt"));
        vm.guest("files a 60M /mnt");
        vm.guest("files b 20M /mnt");
        vm.guest("umount /mnt");
        vm.guest(&format!("mount {kind} /dev/vda /mnt"));
        assert_eq!(vm.guest("checkfiles a"), "0", "{kind}");
        assert_eq!(vm.guest("checkfiles b"), "0", "{kind}");
        vm.guest("umount /mnt");
        vm.power_off();
        disk.check(kind);
    }
}

#[test]
fn a_readonly_disk_is_read() {
    require!(tools());
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "64M").formatted("ext4").readonly();
    disk.start();
    let vm = host.qemu(Guest::debian("6.1-cloud").served_disk(&disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    assert_eq!(vm.guest("cat /sys/block/vda/ro").trim(), "1");
    let why = vm.try_guest("write /mnt/a text").unwrap_err().0;
    assert!(why.contains("Read-only"), "{why}");
}

#[test]
fn synced_data_outlives_its_vm() {
    require!(tools());
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "64M").formatted("ext4");
    disk.start();
    let vm = host.qemu(Guest::debian("6.1-cloud").served_disk(&disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest("write /mnt/kept the text that is kept");
    vm.guest("fsync /mnt/kept");
    vm.kill();
    // The same server serves the next front end.
    let vm = host.qemu(Guest::debian("6.1-cloud").served_disk(&disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    assert_eq!(vm.guest("cat /mnt/kept"), "the text that is kept");
    vm.guest("umount /mnt");
    vm.power_off();
    disk.check("ext4");
}

/// The device as the guest's kernel sees it.
#[test]
fn the_device_is_what_it_says() {
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "64M").queues(2);
    disk.start();
    let vm = host.qemu(Guest::debian("6.1-cloud").served_disk(&disk));
    let read = |what: &str| vm.guest(&format!("cat /sys/block/vda/{what}")).trim().to_owned();
    assert_eq!(read("queue/logical_block_size"), "4096");
    assert_eq!(read("queue/physical_block_size"), "4096");
    assert_eq!(read("size"), (64 * 2048).to_string());
    assert_eq!(read("queue/write_cache"), "write back");
    assert_ne!(read("queue/discard_max_bytes"), "0");
    assert_ne!(read("queue/write_zeroes_max_bytes"), "0");
    assert!(read("serial").starts_with("ebb-"));
    assert_eq!(vm.guest("disk /dev/vda 32M"), "0");
    vm.guest("write /sys/block/vda/cache_type write through");
    assert_eq!(read("cache_type"), "write through");
    assert_eq!(vm.guest("disk /dev/vda 4M"), "0");
}

#[test]
fn killed_servers_lose_nothing() {
    require!(tools());
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "512M").formatted("ext4").queues(2);
    disk.start();
    let vm = host.qemu(Guest::debian("6.1-cloud").served_disk(&disk));
    vm.guest("mount ext4 /dev/vda /mnt");
    vm.guest("diskchurn load /mnt 24M");
    vm.churn_on(20);
    for round in 0..u64::from(rounds(8, 100)) {
        busy_for(Duration::from_millis(round * 13 % 101));
        disk.kill9();
        disk.start();
        vm.churn_on(10);
    }
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    vm.guest("umount /mnt");
    vm.power_off();
    disk.check("ext4");
}

/// While a guest has no driver for the device, QEMUs before 9.1 do not notice that the server has
/// died: they tell the next one less.
#[test]
fn a_guest_boots_although_its_server_was_killed() {
    for milliseconds in [50, 800] {
        let host = Host::new();
        let mut disk = Disk::new(&host, "disk", "64M");
        disk.start();
        let vm = host.qemu(Guest::debian("6.1-cloud").served_disk(&disk));
        vm.leave("reboot");
        busy_for(Duration::from_millis(milliseconds));
        disk.kill9();
        disk.start();
        vm.wait_boot();
        assert_eq!(vm.guest("disk /dev/vda 4M"), "0");
    }
}

#[test]
fn a_newer_qemu_goes_on_whenever_the_vms_process_is_killed() {
    require!(assets::qemu11());
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "64M");
    let guest = Guest::debian("6.1-cloud").qemu_in(&assets::qemu11().expect("required"));
    let vm = host.run(guest.own_disk(&disk));
    for milliseconds in [50, 800] {
        vm.leave("reboot");
        busy_for(Duration::from_millis(milliseconds));
        host.kill_servers();
        vm.wait_boot();
        assert_eq!(vm.guest("disk /dev/vda 4M"), "0");
        host.kill_servers();
        assert_eq!(vm.guest("disk /dev/vda 4M"), "0");
    }
}

#[test]
fn a_guest_waits_for_its_server() {
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "64M");
    disk.start();
    let vm = host.qemu(Guest::debian("6.1-cloud").served_disk(&disk));
    disk.kill9();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| vm.guest("disk /dev/vda 8M"));
        busy_for(Duration::from_secs(2));
        assert!(!waiting.is_finished(), "there is no disk to write to");
        disk.start();
        assert_eq!(waiting.join().expect("the guest answers"), "0");
    });
}

#[test]
fn an_image_serves_one_at_a_time() {
    let host = Host::new();
    let mut disk = Disk::new(&host, "disk", "64M");
    disk.start();
    let mut second = Command::new(disk.command().get_program());
    second.arg("disk").arg("--socket").arg(host.directory().join("other.sock"));
    let why = Ran::of(second.arg("--image").arg(disk.image())).refused();
    assert!(why.contains("in use"), "{why}");
}

#[test]
fn small_blocks_are_refused_with_the_reason() {
    require!(tools());
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "64M");
    let make = |words: &[&str]| {
        Ran::of(Command::new(words[0]).args(&words[1..]).arg(disk.image())).ok();
        Ran::of(&mut disk.command()).refused()
    };
    let why = make(&["mkfs.ext4", "-q", "-b", "1024"]);
    assert!(why.contains("blocks of 1024 bytes") && why.contains("mkfs.ext4 -b 4096"), "{why}");
    std::fs::File::options().write(true).open(disk.image()).unwrap().set_len(1 << 29).unwrap();
    let why = make(&["mkfs.xfs", "-q", "-f", "-s", "size=512"]);
    assert!(why.contains("xfs with sectors of 512 bytes"), "{why}");
}

/// Two writers of one image would lose what either of them has written.
#[test]
fn no_qemu_opens_an_image_that_ebb_serves() {
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "64M").formatted("ext4");
    let vm = host.run(Guest::debian("6.1-cloud").own_disk(&disk));
    let drive = format!("if=none,id=d,format=raw,file={}", disk.image().display());
    let mut qemu = Command::new("timeout");
    qemu.args(["60", "qemu-system-x86_64", "-nodefaults", "-display", "none", "-S"]);
    qemu.args(["-machine", "q35,accel=tcg", "-drive", &drive, "-device", "virtio-blk-pci,drive=d"]);
    let ran = Ran::of(&mut qemu);
    assert!(ran.code == Some(1) && ran.stderr.contains("lock"), "{:?}: {}", ran.code, ran.stderr);
    vm.guest("mount ext4 /dev/vda /mnt");
}
