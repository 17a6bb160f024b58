//! The guest's own tables.

pub mod tables;
