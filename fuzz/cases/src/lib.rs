//! What each fuzz target does with one input.
//!
//! The fuzzer calls these functions with inputs that it makes up. `make test` calls them with the
//! inputs in `fuzz/corpus`, compiled by the project's own compiler.
#![forbid(unsafe_code)]

pub mod blk_front_end;
pub mod classify;
pub mod compressed;
pub mod heat_walk;
pub mod image_probe;
pub mod ledger;
pub mod libvirt;
pub mod llfree_header;
pub mod llfree_host;
pub mod maps;
mod overwritten;
pub mod page_walk;
pub mod pilot_json;
pub mod pool_json;
pub mod qmp;
pub mod queue;
pub mod registered;
pub mod relay;
pub mod swap_seals;
mod vhost_user;
pub mod virtio_mem_front_end;
pub mod virtio_mem_queue;
pub mod virtio_mem_request;
pub mod virtio_mem_saved;
pub mod vm_json;
pub mod vmcoreinfo;
pub mod vprobe_helper;
pub mod vprobe_record;

/// A target's name, and what it does with one input.
pub type Target = (&'static str, fn(&[u8]));

/// Every target. Its name is also that of its program and of the directory of its inputs.
pub const TARGETS: [Target; 26] = [
    ("blk_front_end", blk_front_end::run),
    ("classify", classify::run),
    ("compressed", compressed::run),
    ("heat_walk", heat_walk::run),
    ("image_probe", image_probe::run),
    ("ledger", ledger::run),
    ("libvirt", libvirt::run),
    ("llfree_header", llfree_header::run),
    ("llfree_host", llfree_host::run),
    ("maps", maps::run),
    ("page_walk", page_walk::run),
    ("pilot_json", pilot_json::run),
    ("pool_json", pool_json::run),
    ("qmp", qmp::run),
    ("queue", queue::run),
    ("registered", registered::run),
    ("relay", relay::run),
    ("swap_seals", swap_seals::run),
    ("virtio_mem_front_end", virtio_mem_front_end::run),
    ("virtio_mem_queue", virtio_mem_queue::run),
    ("virtio_mem_request", virtio_mem_request::run),
    ("virtio_mem_saved", virtio_mem_saved::run),
    ("vm_json", vm_json::run),
    ("vmcoreinfo", vmcoreinfo::run),
    ("vprobe_helper", vprobe_helper::run),
    ("vprobe_record", vprobe_record::run),
];
