//! Processes of this program beside the daemon: short-lived ones with a privilege, and those that
//! outlive the daemon.

pub mod console;
pub mod injector;
pub mod relay;
