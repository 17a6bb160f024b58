//! Processes of this program beside the daemon: short-lived ones with a privilege, and those that outlive it.

pub mod console;
pub mod injector;
pub mod relay;
