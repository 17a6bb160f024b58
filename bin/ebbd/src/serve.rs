//! What Ebb serves a VM: disks, memory devices, and room for its swap file.

pub mod disks;
pub mod growth;
pub mod swap_room;
