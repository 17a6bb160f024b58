//! The REST interface.

pub mod http;
pub mod server;
pub mod tcp;
pub mod vm_server;
