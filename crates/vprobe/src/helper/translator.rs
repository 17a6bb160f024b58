//! Instructions become steps, one after another: there are no jumps.
//!
//! rax is tracked bit by bit as defined or not. What follows here is Intel's manual, volume 2.

use iced_x86::{ConditionCode, Instruction, Mnemonic, Register};

use super::flags::{Flag, Flags, Sum};
use super::operands::{Part, Source, are_same_register, destination, source, width};
use super::program::{Operand, Program, Step, Steps};
use super::rules::Checked;
use super::{Cause, Kind, Refusal};

const ZERO: Operand = Operand::Constant(0);
const ONE: Operand = Operand::Constant(1);

/// Translates code that keeps the rules.
pub fn translate(kind: Kind, code: &Checked) -> Result<Program, Refusal> {
    let mut translator = Translator::new();
    for instruction in &code.body {
        let refuse = |cause| Refusal::of(cause, instruction);
        translator.translate(instruction).map_err(refuse)?;
    }
    translator.finish(kind).map_err(|cause| Refusal::of(cause, &code.ret))
}

struct Translator {
    steps: Steps,
    rax: Operand,
    /// The bits of rax that an instruction has written.
    defined: u64,
    flags: Flags,
}

impl Translator {
    fn new() -> Translator {
        Translator { steps: Steps::default(), rax: ZERO, defined: 0, flags: Flags::default() }
    }

    fn finish(mut self, kind: Kind) -> Result<Program, Cause> {
        let result = match kind {
            Kind::PageFree => {
                let value = self.read(Part::AL)?;
                let is_false = self.steps.add(Step::IsZero(value));
                self.steps.invert(is_false)
            }
            Kind::PageOrder => self.read(Part::RAX)?,
        };
        Ok(self.steps.into_program(result))
    }

    fn translate(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        match instruction.mnemonic() {
            Mnemonic::Mov | Mnemonic::Movzx => self.copy(instruction),
            Mnemonic::Movsx | Mnemonic::Movsxd => self.copy_signed(instruction),
            Mnemonic::Cbw => self.widen(8),
            Mnemonic::Cwde => self.widen(16),
            Mnemonic::Cdqe => self.widen(32),
            Mnemonic::Lea => self.lea(instruction),
            Mnemonic::And | Mnemonic::Test => self.logic(instruction, Step::And),
            Mnemonic::Or => self.logic(instruction, Step::Or),
            Mnemonic::Xor => self.logic(instruction, Step::Xor),
            Mnemonic::Not => self.not(instruction),
            Mnemonic::Add | Mnemonic::Adc => self.add(instruction),
            Mnemonic::Sub | Mnemonic::Sbb | Mnemonic::Cmp => self.subtract(instruction),
            Mnemonic::Inc | Mnemonic::Dec => self.step_by_one(instruction),
            Mnemonic::Neg => self.negate(instruction),
            Mnemonic::Shl | Mnemonic::Shr | Mnemonic::Sar => self.shift(instruction),
            Mnemonic::Rol | Mnemonic::Ror => self.rotate(instruction),
            Mnemonic::Bt => self.test_bit(instruction),
            _ => self.conditional(instruction),
        }
    }

    fn read(&mut self, part: Part) -> Result<Operand, Cause> {
        if self.defined & part.mask() != part.mask() {
            return Err(Cause::Undefined);
        }
        let shifted = self.steps.shift_right(self.rax, part.shift);
        Ok(self.steps.keep(shifted, part.bits))
    }

    /// Writes a number of at most `part.bits` bits. 32 bits clear the upper half, fewer leave the
    /// rest as it was.
    fn write(&mut self, part: Part, value: Operand) {
        if part.bits >= 32 {
            (self.rax, self.defined) = (value, u64::MAX);
            return;
        }
        let rest = self.steps.add(Step::And(self.rax, Operand::Constant(!part.mask())));
        let shifted = self.steps.shift_left(value, part.shift);
        self.rax = self.steps.add(Step::Or(rest, shifted));
        self.defined |= part.mask();
    }

    /// Returns an operand, which has `bits` bits if it is an immediate.
    fn operand(
        &mut self,
        instruction: &Instruction,
        index: u32,
        bits: u32,
    ) -> Result<Operand, Cause> {
        match source(instruction, index, bits)? {
            Source::Register(part) => self.read(part),
            Source::Memory { at, bits } => Ok(self.steps.load(at, bits)),
            Source::Immediate(value) => Ok(value),
        }
    }

    /// Returns the width of an operation on two operands, and the operands.
    fn two_operands(
        &mut self,
        instruction: &Instruction,
    ) -> Result<(u32, Operand, Operand), Cause> {
        let bits = width(instruction, 0)?;
        let is_difference =
            matches!(instruction.mnemonic(), Mnemonic::Xor | Mnemonic::Sub | Mnemonic::Sbb);
        // Then the result does not depend on the register: this is how code sets it to zero.
        if is_difference && are_same_register(instruction) {
            return Ok((bits, ZERO, ZERO));
        }
        let first = self.operand(instruction, 0, bits)?;
        Ok((bits, first, self.operand(instruction, 1, bits)?))
    }

    fn copy(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let to = destination(instruction)?;
        let value = self.operand(instruction, 1, to.bits)?;
        self.write(to, value);
        Ok(())
    }

    fn copy_signed(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let to = destination(instruction)?;
        let value = self.operand(instruction, 1, to.bits)?;
        let widened = self.sign_extend(value, width(instruction, 1)?, to.bits);
        self.write(to, widened);
        Ok(())
    }

    /// Sign-extends the lowest `bits` bits of rax to twice as many.
    fn widen(&mut self, bits: u32) -> Result<(), Cause> {
        let value = self.read(Part { shift: 0, bits })?;
        let widened = self.sign_extend(value, bits, 2 * bits);
        self.write(Part { shift: 0, bits: 2 * bits }, widened);
        Ok(())
    }

    fn sign_extend(&mut self, value: Operand, from: u32, to: u32) -> Operand {
        let high = self.steps.shift_left(value, 64 - from);
        let extended = self.steps.add(Step::Sar(high, 64 - from));
        self.steps.keep(extended, to)
    }

    /// `lea` of rax plus rax times a scale plus a displacement. It changes no flags.
    fn lea(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let to = destination(instruction)?;
        if instruction.memory_base() != Register::RAX {
            return Err(Cause::NotSupported);
        }
        let rax = self.read(Part::RAX)?;
        let displacement = Operand::Constant(instruction.memory_displacement64());
        let mut sum = self.steps.add(Step::Add(rax, displacement));
        match instruction.memory_index() {
            Register::None => {}
            Register::RAX => {
                let by = instruction.memory_index_scale().trailing_zeros();
                let index = self.steps.shift_left(rax, by);
                sum = self.steps.add(Step::Add(sum, index));
            }
            _ => return Err(Cause::NotSupported),
        }
        let value = self.steps.keep(sum, to.bits);
        self.write(to, value);
        Ok(())
    }

    fn logic(
        &mut self,
        instruction: &Instruction,
        step: fn(Operand, Operand) -> Step,
    ) -> Result<(), Cause> {
        let (bits, first, second) = self.two_operands(instruction)?;
        let result = self.steps.add(step(first, second));
        self.flags.set_by_result(result, bits);
        (self.flags.carry, self.flags.overflow) = (Flag::Clear, Flag::Clear);
        if instruction.mnemonic() != Mnemonic::Test {
            self.write(destination(instruction)?, result);
        }
        Ok(())
    }

    fn not(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let part = destination(instruction)?;
        let value = self.read(part)?;
        let inverted = self.steps.add(Step::Xor(value, Operand::Constant(u64::MAX)));
        let result = self.steps.keep(inverted, part.bits);
        self.write(part, result);
        Ok(())
    }

    fn add(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let (bits, left, right) = self.two_operands(instruction)?;
        let mut sum = self.steps.add(Step::Add(left, right));
        if instruction.mnemonic() == Mnemonic::Adc {
            let carry = self.steps.flag(self.flags.carry)?;
            sum = self.steps.add(Step::Add(sum, carry));
        }
        let total = self.steps.keep(sum, bits);
        self.set_by_sum(Sum { left, right, total, top: bits - 1 }, total);
        self.write(destination(instruction)?, total);
        Ok(())
    }

    fn subtract(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let (bits, from, right) = self.two_operands(instruction)?;
        let mut difference = self.steps.add(Step::Sub(from, right));
        if instruction.mnemonic() == Mnemonic::Sbb {
            let borrow = self.steps.flag(self.flags.carry)?;
            difference = self.steps.add(Step::Sub(difference, borrow));
        }
        let result = self.steps.keep(difference, bits);
        self.set_by_sum(Sum { left: result, right, total: from, top: bits - 1 }, result);
        if instruction.mnemonic() != Mnemonic::Cmp {
            self.write(destination(instruction)?, result);
        }
        Ok(())
    }

    /// `inc` and `dec` leave the carry as it was.
    fn step_by_one(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let part = destination(instruction)?;
        let value = self.read(part)?;
        let is_up = instruction.mnemonic() == Mnemonic::Inc;
        let step = if is_up { Step::Add(value, ONE) } else { Step::Sub(value, ONE) };
        let stepped = self.steps.add(step);
        let result = self.steps.keep(stepped, part.bits);
        let (left, total) = if is_up { (value, result) } else { (result, value) };
        let carry = self.flags.carry;
        self.set_by_sum(Sum { left, right: ONE, total, top: part.bits - 1 }, result);
        self.flags.carry = carry;
        self.write(part, result);
        Ok(())
    }

    /// `neg` subtracts from 0.
    fn negate(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let part = destination(instruction)?;
        let right = self.read(part)?;
        let difference = self.steps.add(Step::Sub(ZERO, right));
        let result = self.steps.keep(difference, part.bits);
        self.set_by_sum(Sum { left: result, right, total: ZERO, top: part.bits - 1 }, result);
        self.write(part, result);
        Ok(())
    }

    fn set_by_sum(&mut self, sum: Sum, result: Operand) {
        self.flags.set_by_result(result, sum.top + 1);
        self.flags.carry = Flag::Carry(sum);
        self.flags.overflow = Flag::Overflow(sum);
    }

    fn shift(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let part = destination(instruction)?;
        let (bits, count) = (part.bits, shift_count(instruction, part.bits)?);
        let value = self.read(part)?;
        let (shifted, last_out) = match instruction.mnemonic() {
            Mnemonic::Shl => (self.steps.shift_left(value, count), bits - count),
            Mnemonic::Shr => (self.steps.shift_right(value, count), count - 1),
            _ => {
                let high = self.steps.shift_left(value, 64 - bits);
                (self.steps.add(Step::Sar(high, 64 - bits + count)), count - 1)
            }
        };
        let result = self.steps.keep(shifted, bits);
        self.flags.set_by_result(result, bits);
        self.flags.carry = Flag::Bit(value, last_out);
        self.set_shift_overflow(value, result, bits, count);
        self.write(part, result);
        Ok(())
    }

    /// `rol` and `ror` change no other flags than carry and overflow.
    fn rotate(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let part = destination(instruction)?;
        let (bits, count) = (part.bits, shift_count(instruction, part.bits)?);
        let value = self.read(part)?;
        let is_left = instruction.mnemonic() == Mnemonic::Rol;
        let left = if is_left { count } else { bits - count };
        let high = self.steps.shift_left(value, left);
        let low = self.steps.shift_right(value, bits - left);
        let both = self.steps.add(Step::Or(high, low));
        let result = self.steps.keep(both, bits);
        self.flags.carry = Flag::Bit(result, if is_left { 0 } else { bits - 1 });
        self.set_shift_overflow(value, result, bits, count);
        self.write(part, result);
        Ok(())
    }

    /// A shift or rotation by one bit overflows if it changes the sign. By more bits, the flag is
    /// undefined.
    fn set_shift_overflow(&mut self, value: Operand, result: Operand, bits: u32, count: u32) {
        self.flags.overflow = match count {
            1 => Flag::Bit(self.steps.add(Step::Xor(value, result)), bits - 1),
            _ => Flag::Undefined,
        };
    }

    /// `bt` with an immediate leaves the zero flag as it was.
    fn test_bit(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let bits = width(instruction, 0)?;
        let Source::Immediate(Operand::Constant(index)) = source(instruction, 1, bits)? else {
            return Err(Cause::NotSupported);
        };
        let value = self.operand(instruction, 0, bits)?;
        self.flags = Flags {
            carry: Flag::Bit(value, index as u32 % bits),
            zero: self.flags.zero,
            ..Flags::default()
        };
        Ok(())
    }

    /// `setcc` and `cmovcc`. A `cmovcc` reads both operands, and writes one of them.
    fn conditional(&mut self, instruction: &Instruction) -> Result<(), Cause> {
        let code = instruction.condition_code();
        if code == ConditionCode::None {
            return Err(Cause::NotSupported);
        }
        let part = destination(instruction)?;
        let mut value = self.steps.condition(&self.flags, code)?;
        if instruction.op_count() == 2 {
            let no = self.read(part)?;
            let yes = self.operand(instruction, 1, part.bits)?;
            value = self.steps.add(Step::Choose(value, yes, no));
        }
        self.write(part, value);
        Ok(())
    }
}

/// The number of bits to shift by: less than all of the operand's, and not 0, which would leave
/// flags as they were.
fn shift_count(instruction: &Instruction, bits: u32) -> Result<u32, Cause> {
    let Source::Immediate(Operand::Constant(immediate)) = source(instruction, 1, 8)? else {
        return Err(Cause::NotSupported);
    };
    let count = immediate as u32 % if bits == 64 { 64 } else { 32 };
    if (1..bits).contains(&count) { Ok(count) } else { Err(Cause::NotSupported) }
}
