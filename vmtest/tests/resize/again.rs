//! A size that is reached again, after a reboot, another kernel or another daemon.

use ebb_api::SizeState;
use vmtest::{Disk, Host, assets, require, rounds, until};

use crate::{GIB, MIB, growing, reach, size, total_bytes, wait_total};

#[test]
fn a_rebooted_guest_has_its_size_again() {
    let vm = Host::new().run(growing());
    let began_bytes = total_bytes(&vm);
    for (wanted, total) in [("1536M", began_bytes + 512 * MIB), ("600M", began_bytes)] {
        let wanted_bytes = reach(&vm, wanted).bytes;
        vm.reboot();
        until("the size to be reached again", || {
            let now = size(&vm);
            (now.bytes == wanted_bytes && now.state == SizeState::Reached).then_some(())
        });
        wait_total(&vm, total);
        vm.guest("fill a 200M");
        assert_eq!(vm.guest("check a"), "0");
        vm.guest("free a");
    }
}

/// Nobody reports it: there is no reset, and the old kernel's metadata stays in memory.
#[test]
fn a_kernel_started_by_another_has_its_size_again() {
    let kernel = assets::kernel("6.1-cloud");
    require!(kernel.as_ref().map_err(Clone::clone));
    let kernel = kernel.expect("required");
    let host = Host::new();
    let disk = Disk::new(&host, "disk", "256M").formatted("ext4").with_kernel(&kernel);
    let vm = host.run(growing().own_disk(&disk));
    let began_bytes = total_bytes(&vm);
    reach(&vm, "1536M");
    vm.ebb("auto on --interval 100ms").ok();
    for _ in 0..rounds(2, 20) {
        vm.wait_trusted();
        vm.guest("fill a 800M");
        vm.guest("free a");
        vm.guest("mount ext4 /dev/vda /mnt");
        vm.kexec("/mnt/vmlinuz", "/mnt/initrd");
        wait_total(&vm, began_bytes + 512 * MIB);
        vm.guest("fill a 800M");
        assert_eq!(vm.guest("check a"), "0");
        vm.guest("free a");
        vm.wait_trusted();
        until("the host to have back what is free", || (vm.host_bytes() < GIB).then_some(()));
    }
}

#[test]
fn a_daemon_that_comes_back_goes_on() {
    let host = Host::new();
    let vm = host.run(growing());
    for (line, wanted_bytes) in [("1536M", 1536 * MIB), ("600M", 600 * MIB), ("1G", GIB)] {
        let asking = std::thread::spawn({
            let (host, line) = (host.clone(), format!("resize vm0 {line}"));
            move || host.ebb(&line)
        });
        until("the size to be on record", || {
            let path = host.run_directory().join("vms/vm0/vm.json");
            let record: serde_json::Value =
                serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
            (record["size"]["bytes"] == wanted_bytes).then_some(())
        });
        host.kill9();
        let _ = asking.join().expect("ebb ends");
        host.start();
        until("the size to be reached", || (size(&vm).bytes == wanted_bytes).then_some(()));
    }
    vm.guest("fill a 500M");
    assert_eq!(vm.guest("check a"), "0");
}
