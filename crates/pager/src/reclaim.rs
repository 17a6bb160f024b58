//! Reclaiming free frames.

pub mod claim;
