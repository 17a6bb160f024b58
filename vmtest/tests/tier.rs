//! Pages that move between the nodes of a guest which has two: `ebb-tier` at work inside.

use vmtest::{Guest, Host, assets, require};

fn keeps_every_byte(kernel: &str) {
    let guest = Guest::debian(kernel).memory("512M").slow_node("128M");
    let found = Host::new().qemu(guest).guest("sh /bin/tiers check 48M");
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
    let guest = Guest::debian("6.1-cloud").memory("512M").slow_node("96M");
    let found = Host::new().qemu(guest).guest("sh /bin/tiers full 128M");
    assert!(found.contains("no room for "), "{found}");
}
