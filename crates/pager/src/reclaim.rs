//! Emptying frames that are free.

pub mod claim;
