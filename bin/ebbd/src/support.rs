//! What the rest of the daemon builds on. It knows nothing of VMs.

pub mod bounded_log;
pub mod failpoint;
pub mod frame_set;
pub mod life;
pub mod log;
pub mod nanoseconds;
pub mod notify;
pub mod open_files;
pub mod private_socket;
pub mod privileges;
pub mod retry;
pub mod state_file;
