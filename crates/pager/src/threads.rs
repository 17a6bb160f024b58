//! The threads that serve faults.

pub mod fault;
pub mod refill;
