//! The REST interface.

pub mod server;
pub mod vm_server;
