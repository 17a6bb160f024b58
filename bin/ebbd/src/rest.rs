//! The REST interface.

mod extract;
pub mod http;
pub mod server;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod vm_server;
