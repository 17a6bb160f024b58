//! Why a page is no record, or an invalid one.

use ebb_units::Gpa;
use thiserror::Error;

use super::{Answer, Reason};
use crate::Kind;

/// Why a record is not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum RecordError {
    /// The page does not begin with the magic number.
    #[error("the page is no registration record: it begins with other bytes")]
    Magic,
    /// The length is not that of whole words within the page, or is too short.
    #[error("the record gives its length as {0} bytes, which no record has")]
    Length(usize),
    /// The checksum is that of other content.
    #[error("the record's checksum is wrong: it is half written, or was overwritten")]
    Checksum,
    /// The record was found at another address than it names.
    #[error("the record names another address as its own ({0:?}): this is a copy of it")]
    OwnAddress(Gpa),
    /// The token is 0.
    #[error("the record's token is 0")]
    Token,
    /// Another version.
    #[error("the record has version {0}, and only version 1 is known")]
    Version(u32),
    /// Neither registered nor withdrawn.
    #[error("the record's state is {0}, which has no meaning")]
    State(u32),
    /// The virtual address is not that of a page of the kernel's.
    #[error("the record's virtual address {0:#x} is not that of a page in the kernel's half")]
    VirtualAddress(u64),
    /// Page metadata of an impossible size.
    #[error("one frame's metadata has {0} bytes, which is not a multiple of 8 from 8 to 512")]
    PageBytes(u16),
    /// The greatest order is too great.
    #[error("the greatest order is {0}, and no block may have an order above 20")]
    MaxOrder(u8),
    /// A helper has no code, or more than there is room for.
    #[error("the code of {kind} has {bytes} bytes, and must have 1 to 64")]
    CodeLength {
        /// The helper.
        kind: Kind,
        /// Its length.
        bytes: u8,
    },
    /// Bytes are set that must be zero.
    #[error("reserved bytes, or bytes behind a helper's code, are not zero")]
    Reserved,
    /// No range, or a length that is not that of as many ranges.
    #[error("the record has {count} ranges of metadata, which its {length} bytes do not hold")]
    RangeCount {
        /// Ranges that the record names.
        count: u8,
        /// Length of the record in bytes.
        length: usize,
    },
    /// A range is invalid.
    #[error("range {index} of the metadata {fault}")]
    Range {
        /// Which one, counted from 0.
        index: usize,
        /// Why.
        fault: RangeFault,
    },
}

/// Why a range of page metadata is invalid. Each message stands after "the metadata".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum RangeFault {
    /// The addresses are misaligned, in the wrong order, or past the end of memory.
    #[error("has no valid addresses: multiples of 8 up to 2^52, the lower one first")]
    Address,
    /// The frame numbers are in the wrong order, or past the end of memory.
    #[error("has no valid frame numbers: at most 2^40, the lower one first")]
    Frames,
    /// There is not exactly one page's metadata for each frame.
    #[error("has another size than the metadata of the frames that it describes")]
    Size,
    /// The range describes frames below the end of the last range.
    #[error("describes frames that do not lie above those of the range before it")]
    Order,
    /// The range lies in memory of a range before it.
    #[error("overlaps the metadata of a range before it")]
    Overlap,
    /// The range does not lie in RAM.
    #[error("does not lie in RAM")]
    OutsideRam,
}

impl RecordError {
    /// What the host tells the guest. `None` if nothing proves that the page is a record: then
    /// nothing may be written to it.
    pub fn answer(&self) -> Option<Answer> {
        let reason = match self {
            Self::Magic | Self::Length(_) | Self::Checksum | Self::OwnAddress(_) | Self::Token => {
                return None;
            }
            // The kernel writes the state last, and may be about to.
            Self::State(0) => return None,
            Self::Version(_) => Reason::Version,
            Self::Range { fault: RangeFault::OutsideRam, .. } => Reason::OutsideRam,
            Self::RangeCount { .. } | Self::Range { .. } => Reason::Ranges,
            Self::State(_)
            | Self::VirtualAddress(_)
            | Self::PageBytes(_)
            | Self::MaxOrder(_)
            | Self::CodeLength { .. }
            | Self::Reserved => Reason::Field,
        };
        Some(Answer::Refused(reason))
    }
}
