//! The rules by which a helper's code is verified (V-Probe's paper, section 4.2).

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfo,
    InstructionInfoFactory, Mnemonic, OpAccess, Register, UsedMemory,
};

use super::{Cause, Refusal};
use crate::PageSize;

/// Greatest length of a helper's code.
pub const MAX_CODE_BYTES: usize = 63;

/// Code that keeps all rules, without what has no effect.
pub struct Checked {
    /// Its instructions up to the last one. What they read in memory has rdi as its base and lies
    /// in the page's metadata.
    pub body: Vec<Instruction>,
    /// The last one.
    pub ret: Instruction,
}

/// Checks `code` instruction by instruction, up to the first refusal.
pub fn check(code: &[u8], page_size: PageSize) -> Result<Checked, Refusal> {
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    let mut factory = InstructionInfoFactory::new();
    let mut body = Vec::new();
    while decoder.can_decode() {
        let instruction = decoder.decode();
        let refuse = |cause| Refusal::of(cause, &instruction);
        if instruction.is_invalid() {
            return Err(refuse(Cause::Unknown));
        }
        if instruction.next_ip() > MAX_CODE_BYTES as u64 {
            return Err(refuse(Cause::Length));
        }
        let is_last = !decoder.can_decode();
        if !goes_on(&instruction, is_last).map_err(refuse)? {
            return Ok(Checked { body, ret: instruction });
        }
        if !has_no_effect(&instruction) {
            let used = factory.info(&instruction);
            check_accesses(&instruction, used, page_size).map_err(refuse)?;
            body.push(instruction);
        }
    }
    Err(Refusal::without_ret(code.len()))
}

/// Whether the next instruction follows: rules 4 and 5.
fn goes_on(instruction: &Instruction, is_last: bool) -> Result<bool, Cause> {
    if instruction.is_privileged() {
        return Err(Cause::Flow);
    }
    match instruction.flow_control() {
        FlowControl::Next => Ok(true),
        FlowControl::Return => {
            let is_plain = instruction.code() == Code::Retnq && instruction.len() == 1;
            if is_plain && is_last { Ok(false) } else { Err(Cause::Return) }
        }
        _ => Err(Cause::Flow),
    }
}

/// The processor ignores operands of nops.
fn has_no_effect(instruction: &Instruction) -> bool {
    matches!(instruction.mnemonic(), Mnemonic::Nop | Mnemonic::Endbr64)
}

/// Rules 3, 1 and 2, and prefixes that change what memory or which registers are meant.
fn check_accesses(
    instruction: &Instruction,
    used: &InstructionInfo,
    page_size: PageSize,
) -> Result<(), Cause> {
    if used.used_memory().iter().any(|memory| writes(memory.access())) {
        return Err(Cause::Writes);
    }
    if has_unusual_prefix(instruction) {
        return Err(Cause::NotSupported);
    }
    let allowed = used.used_registers().iter().all(|used| match used.register().full_register() {
        Register::RAX => true,
        Register::RDI => !writes(used.access()),
        _ => false,
    });
    if !allowed {
        return Err(Cause::Registers);
    }
    used.used_memory().iter().try_for_each(|memory| check_read(memory, page_size))
}

fn check_read(memory: &UsedMemory, page_size: PageSize) -> Result<(), Cause> {
    // The address may lie in the page's metadata, but is no constant distance from rdi.
    if memory.base() == Register::EDI || memory.index() != Register::None {
        return Err(Cause::NotSupported);
    }
    // A negative displacement is a number above all sizes.
    let end = memory.displacement().checked_add(memory.memory_size().size() as u64);
    let is_inside = end.is_some_and(|end| end <= page_size.bytes() as u64);
    match memory.base() == Register::RDI && is_inside {
        true => Ok(()),
        false => Err(Cause::Reads),
    }
}

fn writes(access: OpAccess) -> bool {
    matches!(
        access,
        OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
    )
}

fn has_unusual_prefix(instruction: &Instruction) -> bool {
    instruction.segment_prefix() != Register::None
        || instruction.has_lock_prefix()
        || instruction.has_repe_prefix()
        || instruction.has_repne_prefix()
}
