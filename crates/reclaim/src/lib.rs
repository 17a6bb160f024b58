//! Finding frames that a guest does not use, and taking them: journey 1.
#![forbid(unsafe_code)]

mod choice;
pub mod cost;
pub mod hand;
pub mod hyperalloc;
pub mod limit;
pub mod uses;
pub mod vprobe;
