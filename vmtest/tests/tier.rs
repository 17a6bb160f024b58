//! Tiers of memory: pages that `ebb-tier` moves inside a guest that has two nodes, and VMs with
//! more memory than their fast tier.

use std::fs;

use vmtest::{Guest, Host, assets, require, until, until_fits};

const MIB: u64 = 1 << 20;
/// Memory that the guest touches before the evicting threads get their turn.
const SLACK_BYTES: u64 = 48 * MIB;

fn keeps_every_byte(kernel: &str) {
    let guest = Guest::debian(kernel).memory("512M").slow_node("64M");
    let found = Host::new().qemu(guest).guest("sh /bin/tiers check 4M");
    eprintln!("{kernel}: {found}");
    assert!(found.starts_with("moved "), "{found}");
}

#[test]
fn pages_move_between_nodes_with_every_byte() {
    keeps_every_byte("6.1-cloud");
}

#[test]
fn pages_move_between_nodes_with_every_byte_on_6_12() {
    require!(assets::kernel("6.12"));
    keeps_every_byte("6.12");
}

#[test]
fn pages_move_between_nodes_with_every_byte_on_7() {
    require!(assets::kernel("7.x"));
    keeps_every_byte("7.x");
}

#[test]
fn a_full_node_takes_no_more() {
    let guest = Guest::debian("6.1-cloud").memory("512M").slow_node("24M");
    let found = Host::new().qemu(guest).guest("sh /bin/tiers full 32M");
    assert!(found.contains("no room for "), "{found}");
}

/// A mover of pages dies with all its threads in the middle of its work.
#[test]
fn a_mover_killed_in_mid_exchange_loses_nothing() {
    let guest = Guest::debian("6.1-cloud").memory("512M").slow_node("64M");
    let found = Host::new().qemu(guest).guest("sh /bin/tiers killed 8M");
    eprintln!("{found}");
    assert!(found.starts_with("killed 8, in mid-exchange "), "{found}");
}

#[test]
fn tiers_that_cannot_be_change_nothing() {
    let host = Host::new();
    let mine = host.directory().join("mine");
    fs::write(&mine, "mine").unwrap();
    let slow = host.directory().join("slow");
    let run = |rest: &str| host.ebb(&format!("run --name a --kernel /bin/true {rest}")).refused();
    for (tiers, why) in [
        (format!("dram=128M,file={}:384M", mine.display()), "exists already"),
        (format!("dram=128M,file={}:384M --memory 1G", slow.display()), "must be the same"),
        (format!("dram=32M,file={}:480M", slow.display()), "keeps this guest alive"),
        (format!("node7=128M,file={}:384M", slow.display()), "no such node"),
        (format!("dram=128M,file={}:384M --backing hugetlb", slow.display()), "huge"),
        ("dram=128M,file=slow:384M".into(), "give the whole path"),
        ("tape=512M".into(), "is no tier"),
        ("dram=128M,file=/dev/null/x:128M".into(), "/dev/null"),
        ("node0=128M,node99=128M".into(), "no such node"),
        ("node0=128M,dram=128M".into(), "not both"),
        ("node0=256M".into(), "or another node"),
        (format!("node0=128M,file={}:128M --backing hugetlb", slow.display()), "huge"),
    ] {
        let said = run(&format!("--tier {tiers}"));
        assert!(said.contains(why), "{tiers}: {said}");
        assert!(host.list().is_empty() && !slow.exists(), "{tiers}");
        // A helper may still be ending.
        let is_alone = |all: &Vec<String>| all.iter().all(|name| name == "ebbd");
        let wanted = format!("no process but the daemon after {tiers}");
        until_fits(wanted, || host.processes(), is_alone);
        let records = fs::read_dir(host.run_directory().join("vms")).map(Iterator::count);
        assert_eq!(records.unwrap_or(0), 0, "{tiers}: a record is left");
    }
    assert_eq!(fs::read_to_string(&mine).unwrap(), "mine");
}

/// Tests that change a setting of the host, or whose time counts: no other test runs beside them.
mod alone {
    use super::*;

    #[test]
    fn a_vm_has_more_memory_than_its_fast_tier() {
        let host = Host::new();
        let file = host.directory().join("slow");
        let tiers = format!("dram=160M,file={}:352M", file.display());
        let vm = host.run(Guest::debian("6.1-cloud").memory("512M").tier(&tiers));
        assert_eq!(vm.status().limit.bytes, Some(160 * MIB));
        vm.guest("fill a 300M");
        for _ in 0..2 {
            assert_eq!(vm.guest("check a"), "0");
            assert!(vm.host_bytes() <= 160 * MIB + SLACK_BYTES, "{}", vm.host_bytes());
        }
        let tier = vm.status().tier.expect("tiers");
        assert_eq!((tier.ladder, tier.fast_bytes), (tiers, 160 * MIB));
        // The figure exists once all of memory was looked at.
        let status = until("what it works with", || {
            assert_eq!(vm.guest("check a"), "0");
            let status = vm.status();
            let active = status.tier.as_ref().and_then(|tier| tier.active_bytes);
            (active? > 80 * MIB).then_some(status)
        });
        assert!(
            status.warnings.iter().any(|line| line.contains("fast memory")),
            "{:?}",
            status.warnings
        );
        assert!(vm.ebb("status --verbose").ok().contains("tiers\n"));
        host.kill9();
        host.start();
        assert_eq!(vm.guest("check a"), "0");
        assert!(vm.host_bytes() <= 160 * MIB + SLACK_BYTES, "{}", vm.host_bytes());
        assert_eq!(vm.status().tier.expect("tiers").fast_bytes, 160 * MIB);
        vm.power_off();
        until("the end of its file", || (!file.exists()).then_some(()));
    }
}
