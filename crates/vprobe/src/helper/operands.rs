//! What the operands of an instruction name.

use iced_x86::{Instruction, OpKind, Register};

use super::Cause;
use super::program::{Operand, low_bits};

/// A part of rax.
#[derive(Clone, Copy)]
pub struct Part {
    /// Its lowest bit.
    pub shift: u32,
    /// Its width.
    pub bits: u32,
}

impl Part {
    pub const AL: Part = Part { shift: 0, bits: 8 };
    pub const RAX: Part = Part { shift: 0, bits: 64 };

    /// The bits of rax that it consists of.
    pub fn mask(self) -> u64 {
        low_bits(self.bits) << self.shift
    }

    fn of(register: Register) -> Result<Part, Cause> {
        let (shift, bits) = match register {
            Register::AL => (0, 8),
            Register::AH => (8, 8),
            Register::AX => (0, 16),
            Register::EAX => (0, 32),
            Register::RAX => (0, 64),
            _ => return Err(Cause::NotSupported),
        };
        Ok(Part { shift, bits })
    }
}

/// Where an instruction's operand comes from.
pub enum Source {
    Register(Part),
    /// Of the page's metadata.
    Memory {
        at: usize,
        bits: u32,
    },
    Immediate(Operand),
}

/// Width in bits of an operand that is a register or memory.
pub fn width(instruction: &Instruction, operand: u32) -> Result<u32, Cause> {
    let bytes = match instruction.op_kind(operand) {
        OpKind::Register => instruction.op_register(operand).size(),
        OpKind::Memory => instruction.memory_size().size(),
        _ => return Err(Cause::NotSupported),
    };
    match bytes {
        1 | 2 | 4 | 8 => Ok(bytes as u32 * 8),
        _ => Err(Cause::NotSupported),
    }
}

/// The part of rax that an instruction writes.
pub fn destination(instruction: &Instruction) -> Result<Part, Cause> {
    match instruction.op_kind(0) {
        OpKind::Register => Part::of(instruction.op0_register()),
        _ => Err(Cause::NotSupported),
    }
}

/// Where an operand comes from. An immediate has `bits` bits.
pub fn source(instruction: &Instruction, operand: u32, bits: u32) -> Result<Source, Cause> {
    match instruction.op_kind(operand) {
        OpKind::Register => Ok(Source::Register(Part::of(instruction.op_register(operand))?)),
        OpKind::Memory => Ok(Source::Memory {
            at: instruction.memory_displacement64() as usize,
            bits: width(instruction, operand)?,
        }),
        _ => {
            let value = instruction.try_immediate(operand).map_err(|_| Cause::NotSupported)?;
            Ok(Source::Immediate(Operand::Constant(value & low_bits(bits))))
        }
    }
}

/// Whether both operands are the same register.
pub fn are_same_register(instruction: &Instruction) -> bool {
    instruction.op_kind(0) == OpKind::Register
        && instruction.op_kind(1) == OpKind::Register
        && instruction.op_register(0) == instruction.op_register(1)
}
