//! Passed-through devices that are unplugged, and plugged in again.

use ebb_api::MayTake;
use serde_json::json;
use vmtest::nested::{
    CARD_ADDRESS, INNER_KERNEL, NVME_ADDRESS, with_iommu, with_iommu_and_network,
};
use vmtest::{Host, Vm, until, until_fits};

use crate::{
    DISK, FREED, USED, behind_port, dma_faults, free_and_use, guest, network, pass_on, reclaim,
    run, wait_disk, wait_held,
};

/// Has QEMU unplug the device, and waits until it has.
fn unplug(vm: &Vm, id: &str) {
    vm.qmp("device_del", json!({ "id": id }));
    until(format_args!("{id} to leave"), || {
        let list = vm.qmp("qom-list", json!({ "path": "/machine/peripheral" }));
        let all = list.as_array().expect("a list");
        (!all.iter().any(|object| object["name"] == id)).then_some(())
    });
}

/// Tries to plug the disk in where it was.
///
/// # Errors
/// QEMU's words.
fn plug_disk(vm: &Vm) -> Result<(), String> {
    let disk = json!({
        "driver": "vfio-pci", "host": NVME_ADDRESS, "bus": "disk-port", "id": "disk"
    });
    let plugged = vm.open_qmp().execute("device_add", disk);
    plugged.map(drop).map_err(|error| error.to_string())
}

fn wait_reach(vm: &Vm, what: MayTake) {
    until(format_args!("{what} to be what may be taken"), || {
        (vm.status().reach.may_take == what).then_some(())
    });
}

/// A device that leaves no longer restricts Ebb. One that comes then finds watched memory, which
/// QEMU cannot map for it.
#[test]
fn a_device_that_is_unplugged_restricts_nothing_any_more() {
    if with_iommu("plugged::a_device_that_is_unplugged_restricts_nothing_any_more") {
        return;
    }
    let host = Host::new();
    let vm = run(&host, INNER_KERNEL);
    vm.guest(&format!("fill a {FREED}"));
    vm.guest("free a");
    reclaim(&vm);
    unplug(&vm, "disk");
    wait_reach(&vm, MayTake::Everything);
    vm.guest(&format!("fill a {FREED}"));
    vm.guest("free a");
    reclaim(&vm);
    vm.guest(&format!("fill b {FREED}"));
    assert_eq!(vm.guest("check b"), "0");
    match plug_disk(&vm) {
        Err(why) => {
            assert!(why.contains("Bad address"), "{why}");
            wait_reach(&vm, MayTake::Everything);
        }
        // Ebb saw the device, and all memory was back before QEMU mapped it.
        Ok(()) => {
            wait_reach(&vm, MayTake::Nothing);
            wait_disk(&vm);
            assert_eq!(vm.guest(&format!("disk {DISK} {USED}")), "0");
        }
    }
    assert_eq!(vm.guest("check b"), "0");
    assert_eq!(dma_faults(), [""; 0]);
}

/// While another device stays, the memory stays mapped in pieces, and QEMU maps nothing for the one
/// that comes.
#[test]
fn a_disk_is_unplugged_and_plugged_in_again_beside_a_network_card() {
    let test = "plugged::a_disk_is_unplugged_and_plugged_in_again_beside_a_network_card";
    if with_iommu_and_network(test) {
        return;
    }
    let host = Host::new();
    [NVME_ADDRESS, CARD_ADDRESS].into_iter().for_each(pass_on);
    let devices =
        [behind_port(1, NVME_ADDRESS, "disk"), behind_port(2, CARD_ADDRESS, "card")].join(" ");
    let vm = host.run(guest(INNER_KERNEL, &devices).privileged());
    wait_held(&vm);
    wait_disk(&vm);
    network::begin(&vm);
    assert_eq!(free_and_use(&vm), Ok("0".into()));
    unplug(&vm, "disk");
    assert_eq!(network::free_and_exchange(&vm), Ok("0".into()));
    wait_reach(&vm, MayTake::FreeOnly);
    // Until Ebb has let go of the disk, it is busy.
    let plugged = until_fits("the disk to be plugged in", || plug_disk(&vm), Result::is_ok);
    assert_eq!(plugged, Ok(()));
    wait_reach(&vm, MayTake::FreeOnly);
    wait_disk(&vm);
    assert_eq!(free_and_use(&vm), Ok("0".into()));
    assert_eq!(network::free_and_exchange(&vm), Ok("0".into()));
    assert_eq!(dma_faults(), [""; 0]);
}
