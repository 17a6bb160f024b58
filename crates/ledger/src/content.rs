//! The content that a ledger word records, and the word's 64 bits.
//!
//! ```text
//!  63                      16 15      8 7   6   5     4      3    2   0
//! +--------------------------+---------+-----+-----+------+------+-----+
//! | slot, block, head frame  | fill or |  0  | hard| want | lock | kind|
//! |                          | order   |     |     |      |      |     |
//! +--------------------------+---------+-----+-----+------+------+-----+
//! ```

use ebb_units::Gfn;

/// Where the content of a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// In the VM's RAM file. A hole there reads as zero.
    Resident,
    /// Nowhere: the frame has no memory, and every byte of it reads as `fill`. A `hard` one must be
    /// returned before the guest may use it.
    Empty {
        /// The byte.
        fill: u8,
        /// Whether it is reclaimed hard.
        hard: bool,
    },
    /// In a slot of the store.
    Saved {
        /// The slot, below 2^48.
        slot: u64,
    },
    /// In a block of the guest's disk.
    OnDisk {
        /// The block, below 2^48.
        block: u64,
    },
    /// Nowhere: the memory is unplugged, and a touch is a violation.
    Unplugged,
    /// In the RAM file, and write-protected. This frame holds the metadata of a reclaimed block,
    /// and a write to it means that the guest wants the block.
    Watch {
        /// The block's first frame, below 2^48.
        head: Gfn,
        /// The block's order: it has `1 << order` frames.
        order: u8,
    },
    /// In the RAM file, and write-protected. Daemons of older versions wrote it for a frame that
    /// equals the page in a slot. No daemon writes it any more.
    Clean {
        /// The slot, below 2^48, which no frame has any more.
        slot: u64,
    },
}

pub(crate) const LOCK: u64 = 1 << 3;
pub(crate) const WANT: u64 = 1 << 4;
const HARD: u64 = 1 << 5;
const KIND: u64 = 7;
const BYTE_SHIFT: u32 = 8;
const PAYLOAD_SHIFT: u32 = 16;
const PAYLOAD_MAX: u64 = u64::MAX >> PAYLOAD_SHIFT;

const RESIDENT: u64 = 0;
const EMPTY: u64 = 1;
const SAVED: u64 = 2;
const ON_DISK: u64 = 3;
const UNPLUGGED: u64 = 4;
const WATCH: u64 = 5;
/// Only in a huge frame's word: the words of its frames count.
pub(crate) const MIXED: u64 = 6;
const CLEAN: u64 = 7;

/// Largest order in a word. Linux's largest order today is 10.
const ORDER_MAX: u64 = 31;

pub(crate) fn is_mixed(word: u64) -> bool {
    word & KIND == MIXED
}

impl Content {
    /// Whether a refill has to read it from the store or a disk.
    pub fn is_evicted(self) -> bool {
        matches!(self, Content::Saved { .. } | Content::OnDisk { .. })
    }

    /// Returns the word for this content, unlocked.
    pub(crate) fn to_word(self) -> u64 {
        let with_payload = |kind, payload: u64| {
            debug_assert!(payload <= PAYLOAD_MAX);
            kind | (payload & PAYLOAD_MAX) << PAYLOAD_SHIFT
        };
        match self {
            Content::Resident => RESIDENT,
            Content::Empty { fill, hard } => {
                EMPTY | u64::from(fill) << BYTE_SHIFT | if hard { HARD } else { 0 }
            }
            Content::Saved { slot } => with_payload(SAVED, slot),
            Content::OnDisk { block } => with_payload(ON_DISK, block),
            Content::Unplugged => UNPLUGGED,
            Content::Watch { head, order } => {
                debug_assert!(u64::from(order) <= ORDER_MAX);
                with_payload(WATCH, head.0) | u64::from(order) << BYTE_SHIFT
            }
            Content::Clean { slot } => with_payload(CLEAN, slot),
        }
    }

    /// Returns the content in a word. `None`: the word is mixed, or Ebb never wrote it.
    pub(crate) fn from_word(word: u64) -> Option<Content> {
        let payload = word >> PAYLOAD_SHIFT;
        let byte = word >> BYTE_SHIFT & 0xff;
        Some(match word & KIND {
            RESIDENT => Content::Resident,
            EMPTY => Content::Empty { fill: byte as u8, hard: word & HARD != 0 },
            SAVED => Content::Saved { slot: payload },
            ON_DISK => Content::OnDisk { block: payload },
            UNPLUGGED => Content::Unplugged,
            CLEAN => Content::Clean { slot: payload },
            WATCH if byte <= ORDER_MAX => Content::Watch { head: Gfn(payload), order: byte as u8 },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_file_of_zeros_says_resident() {
        assert_eq!(Content::from_word(0), Some(Content::Resident));
    }

    #[test]
    fn every_content_survives_its_word() {
        for content in [
            Content::Resident,
            Content::Empty { fill: 0xaa, hard: false },
            Content::Empty { fill: 0, hard: true },
            Content::Saved { slot: PAYLOAD_MAX },
            Content::OnDisk { block: 1 },
            Content::Unplugged,
            Content::Watch { head: Gfn(PAYLOAD_MAX), order: 10 },
            Content::Clean { slot: PAYLOAD_MAX },
        ] {
            let word = content.to_word();
            assert_eq!(word & (LOCK | WANT), 0);
            assert_eq!(Content::from_word(word), Some(content));
            assert_eq!(Content::from_word(word | LOCK | WANT), Some(content));
        }
    }

    #[test]
    fn words_that_were_never_written_are_known() {
        assert_eq!(Content::from_word(MIXED), None);
        assert_eq!(Content::from_word(WATCH | 32 << BYTE_SHIFT), None);
    }
}
