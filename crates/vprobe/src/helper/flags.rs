//! The processor's flags. Most of them are never read, so each one is a recipe, and its steps are
//! made when it is read. AF is left out: no supported instruction reads it.

use iced_x86::ConditionCode;

use super::Cause;
use super::program::{Operand, Step, Steps};

/// How to make a flag.
#[derive(Clone, Copy, Default)]
pub enum Flag {
    /// Nothing has set it, or its value is left open by the instruction that did.
    #[default]
    Undefined,
    /// 0.
    Clear,
    /// A bit of a number.
    Bit(Operand, u32),
    /// Whether a number is 0.
    IsZero(Operand),
    /// Whether the low byte of a number has an even number of bits set.
    IsEven(Operand),
    /// Whether a bit is carried out of a sum.
    Carry(Sum),
    /// Whether a signed sum overflows.
    Overflow(Sum),
}

/// `total = left + right`, perhaps with a carry. A difference `a - b = c` is the sum `a = c + b`,
/// and what it borrows is what the sum carries.
#[derive(Clone, Copy)]
pub struct Sum {
    pub left: Operand,
    pub right: Operand,
    pub total: Operand,
    /// Index of the highest bit.
    pub top: u32,
}

/// All flags that conditions name.
#[derive(Clone, Copy, Default)]
pub struct Flags {
    pub carry: Flag,
    pub zero: Flag,
    pub sign: Flag,
    pub overflow: Flag,
    pub parity: Flag,
}

impl Flags {
    /// Sets what follows from a result of `bits` bits alone.
    pub fn set_by_result(&mut self, result: Operand, bits: u32) {
        self.zero = Flag::IsZero(result);
        self.sign = Flag::Bit(result, bits - 1);
        self.parity = Flag::IsEven(result);
    }
}

impl Steps {
    /// Adds the steps that make `flag` 0 or 1.
    pub fn flag(&mut self, flag: Flag) -> Result<Operand, Cause> {
        match flag {
            Flag::Undefined => Err(Cause::Undefined),
            Flag::Clear => Ok(Operand::Constant(0)),
            Flag::Bit(value, index) => Ok(self.bit(value, index)),
            Flag::IsZero(value) => Ok(self.add(Step::IsZero(value))),
            Flag::IsEven(value) => Ok(self.add(Step::IsEven(value))),
            Flag::Carry(sum) => Ok(self.carry(sum)),
            Flag::Overflow(sum) => Ok(self.overflow(sum)),
        }
    }

    /// A bit is carried out of the top if both numbers have it, or one has it and the total lost
    /// it.
    fn carry(&mut self, Sum { left, right, total, top }: Sum) -> Operand {
        let both = self.add(Step::And(left, right));
        let any = self.add(Step::Or(left, right));
        let not_total = self.add(Step::Xor(total, Operand::Constant(u64::MAX)));
        let lost = self.add(Step::And(any, not_total));
        let carried = self.add(Step::Or(both, lost));
        self.bit(carried, top)
    }

    /// A sum overflows if its sign is neither that of the one number nor that of the other.
    fn overflow(&mut self, Sum { left, right, total, top }: Sum) -> Operand {
        let unlike_left = self.add(Step::Xor(left, total));
        let unlike_right = self.add(Step::Xor(right, total));
        let unlike = self.add(Step::And(unlike_left, unlike_right));
        self.bit(unlike, top)
    }

    /// Adds the steps that tell whether a condition holds: 0 or 1.
    pub fn condition(&mut self, flags: &Flags, code: ConditionCode) -> Result<Operand, Cause> {
        use ConditionCode as Is;
        let holds = match code {
            Is::o | Is::no => self.flag(flags.overflow)?,
            Is::b | Is::ae => self.flag(flags.carry)?,
            Is::e | Is::ne => self.flag(flags.zero)?,
            Is::s | Is::ns => self.flag(flags.sign)?,
            Is::p | Is::np => self.flag(flags.parity)?,
            Is::be | Is::a => {
                let (carry, zero) = (self.flag(flags.carry)?, self.flag(flags.zero)?);
                self.add(Step::Or(carry, zero))
            }
            Is::l | Is::ge => self.less(flags)?,
            Is::le | Is::g => {
                let (less, zero) = (self.less(flags)?, self.flag(flags.zero)?);
                self.add(Step::Or(less, zero))
            }
            _ => return Err(Cause::NotSupported),
        };
        match code {
            Is::no | Is::ae | Is::ne | Is::ns | Is::np | Is::a | Is::ge | Is::g => {
                Ok(self.invert(holds))
            }
            _ => Ok(holds),
        }
    }

    fn less(&mut self, flags: &Flags) -> Result<Operand, Cause> {
        let (sign, overflow) = (self.flag(flags.sign)?, self.flag(flags.overflow)?);
        Ok(self.add(Step::Xor(sign, overflow)))
    }
}
