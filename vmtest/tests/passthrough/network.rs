//! A network card that is passed through.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use vmtest::nested::{CARD_ADDRESS, CARD_IP, HOST_IP, INNER_KERNEL, with_iommu_and_network};
use vmtest::{Host, Vm};

use crate::{ROUNDS, behind_port, dma_faults, free_and_have, guest, pass_on, wait_held};

const PORT: u16 = 7;
/// Bytes that the guest sends in a round, and gets back.
const BYTES: &str = "16M";

/// Gives the guest its address, and has this host send back what it sends.
pub fn begin(vm: &Vm) {
    let listener = TcpListener::bind((HOST_IP, PORT)).expect("this host has the address");
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut all = Vec::new();
            // The guest waits for what does not come back.
            let _ = stream.read_to_end(&mut all).and_then(|_| stream.write_all(&all));
        }
    });
    vm.guest(&format!("network {CARD_IP}/24 {HOST_IP}"));
}

/// Memory is freed, reclaimed, and used again by the card before any processor touches it.
pub fn free_and_exchange(vm: &Vm) -> Result<String, String> {
    free_and_have(vm, &format!("exchange {HOST_IP}:{PORT} {BYTES}"))
}

/// A VM with the card, which has its address.
fn run(host: &Host) -> Vm {
    pass_on(CARD_ADDRESS);
    let devices = behind_port(1, CARD_ADDRESS, "card");
    let vm = host.run(guest(INNER_KERNEL, &devices).privileged());
    wait_held(&vm);
    begin(&vm);
    vm
}

/// The kernel checks each packet, and the guest compares each byte.
#[test]
fn memory_goes_and_comes_under_a_network_card_that_is_passed_through() {
    let test = "network::memory_goes_and_comes_under_a_network_card_that_is_passed_through";
    if with_iommu_and_network(test) {
        return;
    }
    let host = Host::new();
    let vm = run(&host);
    for round in 0..ROUNDS {
        assert_eq!(free_and_exchange(&vm), Ok("0".into()), "round {round}");
        if round == 0 {
            host.kill9();
            host.start();
        }
    }
    assert_eq!(dma_faults(), [""; 0]);
}

/// The control: memory is punched while it stays mapped.
#[test]
fn what_stays_mapped_makes_the_network_card_use_other_memory() {
    let test = "network::what_stays_mapped_makes_the_network_card_use_other_memory";
    if with_iommu_and_network(test) {
        return;
    }
    let host = Host::new();
    host.set("EBB_FAIL", "vm0:unmap:1");
    let vm = run(&host);
    vm.forgive();
    let used = free_and_exchange(&vm);
    assert_ne!(used, Ok("0".into()));
}
