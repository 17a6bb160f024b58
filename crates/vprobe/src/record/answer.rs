//! The host's answer to a registration.

use crate::Kind;

/// What the host writes to a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The registration is in force.
    Accepted,
    /// It is not.
    Refused(Reason),
}

/// Why a registration is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// Another version of the record.
    Version,
    /// A field has no valid value.
    Field,
    /// The ranges of page metadata are invalid.
    Ranges,
    /// Page metadata does not lie in RAM.
    OutsideRam,
    /// The code of a helper is refused.
    Helper {
        /// The helper.
        kind: Kind,
        /// The rule of the paper that it breaks, 1 to 6. 0: no rule, but Ebb does not translate it.
        rule: u8,
        /// Byte of the code at which the instruction lies.
        offset: u8,
    },
    /// The host takes no registration of this VM.
    Host,
}

impl Answer {
    /// The number that the guest reads: `1` accepted; `2 | reason << 8 | rule << 16 | offset << 24`
    /// refused.
    pub fn code(self) -> u32 {
        let reason = match self {
            Answer::Accepted => return 1,
            Answer::Refused(reason) => reason,
        };
        let [number, rule, offset] = match reason {
            Reason::Version => [1, 0, 0],
            Reason::Field => [2, 0, 0],
            Reason::Ranges => [3, 0, 0],
            Reason::OutsideRam => [4, 0, 0],
            Reason::Helper { kind: Kind::PageFree, rule, offset } => [5, rule, offset],
            Reason::Helper { kind: Kind::PageOrder, rule, offset } => [6, rule, offset],
            Reason::Host => [7, 0, 0],
        };
        u32::from_le_bytes([2, number, rule, offset])
    }
}
