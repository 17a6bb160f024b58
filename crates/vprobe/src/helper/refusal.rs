//! Why a helper's code is refused.

use iced_x86::{FastFormatter, Instruction};
use thiserror::Error;

use super::Kind;
use crate::Reason;

/// The first instruction of a helper that is not accepted.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{cause}: `{instruction}` at byte {offset}")]
pub struct Refusal {
    /// What is wrong with it.
    pub cause: Cause,
    /// Byte of the code at which it lies.
    pub offset: usize,
    /// The instruction in Intel's syntax.
    pub instruction: String,
}

/// What is wrong with an instruction. The rules are those of V-Probe's paper, section 4.2, in its
/// order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Cause {
    /// It uses another register, or writes rdi.
    #[error("rule 1: only rax may be used, and rdi read")]
    Registers,
    /// It reads memory outside the page's metadata.
    #[error("rule 2: only the metadata of the page at rdi may be read")]
    Reads,
    /// It writes memory.
    #[error("rule 3: no memory may be written")]
    Writes,
    /// It branches, calls, interrupts, or is privileged.
    #[error("rule 4: no branch, call or privileged instruction is allowed")]
    Flow,
    /// It is the last instruction and no plain ret, or a ret and not the last one.
    #[error("rule 5: the last instruction must be a plain ret, with nothing behind it")]
    Return,
    /// It ends behind the 63rd byte.
    #[error("rule 6: the code must be shorter than 64 bytes")]
    Length,
    /// It cannot be decoded.
    #[error("no instruction that Ebb knows")]
    Unknown,
    /// It breaks no rule, but Ebb does not translate it.
    #[error("not supported")]
    NotSupported,
    /// It reads a part of rax or a flag that no instruction before it has set.
    #[error("it reads rax or a flag where its value is not defined")]
    Undefined,
}

impl Cause {
    /// The number of the rule in the paper's list. `None` if it is none of these rules.
    pub fn rule(self) -> Option<u8> {
        match self {
            Cause::Registers => Some(1),
            Cause::Reads => Some(2),
            Cause::Writes => Some(3),
            Cause::Flow => Some(4),
            Cause::Return => Some(5),
            Cause::Length => Some(6),
            Cause::Unknown | Cause::NotSupported | Cause::Undefined => None,
        }
    }
}

impl Refusal {
    pub(super) fn of(cause: Cause, instruction: &Instruction) -> Refusal {
        let mut formatter = FastFormatter::new();
        let options = formatter.options_mut();
        options.set_space_after_operand_separator(true);
        options.set_use_hex_prefix(true);
        options.set_uppercase_hex(false);
        let mut text = String::new();
        formatter.format(instruction, &mut text);
        Refusal { cause, offset: instruction.ip() as usize, instruction: text }
    }

    /// Code of `length` bytes ends without a ret.
    pub(super) fn without_ret(length: usize) -> Refusal {
        Refusal { cause: Cause::Return, offset: length, instruction: "end of the code".into() }
    }

    /// The reason that the host tells the guest.
    pub fn reason(&self, kind: Kind) -> Reason {
        let offset = u8::try_from(self.offset).unwrap_or(u8::MAX);
        Reason::Helper { kind, rule: self.cause.rule().unwrap_or(0), offset }
    }
}
