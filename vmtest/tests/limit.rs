//! A guest that uses more memory than the host gives it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use ebb_api::LimitStatus;
use ebb_sys::pagemap::Pagemap;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use vmtest::{Disk, Guest, Host, HostSetting, Vm, assets, require, until, until_fits};

const MIB: u64 = 1 << 20;
/// Memory that the guest touches before the evicting threads get their turn.
const SLACK_BYTES: u64 = 48 * MIB;
/// Refill threads of a VM of which something was evicted.
const REFILL_THREADS: usize = 16;

fn limit(vm: &Vm, mib: u64) {
    vm.ebb(&format!("limit {mib}M")).ok();
    until("the limit to hold", || (vm.host_bytes() <= mib * MIB).then_some(()));
}

#[test]
fn a_guest_lives_within_its_limit() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").memory("1G"));
    limit(&vm, 200);
    vm.guest("fill a 400M");
    for _ in 0..3 {
        assert_eq!(vm.guest("check a"), "0");
        assert!(vm.host_bytes() <= 200 * MIB + SLACK_BYTES);
    }
    let status = vm.status().limit;
    assert!(status.saved_bytes > 200 * MIB && status.ahead_hit_total_bytes > 0, "{status:?}");
    vm.ebb("limit off").ok();
    vm.detach();
    assert_eq!(vm.guest("check a"), "0");
}

/// A kernel thread of QEMU's empties QEMU's page table, for the limit and for monitorings.
#[test]
fn a_limit_holds_by_a_ring_in_qemu() {
    let host = Host::new();
    host.set("EBB_FORGET_BY", "ring");
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").backing("small"));
    limit(&vm, 100);
    vm.guest("fill a 200M");
    let threads = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", vm.pid())).expect("it runs").flatten();
        let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        names.collect::<Vec<String>>()
    };
    let is_there = || threads().iter().any(|name| name.starts_with("iou-sqp"));
    until("a ring", || {
        assert_eq!(vm.guest("check a"), "0");
        (is_there() || host.log().contains("injected calls empty")).then_some(())
    });
    let log = host.log();
    let why = log.lines().find(|line| line.contains("injected calls empty"));
    require!(why.map_or(Ok(()), Err));
    let descriptors = Process::open(vm.pid()).and_then(|process| process.descriptors());
    let descriptors = descriptors.expect("it runs");
    assert!(descriptors.iter().all(|(_, link)| !link.contains("io_uring")), "{descriptors:?}");
    host.kill9();
    until("the ring to end with its process", || (!is_there()).then_some(()));
    host.start();
    assert_eq!(vm.guest("check a"), "0");
    vm.ebb("limit off").ok();
    vm.detach();
    until("the ring to end with its process", || (!is_there()).then_some(()));
    assert_eq!(vm.guest("check a"), "0");
}

/// Waits until this many threads have the name. A new thread names itself once it has a processor.
fn wait_threads(host: &Host, name: &str, count: usize) {
    let wanted = format!("{count} threads named {name}");
    until_fits(wanted, || host.threads(name), |&found| found == count);
}

/// Refill threads cost memory, so they begin with the first eviction.
#[test]
fn refill_threads_come_with_the_first_eviction() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").memory("1G"));
    vm.ebb("limit 900M").ok();
    wait_threads(&host, "fault", 1);
    assert_eq!(host.threads("refill"), 0);
    vm.guest("fill a 400M");
    limit(&vm, 200);
    assert_eq!(vm.guest("check a"), "0");
    wait_threads(&host, "refill", REFILL_THREADS);
    host.kill9();
    host.start();
    wait_threads(&host, "refill", REFILL_THREADS);
    assert_eq!(vm.guest("check a"), "0");
}

/// Of the guest's RAM in QEMU, in KiB: what is mapped by huge pages, and what gets no more of them.
fn in_huge_pages(vm: &Vm) -> (u64, u64) {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", vm.pid())).unwrap();
    let (mut is_ram, mut huge, mut small, mut size) = (false, 0, 0, 0);
    for line in smaps.lines() {
        let kib = || line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        match line.split_whitespace().next() {
            Some("Size:") => size = kib(),
            Some("ShmemPmdMapped:") if is_ram => huge += kib(),
            Some("VmFlags:") if is_ram && line.contains(" nh") => small += size,
            Some(word) if word.contains('-') => is_ram = line.contains("/memfd:"),
            _ => {}
        }
    }
    (huge, small)
}

/// Number of the guest's frames that QEMU has mapped, and how many of them are in large folios.
fn in_large_folios(vm: &Vm) -> (u64, u64) {
    let process = Process::open(vm.pid()).unwrap();
    let is_large = |frame: u64| {
        let mut flags = [0; 8];
        let file = File::open("/proc/kpageflags").unwrap();
        file.read_exact_at(&mut flags, frame * 8).unwrap();
        // KPF_COMPOUND_HEAD and KPF_COMPOUND_TAIL.
        u64::from_ne_bytes(flags) & (1 << 15 | 1 << 16) != 0
    };
    let (mut all, mut large) = (0, 0);
    for vma in process.mappings().unwrap().iter().filter(|vma| vma.name.starts_with("/memfd:")) {
        let range = HvaRange { start: vma.start, bytes: vma.bytes };
        let pagemap = Pagemap::open(&process).unwrap();
        let saw = |_, frame| (all, large) = (all + 1, large + u64::from(is_large(frame)));
        pagemap.frames(range, saw).unwrap();
    }
    (all, large)
}

/// What a new process finds evicted of an ended one is not read for it.
fn reads_nothing_for_a_new_process(kernel: &str) {
    let vm = Host::new().run(Guest::debian(kernel).memory("512M").backing("small"));
    vm.guest("fill a 250M");
    vm.wait_trusted();
    limit(&vm, 150);
    let before = vm.status().limit;
    vm.guest("free a");
    vm.guest("fill b 250M");
    let after = vm.status().limit;
    assert_eq!(vm.guest("check b"), "0");
    let unread =
        |limit: &LimitStatus| limit.false_reads_avoided_total_bytes + limit.dropped_total_bytes;
    let unread_bytes = unread(&after) - unread(&before);
    let read_bytes = after.refilled_total_bytes - before.refilled_total_bytes;
    eprintln!("{kernel}: {unread_bytes} bytes were not read, {read_bytes} were");
    assert!(unread_bytes > 50 * MIB && read_bytes < unread_bytes / 2, "{before:?}\n{after:?}");
}

#[test]
fn nothing_is_read_for_a_new_process_on_5_10() {
    require!(assets::kernel("5.10"));
    reads_nothing_for_a_new_process("5.10");
}

#[test]
fn nothing_is_read_for_a_new_process_on_6_12() {
    require!(assets::kernel("6.12"));
    reads_nothing_for_a_new_process("6.12");
}

#[test]
fn nothing_is_read_for_a_new_process_on_7() {
    require!(assets::kernel("7.x"));
    reads_nothing_for_a_new_process("7.x");
}

/// Memory that was refilled for a read is evicted again without being saved again.
#[test]
fn pages_that_are_only_read_are_saved_once() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").memory("512M").backing("small"));
    vm.guest("fill a 200M");
    limit(&vm, 150);
    assert_eq!(vm.guest("check a"), "0");
    let before = vm.status().limit;
    for _ in 0..2 {
        assert_eq!(vm.guest("check a"), "0");
    }
    let after = vm.status().limit;
    let saved_bytes = after.saved_total_bytes - before.saved_total_bytes;
    let clean_bytes = after.clean_total_bytes - before.clean_total_bytes;
    // Frames that are evicted for the first time make the file larger, for example the kernel's own
    // memory at rest.
    let again_bytes = saved_bytes.saturating_sub(after.swap_file_bytes - before.swap_file_bytes);
    eprintln!(
        "{saved_bytes} bytes were saved, {again_bytes} of them again, {clean_bytes} were not"
    );
    assert!(clean_bytes > 150 * MIB && again_bytes < clean_bytes / 8, "{before:?}\n{after:?}");
    // Now all memory that was refilled for reads is written.
    vm.guest("refill a");
    assert_eq!(vm.guest("check a"), "0");
    assert_eq!(vm.guest("check a"), "0");
    vm.detach();
    assert_eq!(vm.guest("check a"), "0");
}

/// Memory that the guest has freed contains nothing that could be missed.
#[test]
fn freed_memory_is_not_saved() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").memory("1G"));
    vm.guest("fill a 600M");
    vm.guest("free a");
    limit(&vm, 150);
    let status = vm.status().limit;
    assert!(status.empty_total_bytes > 400 * MIB, "{status:?}");
    assert!(status.saved_total_bytes < 100 * MIB, "{status:?}");
    vm.guest("fill a 100M");
    assert_eq!(vm.guest("check a"), "0");
}

#[test]
fn no_byte_is_lost_when_the_daemon_dies_under_pressure() {
    loses_nothing_when_the_daemon_dies("small");
}

fn loses_nothing_when_the_daemon_dies(backing: &str) {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").memory("1G").backing(backing));
    vm.guest("fill kept 100M");
    vm.guest("files f 50M");
    limit(&vm, 200);
    vm.churn("300M");
    for _ in 0..8 {
        vm.churn_on(1);
        host.kill9();
        host.start();
        // Faults wait for room before anybody has looked at the VM.
        assert!(vm.host_bytes() <= 200 * MIB + SLACK_BYTES);
    }
    vm.churn_on(1);
    assert_eq!(vm.churn_stop().wrong_bytes, 0);
    assert!(vm.host_bytes() <= 200 * MIB + SLACK_BYTES);
    assert_eq!(vm.guest("check kept"), "0");
    assert_eq!(vm.guest("checkfiles f"), "0");
}

#[test]
fn a_limit_that_makes_no_sense_changes_nothing() {
    let vm = Host::new().run(Guest::debian("6.1-cloud").memory("1G"));
    let why = vm.ebb("limit 10M").refused();
    assert!(why.contains("keeps this guest alive"), "{why}");
    let why = vm.ebb("limit 1G").refused();
    assert!(why.contains("limits nothing"), "{why}");
    vm.ebb("limit much").refused();
    let why = vm.ebb("limit 200M --low 20M").refused();
    assert!(why.contains("a low mark of 20 MiB is below what keeps this guest alive"), "{why}");
    let why = vm.ebb("limit 200M --low 190M --high 180M").refused();
    assert!(why.contains("not below 180 MiB"), "{why}");
    assert_eq!(vm.status().limit.bytes, None);
}

#[test]
fn eviction_goes_down_to_the_low_mark_also_after_a_restart() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").memory("1G"));
    vm.ebb("limit 400M --low 200M --high 300M").ok();
    vm.guest("fill a 500M");
    for _ in 0..2 {
        until("relief", || (vm.host_bytes() <= 200 * MIB).then_some(()));
        let status = vm.status().limit;
        let marks = (status.bytes, status.high_bytes, status.low_bytes);
        assert_eq!(marks, (Some(400 * MIB), Some(300 * MIB), Some(200 * MIB)));
        assert_eq!(vm.guest("check a"), "0");
        host.kill9();
        host.start();
    }
    // Each limit has marks of its own.
    vm.ebb("limit 400M").ok();
    let status = vm.status().limit;
    assert!(status.low_bytes > Some(370 * MIB), "{status:?}");
    assert!(status.low_bytes < status.high_bytes && status.high_bytes < status.bytes);
}

/// Tests that change a setting of the host, or whose time counts: no other test runs beside them.
mod alone {
    use super::*;

    /// Metadata of its new kernel is evicted before anybody knows what it is.
    #[test]
    fn a_guest_reboots_within_its_limit() {
        let vm = Host::new().run(Guest::debian("6.1-cloud").memory("512M").backing("small"));
        limit(&vm, 100);
        vm.guest("fill a 300M");
        assert_eq!(vm.guest("check a"), "0");
        vm.reboot();
        // QEMU does not answer while a fault of one of its threads waits for room. A daemon that
        // meanwhile waits for QEMU spends its budget of searches on that.
        until("trust in the guest", || {
            let guest = vm.status().guest;
            assert!(!guest.why.as_deref().unwrap_or_default().contains("too often"), "{guest:?}");
            guest.trusted.then_some(())
        });
        assert!(vm.host_bytes() <= 100 * MIB + SLACK_BYTES);
        vm.guest("fill b 200M");
        assert_eq!(vm.guest("check b"), "0");
    }

    /// Memory in huge pages stays in them where all of it is used, and is evicted frame by frame where
    /// it is not.
    #[test]
    fn huge_pages_are_broken_up_where_the_limit_asks_for_it() {
        let setting = HostSetting::shared_huge_pages();
        require!(setting.as_ref());
        let host = Host::new();
        let vm = host.run(Guest::debian("6.1-cloud").memory("1G").backing("thp"));
        vm.ebb("limit 600M").ok();
        vm.guest("fill a 400M");
        let (huge, small) = in_huge_pages(&vm);
        assert!(huge > 300 << 10 && small == 0, "{huge}, {small}");
        limit(&vm, 200);
        for _ in 0..3 {
            assert_eq!(vm.guest("check a"), "0");
            assert!(vm.host_bytes() <= 200 * MIB + SLACK_BYTES);
            // The next daemon does not know what was broken up.
            host.kill9();
            host.start();
        }
        assert!(vm.status().limit.saved_bytes > 100 * MIB);
        let (_, small) = in_huge_pages(&vm);
        assert!(small > 0);
        vm.ebb("limit off").ok();
        assert_eq!(vm.guest("check a"), "0");
        vm.detach();
        assert_eq!(vm.guest("check a"), "0");
        // QEMU has its memory mapped in pieces by now.
        let (pid, qmp) = (vm.pid(), vm.qmp_socket());
        host.ebb(&format!("attach --name {} --pid {pid} --qmp {}", vm.name(), qmp.display())).ok();
        limit(&vm, 200);
        assert_eq!(vm.guest("check a"), "0");
    }

    /// Ebb's disks also have the guest's memory mapped, and the kernel splits nothing that two
    /// processes map.
    #[test]
    fn huge_pages_that_a_disk_of_ebb_uses_are_broken_up() {
        let setting = HostSetting::shared_huge_pages();
        require!(setting.as_ref());
        let host = Host::new();
        let disk = Disk::new(&host, "disk", "512M").formatted("ext4");
        let guest = Guest::debian("6.1-cloud").memory("1G").backing("thp").own_disk(&disk);
        let vm = host.run(guest);
        vm.guest("mount ext4 /dev/vda /mnt");
        vm.guest("files a 200M /mnt");
        vm.guest("sh busybox sync");
        vm.guest("fill b 300M");
        limit(&vm, 200);
        for _ in 0..3 {
            assert_eq!((vm.guest("checkfiles a"), vm.guest("check b")), ("0".into(), "0".into()));
            assert!(vm.host_bytes() <= 200 * MIB + SLACK_BYTES);
        }
        let (all, large) = in_large_folios(&vm);
        assert!(all > 10_000 && large < all / 4, "{large} of {all} frames");
    }

    #[test]
    fn no_byte_is_lost_in_huge_pages_when_the_daemon_dies_under_pressure() {
        let setting = HostSetting::shared_huge_pages();
        require!(setting.as_ref());
        loses_nothing_when_the_daemon_dies("thp");
    }
}
