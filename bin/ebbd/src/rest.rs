//! The REST interface.

pub mod server;
