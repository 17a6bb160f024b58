//! The quantities Ebb counts in, as types that cannot be mixed up.
//!
//! *Frame*: 4 KiB of guest-physical memory. *Huge frame*: 2 MiB. A [`Gpa`] is a
//! guest-physical address, an [`Hva`] an address inside the VMM's process.
//! Names end in their unit: `_bytes`, `_frames`, `_huge`.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod bytes;
mod frame;

pub use bytes::{Bytes, ParseBytesError};
pub use frame::{FrameRange, Gfn, Gpa, HugeFrame, Hva};

/// Bytes in a frame (x86-64 base page).
pub const FRAME_BYTES: u64 = 4 << 10;
/// Bytes in a huge frame (x86-64 PMD-mapped page).
pub const HUGE_BYTES: u64 = 2 << 20;
/// Frames in a huge frame.
pub const FRAMES_PER_HUGE: u64 = HUGE_BYTES / FRAME_BYTES;

const _: () = assert!(FRAMES_PER_HUGE == 512);
