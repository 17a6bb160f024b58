//! What is to be done, from what was seen and what is wished: pure, without clock or I/O.
//!
//! [`resize`]: by what a VM is made larger or smaller. [`need`]: how small its guest may be
//! made now.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod need;
pub mod resize;
