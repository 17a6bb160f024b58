//! Serving faults.

pub mod coming;
pub mod hand;
pub mod installer;
pub mod read_ahead;
pub mod refiller;
pub mod room;
pub mod sentry;
pub mod server;
pub mod sharer;
