//! A processor that executes a helper on one page's metadata, instruction by instruction: the
//! reference for the translation.
//!
//! It follows Intel's manual, volume 2. It keeps rax as bytes, computes sums in numbers that are
//! wide enough, and shifts bit by bit, so that it has no formula in common with the translation.

use std::ops::Range;

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

/// Returns rax after `code`, with rdi at the first byte of `page`. Whatever an instruction leaves
/// open, and rax and the flags at the beginning, follows from `undefined`.
///
/// # Panics
/// The code reads outside `page`, or has another instruction than helpers may have.
pub fn run(code: &[u8], page: &[u8], undefined: u64) -> u64 {
    let mut processor = Processor::new(undefined);
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    loop {
        let instruction = decoder.decode();
        if instruction.mnemonic() == Mnemonic::Ret {
            return u64::from_le_bytes(processor.rax);
        }
        let bytes = &code[instruction.ip() as usize..instruction.next_ip() as usize];
        processor.execute(&instruction, bytes, page);
    }
}

struct Processor {
    rax: [u8; 8],
    carry: bool,
    zero: bool,
    sign: bool,
    overflow: bool,
    parity: bool,
    undefined: u64,
}

impl Processor {
    fn new(undefined: u64) -> Processor {
        let mut processor = Processor {
            rax: undefined.to_le_bytes(),
            carry: false,
            zero: false,
            sign: false,
            overflow: false,
            parity: false,
            undefined,
        };
        processor.carry = processor.anything();
        processor.zero = processor.anything();
        processor.sign = processor.anything();
        processor.overflow = processor.anything();
        processor.parity = processor.anything();
        processor
    }

    /// A bit that nobody may rely on.
    fn anything(&mut self) -> bool {
        let next = self.undefined.wrapping_mul(0x5851_f42d_4c95_7f2d);
        self.undefined = next.wrapping_add(0x1405_7b7e_f767_814f);
        self.undefined >> 63 == 1
    }

    fn execute(&mut self, instruction: &Instruction, bytes: &[u8], page: &[u8]) {
        let get = |processor: &Processor, index| processor.operand(instruction, index, page);
        match instruction.mnemonic() {
            Mnemonic::Nop | Mnemonic::Endbr64 => {}
            Mnemonic::Mov | Mnemonic::Movzx => self.set(instruction, get(self, 1)),
            Mnemonic::Movsx | Mnemonic::Movsxd => {
                let value = signed(get(self, 1), width(instruction, 1));
                self.set(instruction, value as u64);
            }
            Mnemonic::Cbw => self.widen(Register::AL, Register::AX),
            Mnemonic::Cwde => self.widen(Register::AX, Register::EAX),
            Mnemonic::Cdqe => self.widen(Register::EAX, Register::RAX),
            Mnemonic::Lea => self.lea(instruction),
            Mnemonic::And => self.logic(instruction, get(self, 0) & get(self, 1), true),
            Mnemonic::Test => self.logic(instruction, get(self, 0) & get(self, 1), false),
            Mnemonic::Or => self.logic(instruction, get(self, 0) | get(self, 1), true),
            Mnemonic::Xor => self.logic(instruction, get(self, 0) ^ get(self, 1), true),
            Mnemonic::Not => self.set(instruction, !get(self, 0)),
            Mnemonic::Bt => self.test_bit(instruction, get(self, 0), get(self, 1)),
            Mnemonic::Shl | Mnemonic::Shr | Mnemonic::Sar | Mnemonic::Rol | Mnemonic::Ror => {
                self.shift(instruction, get(self, 0), get(self, 1));
            }
            Mnemonic::Inc | Mnemonic::Dec | Mnemonic::Neg => {
                self.count(instruction, get(self, 0));
            }
            Mnemonic::Add | Mnemonic::Adc | Mnemonic::Sub | Mnemonic::Sbb | Mnemonic::Cmp => {
                self.arithmetic(instruction, get(self, 0), get(self, 1))
            }
            _ => self.conditional(instruction, bytes, page),
        }
    }

    /// The value of an operand, without the bits above the instruction's width.
    fn operand(&self, instruction: &Instruction, index: u32, page: &[u8]) -> u64 {
        match instruction.op_kind(index) {
            OpKind::Register => little_endian(&self.rax[part(instruction.op_register(index))]),
            OpKind::Memory => {
                assert_eq!(instruction.memory_base(), Register::RDI, "{instruction}");
                assert_eq!(instruction.memory_index(), Register::None, "{instruction}");
                let at = usize::try_from(instruction.memory_displacement64() as i64)
                    .expect("a read behind the first byte");
                little_endian(&page[at..at + instruction.memory_size().size()])
            }
            _ => instruction.immediate(index) & mask(width(instruction, 0)),
        }
    }

    /// Writes the first operand. 32 bits clear the upper half.
    fn set(&mut self, instruction: &Instruction, value: u64) {
        self.set_register(instruction.op0_register(), value);
    }

    fn set_register(&mut self, register: Register, value: u64) {
        if register == Register::EAX {
            self.rax = [0; 8];
        }
        let into = &mut self.rax[part(register)];
        let bytes = into.len();
        into.copy_from_slice(&value.to_le_bytes()[..bytes]);
    }

    fn widen(&mut self, from: Register, to: Register) {
        let value = little_endian(&self.rax[part(from)]);
        self.set_register(to, signed(value, from.size() * 8) as u64);
    }

    fn lea(&mut self, instruction: &Instruction) {
        assert_eq!(instruction.memory_base(), Register::RAX, "{instruction}");
        let rax = u64::from_le_bytes(self.rax);
        let mut address = rax.wrapping_add(instruction.memory_displacement64());
        if instruction.memory_index() == Register::RAX {
            for _ in 0..instruction.memory_index_scale() {
                address = address.wrapping_add(rax);
            }
        }
        self.set(instruction, address);
    }

    fn set_by_result(&mut self, result: u64, bits: usize) {
        self.zero = result & mask(bits) == 0;
        self.sign = signed(result, bits) < 0;
        self.parity = (0..8).filter(|bit| result >> bit & 1 == 1).count().is_multiple_of(2);
    }

    fn logic(&mut self, instruction: &Instruction, result: u64, writes: bool) {
        self.set_by_result(result, width(instruction, 0));
        (self.carry, self.overflow) = (false, false);
        if writes {
            self.set(instruction, result);
        }
    }

    fn sum(&mut self, first: u64, second: u64, carry: bool, bits: usize) -> u64 {
        let wide = u128::from(first) + u128::from(second) + u128::from(carry);
        let right = signed(first, bits) + signed(second, bits) + i128::from(carry);
        let result = wide as u64 & mask(bits);
        self.set_by_result(result, bits);
        self.carry = wide > u128::from(mask(bits));
        self.overflow = right != signed(result, bits);
        result
    }

    fn difference(&mut self, first: u64, second: u64, borrow: bool, bits: usize) -> u64 {
        let right = signed(first, bits) - signed(second, bits) - i128::from(borrow);
        let result = right as u64 & mask(bits);
        self.set_by_result(result, bits);
        self.carry = u128::from(first) < u128::from(second) + u128::from(borrow);
        self.overflow = right != signed(result, bits);
        result
    }

    fn arithmetic(&mut self, instruction: &Instruction, first: u64, second: u64) {
        let (bits, carry) = (width(instruction, 0), self.carry);
        let result = match instruction.mnemonic() {
            Mnemonic::Add => self.sum(first, second, false, bits),
            Mnemonic::Adc => self.sum(first, second, carry, bits),
            Mnemonic::Sbb => self.difference(first, second, carry, bits),
            _ => self.difference(first, second, false, bits),
        };
        if instruction.mnemonic() != Mnemonic::Cmp {
            self.set(instruction, result);
        }
    }

    fn count(&mut self, instruction: &Instruction, value: u64) {
        let (bits, carry) = (width(instruction, 0), self.carry);
        let result = match instruction.mnemonic() {
            Mnemonic::Inc => self.sum(value, 1, false, bits),
            Mnemonic::Dec => self.difference(value, 1, false, bits),
            _ => self.difference(0, value, false, bits),
        };
        if instruction.mnemonic() != Mnemonic::Neg {
            self.carry = carry;
        }
        self.set(instruction, result);
    }

    fn shift(&mut self, instruction: &Instruction, before: u64, count: u64) {
        let bits = width(instruction, 0);
        let count = count % if bits == 64 { 64 } else { 32 };
        let top = |value: u64| value >> (bits - 1) & 1 == 1;
        let top_bit = |is_set: bool| u64::from(is_set) << (bits - 1);
        let mut value = before;
        for _ in 0..count {
            let lost_low = value & 1 == 1;
            (self.carry, value) = match instruction.mnemonic() {
                Mnemonic::Shl => (top(value), value << 1 & mask(bits)),
                Mnemonic::Rol => (top(value), value << 1 & mask(bits) | u64::from(top(value))),
                Mnemonic::Shr => (lost_low, value >> 1),
                Mnemonic::Sar => (lost_low, value >> 1 | top_bit(top(value))),
                _ => (lost_low, value >> 1 | top_bit(lost_low)),
            };
        }
        self.overflow = match instruction.mnemonic() {
            _ if count != 1 => self.anything(),
            Mnemonic::Shl | Mnemonic::Rol => top(value) != self.carry,
            Mnemonic::Shr => top(before),
            Mnemonic::Sar => false,
            _ => top(value) != top(value << 1),
        };
        if !matches!(instruction.mnemonic(), Mnemonic::Rol | Mnemonic::Ror) {
            self.set_by_result(value, bits);
        }
        self.set(instruction, value);
    }

    fn test_bit(&mut self, instruction: &Instruction, value: u64, index: u64) {
        self.carry = value >> (index % width(instruction, 0) as u64) & 1 == 1;
        self.sign = self.anything();
        self.overflow = self.anything();
        self.parity = self.anything();
    }

    /// The opcodes of setcc and cmovcc end in the number of the condition.
    fn conditional(&mut self, instruction: &Instruction, bytes: &[u8], page: &[u8]) {
        let escape = bytes.iter().position(|&byte| byte == 0x0f).expect("setcc or cmovcc");
        let opcode = bytes[escape + 1];
        let holds = self.holds(opcode & 0xf);
        let value = match opcode >> 4 {
            0x9 => u64::from(holds),
            0x4 => {
                let value = self.operand(instruction, 1, page);
                if holds { value } else { self.operand(instruction, 0, page) }
            }
            _ => panic!("helpers may not have {instruction}"),
        };
        self.set(instruction, value);
    }

    /// Odd conditions are the even ones inverted.
    fn holds(&self, condition: u8) -> bool {
        let less = self.sign != self.overflow;
        let even = [
            self.overflow,
            self.carry,
            self.zero,
            self.carry || self.zero,
            self.sign,
            self.parity,
            less,
            less || self.zero,
        ];
        even[usize::from(condition / 2)] != (condition % 2 == 1)
    }
}

/// The bytes of rax that a register is.
fn part(register: Register) -> Range<usize> {
    match register {
        Register::AL => 0..1,
        Register::AH => 1..2,
        Register::AX => 0..2,
        Register::EAX => 0..4,
        Register::RAX => 0..8,
        other => panic!("helpers may not use the value of {other:?}"),
    }
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn width(instruction: &Instruction, index: u32) -> usize {
    match instruction.op_kind(index) {
        OpKind::Memory => instruction.memory_size().size() * 8,
        _ => instruction.op_register(index).size() * 8,
    }
}

fn mask(bits: usize) -> u64 {
    u64::MAX >> (64 - bits)
}

/// The number that the lowest `bits` bits mean in two's complement.
fn signed(value: u64, bits: usize) -> i128 {
    let value = i128::from(value & mask(bits));
    if value >> (bits - 1) == 1 { value - (1 << bits) } else { value }
}
