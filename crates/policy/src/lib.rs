//! What to do, from what was seen and what was asked for. It is pure: no clock, no I/O.
//!
//! [`resize`]: by what a VM becomes larger or smaller. [`need`]: how small its guest may become
//! now. [`pressure`]: whether the host is short of memory. [`pilot`]: what to take from which VM, and
//! what to give back.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod need;
pub mod pilot;
pub mod pressure;
pub mod resize;
