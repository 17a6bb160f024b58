//! Passed-through devices (VFIO): free memory is unmapped in the host's IOMMU before it is punched,
//! and mapped again before the guest may use it. Decisions 50 and 51; V-Probe, section 5;
//! HyperAlloc, section 3.4.
//!
//! The VMM maps each region of RAM in one piece, and no part of a piece can be unmapped. So before
//! the guest's first instruction its regions above 4 GiB are mapped anew in pieces of a huge frame
//! each ([`PassedThrough::convert`]). Below 4 GiB the VMM maps RAM anew at each reset, which must
//! find it whole: nothing is taken there.
//!
//! It decides nothing about frames, and speaks to no VMM.
#![deny(missing_docs)]

mod held;
mod mapper;
mod pieces;

pub use held::{Held, HeldNumbers, Refused};
pub use mapper::{Covers, PassedThrough};
