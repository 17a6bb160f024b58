//! What several programs know: how a guest fills its memory, and which of its pages are hot.
#![forbid(unsafe_code)]

pub mod pattern;
pub mod spread;
