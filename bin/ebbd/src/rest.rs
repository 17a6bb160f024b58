//! The REST interface.

pub mod counting;
pub mod dashboard;
mod events;
mod extract;
pub mod http;
mod jobs;
pub mod own_pages;
mod refusals;
pub mod server;
pub mod tcp;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod vm_server;
pub mod works;
