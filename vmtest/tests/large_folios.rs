//! Huge pages in a VM of small ones: before Ebb held it, or by a setting of the host that changes
//! while it runs.

use vmtest::{Guest, Host, HostSetting, Vm, require, rounds, until};

const MIB: u64 = 1 << 20;

fn evict_and_check(vm: &Vm) {
    for _ in 0..rounds(2, 30) {
        vm.ebb("evict --bytes 512M").ok();
        assert_eq!(vm.guest("check a"), "0");
    }
}

/// Every mapping of the guest's RAM in QEMU.
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

/// `ebb doctor --fix` allows huge pages, for one.
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

#[test]
fn a_vm_that_is_in_large_folios_lives_within_its_limit() {
    let folios = HostSetting::shared_folios(64);
    require!(folios.as_ref());
    let vm = Host::new().qemu(Guest::debian("6.1-cloud").memory("512M").mode("release"));
    vm.guest("fill a 200M");
    vm.attach();
    assert_no_huge_pages(&vm);
    let huge_pages = HostSetting::shared_huge_pages();
    require!(huge_pages.as_ref());
    vm.ebb("limit 150M").ok();
    until("the limit to hold", || (vm.host_bytes() <= 150 * MIB).then_some(()));
    assert_eq!(vm.guest("check a"), "0");
    evict_and_check(&vm);
    vm.ebb("limit off").ok();
    vm.detach();
    assert_eq!(vm.guest("check a"), "0");
}
