//! Huge pages in a VM of small ones: from before Ebb managed it, or by a setting of the host that
//! changes while it runs.

use std::os::fd::AsRawFd;

use ebb_api::Backing;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vmtest::{Guest, Host, HostSetting, Vm, require, rounds, until};

const MIB: u64 = 1 << 20;

fn evict_and_check(vm: &Vm) {
    for _ in 0..rounds(2, 30) {
        vm.ebb("evict --bytes 512M").ok();
        assert_eq!(vm.guest("check a"), "0");
    }
}

/// Checks every mapping of the guest's RAM in QEMU.
fn assert_no_huge_pages(vm: &Vm) {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", vm.pid())).unwrap();
    let is_head = |line: &&str| line.contains("/memfd:") && !line.contains("/memfd:ebb-boot");
    let heads = smaps.lines().filter(is_head).count();
    let mut flags = Vec::new();
    let mut of_ram = false;
    for line in smaps.lines() {
        match line.strip_prefix("VmFlags:") {
            Some(line) if of_ram => flags.push(line),
            Some(_) => {}
            None if line.split(' ').next().is_some_and(|word| word.contains('-')) => {
                of_ram = is_head(&line);
            }
            None => {}
        }
    }
    assert!(heads > 0 && flags.len() == heads, "{heads} mappings of RAM");
    assert!(flags.iter().all(|flags| flags.split(' ').any(|flag| flag == "nh")), "{flags:?}");
}

/// `ebb doctor --fix`, for example, allows huge pages.
#[test]
fn a_setting_that_changes_brings_none() {
    let host = Host::new();
    let vm = host.run(Guest::debian("6.1-cloud").memory("512M").backing("small"));
    let settings = [HostSetting::shared_huge_pages(), HostSetting::shared_folios(64)];
    for setting in &settings {
        require!(setting.as_ref());
    }
    assert_no_huge_pages(&vm);
    vm.guest("fill a 200M");
    evict_and_check(&vm);
    // As after a daemon that did not know of it: its record says nothing.
    host.kill9();
    let record = host.run_directory().join("vms").join(vm.name()).join("vm.json");
    let text = std::fs::read_to_string(&record).unwrap();
    assert!(text.contains("\"small_pages\": true"), "{text}");
    std::fs::write(&record, text.replace("\"small_pages\": true", "\"small_pages\": false"))
        .unwrap();
    host.start();
    let again = || std::fs::read_to_string(&record).unwrap().contains("\"small_pages\": true");
    until("QEMU to be told again", || again().then_some(()));
    evict_and_check(&vm);
}

/// Number of huge pages that the kernel has allocated for shared memory so far.
fn huge_pages_given() -> u64 {
    let path = "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/stats/shmem_alloc";
    let text = std::fs::read_to_string(path).expect("the kernel counts them");
    text.trim().parse().expect("a number")
}

/// QEMU's own memfd backend is not aligned, so its RAM never is in huge pages. One that somebody
/// else made is.
#[test]
fn a_vm_that_is_in_large_folios_lives_within_its_limit() {
    let huge_pages = HostSetting::shared_huge_pages();
    require!(huge_pages.as_ref());
    let memfd = memfd_create("ram", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&memfd, 512 * MIB).expect("its size");
    let path = format!("/proc/{}/fd/{}", std::process::id(), memfd.as_raw_fd());
    let ram = format!("file,mem-path={path},share=on,align=2M");
    let guest = Guest::debian("6.1-cloud").memory("512M").mode("release");
    let before = huge_pages_given();
    let vm = Host::new().qemu(guest.ram(ram));
    vm.guest("fill a 200M");
    let given = huge_pages_given() - before;
    assert!(given * 2 * MIB >= 200 * MIB, "its RAM is in {given} huge pages");
    // Ebb takes it for a VM of small pages: the host has no others when it is attached, and has
    // them again later.
    let none = HostSetting::no_shared_huge_pages();
    require!(none.as_ref());
    vm.attach();
    drop(none);
    assert_eq!(vm.status().backing, Backing::Small);
    assert_no_huge_pages(&vm);
    vm.ebb("limit 150M").ok();
    until("the limit to hold", || (vm.host_bytes() <= 150 * MIB).then_some(()));
    assert_eq!(vm.guest("check a"), "0");
    evict_and_check(&vm);
    vm.ebb("limit off").ok();
    vm.detach();
    assert_eq!(vm.guest("check a"), "0");
}

/// QEMU can be told to place RAM so that each huge frame of the guest has parts of two huge pages.
#[test]
fn ram_where_huge_pages_do_not_fit_is_in_small_pages() {
    let setting = HostSetting::shared_huge_pages();
    require!(setting.as_ref());
    let (host, odd) = (Host::new(), "-machine max-ram-below-4g=255M");
    let run = |backing: &str| {
        format!("run --name odd --memory 512M --backing {backing} -- -boot menu=on {odd}")
    };
    let why = host.ebb(&run("thp")).refused();
    assert!(why.contains("give --backing small"), "{why}");
    assert_eq!(host.list().len(), 0);
    host.ebb(&run("small")).ok();
    let vm = host.qemu(Guest::debian("6.1-cloud").memory("512M").qemu_args(odd));
    vm.attach();
    let status = vm.status();
    assert_eq!(status.backing, Backing::Small, "{}", status.backing_reason);
    vm.guest("fill a 300M");
    evict_and_check(&vm);
}
