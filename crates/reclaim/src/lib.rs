//! Finding frames that a guest does not use, and taking them: journey 1.
#![forbid(unsafe_code)]

pub mod aging;
pub mod hyperalloc;
pub mod vprobe;
