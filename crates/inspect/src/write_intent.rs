//! Whether a processor is about to overwrite a whole page without reading any of it first. If so,
//! the page's old content need not be refilled for it (a false read).
//!
//! The instruction alone proves it: `rep stos` or `rep movs`, with which compilers and kernels
//! clear and copy pages. The VSwapper paper (section 4.2, the Preventer) also emulates single
//! writes into a buffer, for up to 1 ms and 32 pages. That needs a hypervisor that allows its
//! instructions to be emulated, and is not done here.
//!
//! A proof tells what the instruction does if it runs to its end. It can be interrupted before
//! that, even for good, and another processor can look. So the old content must stay available
//! until the page is whole.
//!
//! This module does not get the registers. Nothing in Ebb can read them for a VM that runs: QEMU
//! under TCG tells them only once the processor is stopped, which takes longer than the read that
//! would be avoided.

use ebb_units::{FRAME_BYTES, Gpa};
use iced_x86::{Code, Decoder, DecoderOptions, Instruction, OpKind, Register};

/// RFLAGS.TF: the processor is single-stepped.
const TRAP: u64 = 1 << 8;
/// RFLAGS.DF: string instructions go down.
const DOWN: u64 = 1 << 10;
const LOCK_PREFIX: u8 = 0xf0;
/// REPNE, which has no defined meaning with string stores.
const REPNE_PREFIX: u8 = 0xf2;
const BITS_32_END: u128 = 1 << 32;
const BITS_64_END: u128 = 1 << 64;

/// Tells what the instruction that faulted is about to do.
pub trait WriteIntent {
    /// Whether the instruction that faulted at the linear address `fault` writes every byte of the
    /// 4 KiB page there, from here to its end, and reads none that it has not written before.
    /// `false` means not proven.
    fn overwrites_page(&self, fault: u64) -> bool;
}

/// The default size of a code segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CodeSize {
    /// Real mode, or a 16-bit segment.
    Bits16,
    /// A 32-bit segment.
    Bits32,
    /// Long mode.
    Bits64,
}

impl CodeSize {
    fn bits(self) -> u32 {
        match self {
            CodeSize::Bits16 => 16,
            CodeSize::Bits32 => 32,
            CodeSize::Bits64 => 64,
        }
    }
}

/// A segment that grows up. For one that grows down, give a limit of 0, and it proves nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Linear address at which the segment begins.
    pub base: u64,
    /// Last offset in the segment. Without meaning in 64-bit code.
    pub limit: u32,
}

impl Segment {
    /// A segment that is all of memory.
    pub const FLAT: Segment = Segment { base: 0, limit: u32::MAX };
}

/// Registers of a processor at the instruction that faulted, which has not completed. After some
/// repetitions of a string instruction, they are those of the next repetition.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registers {
    /// Offset of the instruction in `cs`.
    pub rip: u64,
    /// Repetitions left.
    pub rcx: u64,
    /// Offset in `es` of the next write.
    pub rdi: u64,
    /// Offset of the next read.
    pub rsi: u64,
    /// The flags register.
    pub rflags: u64,
    /// Code size of `cs`.
    pub code_size: CodeSize,
    /// The code segment.
    pub cs: Segment,
    /// The segment that string instructions read from by default.
    pub ds: Segment,
    /// The segment that string instructions write to.
    pub es: Segment,
    /// The segment FS.
    pub fs: Segment,
    /// The segment GS.
    pub gs: Segment,
    /// The stack segment.
    pub ss: Segment,
}

/// A processor that waits for a fault to be served.
pub struct Stopped<'a, Translate> {
    /// The bytes at `rip`: 15, or fewer if there are no more.
    pub code: &'a [u8],
    /// The processor's registers.
    pub registers: Registers,
    /// Maps a linear address to guest-physical memory, by the processor's page tables. `None` if it
    /// is not mapped or not canonical.
    pub translate: Translate,
}

impl<Translate: Fn(u64) -> Option<Gpa>> WriteIntent for Stopped<'_, Translate> {
    fn overwrites_page(&self, fault: u64) -> bool {
        self.prove(fault & !(FRAME_BYTES - 1)).is_some()
    }
}

impl<Translate: Fn(u64) -> Option<Gpa>> Stopped<'_, Translate> {
    fn prove(&self, page: u64) -> Option<()> {
        let registers = &self.registers;
        let store = StringStore::decode(self.code, registers)?;
        if registers.rflags & TRAP != 0 {
            return None;
        }
        let to = store.side(registers.rdi, Register::ES, registers);
        let repetitions = to.repetitions_to_fill(page, store.left)?;
        to.span(repetitions)?;
        let code = Span { start: registers.linear(Register::CS, registers.rip), ..store.code };
        if code.meets(page) {
            return None;
        }
        match store.reads {
            None => Some(()),
            Some(segment) => {
                let from = store.side(registers.rsi, segment, registers).span(repetitions)?;
                self.reads_other_frames(from, page).then_some(())
            }
        }
    }

    /// Whether all of `from` is mapped, and not to the frame of `page`.
    fn reads_other_frames(&self, from: Span, page: u64) -> bool {
        let frame = |page| (self.translate)(page).map(Gpa::gfn);
        let Some(target) = frame(page) else { return false };
        from.pages().all(|page| frame(page).is_some_and(|frame| frame != target))
    }
}

impl Registers {
    fn segment(&self, register: Register) -> Segment {
        match register {
            Register::CS => self.cs,
            Register::ES => self.es,
            Register::FS => self.fs,
            Register::GS => self.gs,
            Register::SS => self.ss,
            _ => self.ds,
        }
    }

    /// Address at which a segment begins for this code size.
    fn base(&self, segment: Register) -> u64 {
        let base = self.segment(segment).base;
        match (self.code_size, segment) {
            (CodeSize::Bits64, Register::FS | Register::GS) => base,
            (CodeSize::Bits64, _) => 0,
            _ => base & u64::from(u32::MAX),
        }
    }

    fn linear(&self, segment: Register, offset: u64) -> u128 {
        u128::from(self.base(segment)) + u128::from(offset)
    }
}

/// A `rep stos` or `rep movs`, and what it has still to do.
struct StringStore {
    /// Bytes of one repetition.
    bytes: u128,
    left: u128,
    /// The segment that it reads from. `None` if it stores a register.
    reads: Option<Register>,
    address_bits: u32,
    down: bool,
    /// The instruction's own bytes, counted from `rip`.
    code: Span,
}

impl StringStore {
    fn decode(code: &[u8], registers: &Registers) -> Option<StringStore> {
        let bits = registers.code_size.bits();
        let instruction = Decoder::new(bits, code, DecoderOptions::NONE).decode();
        let (bytes, copies) = element(&instruction)?;
        let prefixes = code.get(..instruction.len())?;
        let odd = prefixes.iter().any(|byte| [LOCK_PREFIX, REPNE_PREFIX].contains(byte));
        if odd || !instruction.has_rep_prefix() {
            return None;
        }
        let address_bits = match instruction.op0_kind() {
            OpKind::MemoryESDI => 16,
            OpKind::MemoryESEDI => 32,
            OpKind::MemoryESRDI => 64,
            _ => return None,
        };
        Some(StringStore {
            bytes,
            left: low(registers.rcx, address_bits),
            reads: copies.then(|| instruction.memory_segment()),
            address_bits,
            down: registers.rflags & DOWN != 0,
            code: Span { start: 0, bytes: instruction.len() as u128 },
        })
    }

    fn side(&self, offset: u64, segment: Register, registers: &Registers) -> Side {
        let is_64 = registers.code_size == CodeSize::Bits64;
        let size_end = 1u128 << self.address_bits;
        let limit_end = u128::from(registers.segment(segment).limit) + 1;
        Side {
            base: u128::from(registers.base(segment)),
            offset: low(offset, self.address_bits),
            bytes: self.bytes,
            down: self.down,
            offset_end: if is_64 { size_end } else { size_end.min(limit_end) },
            linear_end: if is_64 { BITS_64_END } else { BITS_32_END },
        }
    }
}

/// The bytes that one repetition stores, and whether it copies them from memory.
fn element(instruction: &Instruction) -> Option<(u128, bool)> {
    Some(match instruction.code() {
        Code::Stosb_m8_AL => (1, false),
        Code::Stosw_m16_AX => (2, false),
        Code::Stosd_m32_EAX => (4, false),
        Code::Stosq_m64_RAX => (8, false),
        Code::Movsb_m8_m8 => (1, true),
        Code::Movsw_m16_m16 => (2, true),
        Code::Movsd_m32_m32 => (4, true),
        Code::Movsq_m64_m64 => (8, true),
        _ => return None,
    })
}

fn low(value: u64, bits: u32) -> u128 {
    u128::from(value) & ((1 << bits) - 1)
}

/// The position of one side (write or read) of a string instruction.
struct Side {
    /// Linear address of its segment.
    base: u128,
    /// Offset of the next repetition.
    offset: u128,
    /// Bytes of one repetition.
    bytes: u128,
    down: bool,
    /// End of the offsets: beyond it they wrap, or leave the segment.
    offset_end: u128,
    /// End of the linear addresses: beyond it they wrap.
    linear_end: u128,
}

impl Side {
    /// Counts the repetitions that fill all of `page`, of the `left` ones, if the next one is the
    /// first that touches it. `None` if they do not fill it.
    fn repetitions_to_fill(&self, page: u64, left: u128) -> Option<u128> {
        let (start, end) = (u128::from(page), u128::from(page) + u128::from(FRAME_BYTES));
        let next = self.base + self.offset;
        let after = next + self.bytes;
        let touches = next < end && after > start;
        let covers = if self.down { after >= end } else { next <= start };
        if !touches || !covers {
            return None;
        }
        let bytes = if self.down { after - start } else { end - next };
        Some(bytes.div_ceil(self.bytes)).filter(|&repetitions| repetitions <= left)
    }

    /// The bytes of one or more repetitions. `None` if they wrap.
    fn span(&self, repetitions: u128) -> Option<Span> {
        let bytes = repetitions * self.bytes;
        let first = match self.down {
            true => (self.offset + self.bytes).checked_sub(bytes)?,
            false => self.offset,
        };
        let span = Span { start: self.base + first, bytes };
        let fits = first + bytes <= self.offset_end && span.end() <= self.linear_end;
        fits.then_some(span)
    }
}

/// A range of linear addresses.
#[derive(Clone, Copy)]
struct Span {
    start: u128,
    bytes: u128,
}

impl Span {
    fn end(self) -> u128 {
        self.start + self.bytes
    }

    fn meets(self, page: u64) -> bool {
        let (start, end) = (u128::from(page), u128::from(page) + u128::from(FRAME_BYTES));
        self.start < end && start < self.end()
    }

    /// The pages that it touches: at most three, for a span that fills one page.
    fn pages(self) -> impl Iterator<Item = u64> {
        let page = u128::from(FRAME_BYTES);
        (self.start / page..self.end().div_ceil(page))
            .filter_map(move |number| u64::try_from(number * page).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 0x7f00_0000_3000;
    const SOURCE: u64 = 0x7f00_0000_8000;

    fn registers() -> Registers {
        let flat = Segment::FLAT;
        Registers {
            rip: 0x40_1000,
            rcx: 512,
            rdi: PAGE,
            rsi: SOURCE,
            rflags: 2,
            code_size: CodeSize::Bits64,
            cs: flat,
            ds: flat,
            es: flat,
            fs: flat,
            gs: flat,
            ss: flat,
        }
    }

    fn proves_at(code: &[u8], registers: Registers, fault: u64) -> bool {
        Stopped { code, registers, translate: |va| Some(Gpa(va)) }.overwrites_page(fault)
    }

    fn proves(code: &[u8], registers: Registers) -> bool {
        proves_at(code, registers, PAGE)
    }

    /// Each encoding, the bytes that it stores at once, and whether it copies.
    const STRINGS: [(&[u8], u64, bool); 8] = [
        (&[0xf3, 0xaa], 1, false),
        (&[0x66, 0xf3, 0xab], 2, false),
        (&[0xf3, 0xab], 4, false),
        (&[0xf3, 0x48, 0xab], 8, false),
        (&[0xf3, 0xa4], 1, true),
        (&[0xf3, 0x66, 0xa5], 2, true),
        (&[0xf3, 0xa5], 4, true),
        (&[0xf3, 0x48, 0xa5], 8, true),
    ];

    #[test]
    fn whole_pages_up_and_down() {
        for (code, bytes, _) in STRINGS {
            let up = Registers { rcx: 4096 / bytes, ..registers() };
            assert!(proves(code, up), "{code:x?}");
            assert!(!proves(code, Registers { rcx: up.rcx - 1, ..up }), "{code:x?}");
            assert!(proves(code, Registers { rcx: u64::MAX, ..up }), "{code:x?}");
            let last = 4096 - bytes;
            let down = Registers { rflags: DOWN, rdi: PAGE + last, rsi: SOURCE + last, ..up };
            assert!(proves_at(code, down, PAGE + last), "{code:x?}");
            assert!(!proves_at(code, Registers { rcx: up.rcx - 1, ..down }, PAGE + last));
        }
    }

    #[test]
    fn a_page_of_many_is_proven_when_its_turn_comes() {
        let code = &[0xf3, 0x48, 0xab];
        // Linux's clear_huge_page without ERMS: the first page, then the second.
        let all = Registers { rcx: 512 * 512, ..registers() };
        assert!(proves(code, all));
        assert!(!proves_at(code, all, PAGE + 4096));
        let second = Registers { rcx: 511 * 512, rdi: PAGE + 4096, ..all };
        assert!(proves_at(code, second, PAGE + 4096));
        // The last page is not covered whole.
        assert!(!proves(code, Registers { rcx: 511, ..all }));
    }

    #[test]
    fn a_fault_in_the_middle_proves_nothing() {
        for (code, bytes, _) in STRINGS {
            let begun = Registers { rdi: PAGE + bytes, rcx: 1 << 20, ..registers() };
            assert!(!proves(code, begun), "{code:x?}");
            let down = Registers { rflags: DOWN, rdi: PAGE + 4096 - 2 * bytes, ..begun };
            assert!(!proves(code, down), "{code:x?}");
        }
    }

    /// A repetition that begins in front of the page and reaches into it.
    #[test]
    fn what_is_not_aligned_may_cover_a_page() {
        let code = &[0xf3, 0x48, 0xab];
        let across = Registers { rdi: PAGE - 3, rcx: 513, ..registers() };
        assert!(proves(code, across));
        assert!(!proves(code, Registers { rcx: 512, ..across }));
        assert!(!proves(code, Registers { rdi: PAGE - 8, rcx: 600, ..across }));
        let down = Registers { rflags: DOWN, rdi: PAGE + 4093, ..across };
        assert!(proves(code, down));
        assert!(!proves(code, Registers { rcx: 512, ..down }));
    }

    #[test]
    fn only_repeated_string_stores_count() {
        let others: [&[u8]; 12] = [
            &[0xaa],                         // stosb
            &[0x48, 0xab],                   // stosq
            &[0xf2, 0xaa],                   // repne stosb
            &[0xf2, 0xf3, 0xaa],             // repne and rep
            &[0xf0, 0xf3, 0xaa],             // lock: invalid
            &[0xf3, 0xac],                   // rep lodsb
            &[0xf3, 0xa6],                   // repe cmpsb
            &[0xf3, 0x6c],                   // rep insb
            &[0x0f, 0xc3, 0x07],             // movnti [rdi], eax
            &[0xf3, 0x0f, 0x7f, 0x07],       // movdqu [rdi], xmm0
            &[0x48, 0xc7, 0x07, 0, 0, 0, 0], // mov qword [rdi], 0
            &[0xf3],                         // cut off
        ];
        for code in others {
            assert!(!proves(code, Registers { rcx: 1 << 20, ..registers() }), "{code:x?}");
        }
        assert!(!proves(&[], registers()));
    }

    #[test]
    fn a_source_in_the_page_proves_nothing() {
        let code = &[0xf3, 0x48, 0xa5];
        for rsi in [PAGE, PAGE - 4095, PAGE + 4088, PAGE - 8] {
            assert!(!proves(code, Registers { rsi, ..registers() }), "{rsi:x}");
        }
        for rsi in [PAGE + 4096, PAGE - 4096] {
            assert!(proves(code, Registers { rsi, ..registers() }), "{rsi:x}");
        }
        // The same frame at another address, or no frame.
        let translate = |va| match va {
            PAGE => Some(Gpa(0x5000)),
            SOURCE => Some(Gpa(0x6000)),
            _ => (va == SOURCE + 4096).then_some(Gpa(0x5000)),
        };
        let at = |rsi| Stopped { code, registers: Registers { rsi, ..registers() }, translate };
        assert!(at(SOURCE).overwrites_page(PAGE));
        assert!(!at(SOURCE + 1).overwrites_page(PAGE));
        assert!(!at(SOURCE + 4096).overwrites_page(PAGE));
        assert!(!at(SOURCE + 8192).overwrites_page(PAGE));
    }

    #[test]
    fn addresses_may_be_shorter_than_the_code() {
        let code = &[0x67, 0xf3, 0xaa];
        let page = 0xffff_e000;
        let high = 0xdead_0000_0000_0000;
        let short = Registers { rdi: high | page, rcx: high | 4096, ..registers() };
        assert!(proves_at(code, short, page));
        assert!(!proves_at(code, Registers { rcx: high | 4095, ..short }, page));
        assert!(proves_at(code, Registers { rdi: page + 4096, ..short }, page + 4096));
        assert!(!proves_at(&code[1..], short, page));
        // 16-bit addresses in 32-bit code.
        let es = Segment { base: 0x10_0000, limit: u32::MAX };
        let legacy = Registers { code_size: CodeSize::Bits32, es, ..short };
        let tiny = Registers { rdi: 0xabcd_f000, rcx: 0xffff_1000, ..legacy };
        assert!(proves_at(code, tiny, 0x10_f000));
        assert!(!proves_at(code, Registers { rcx: 0xffff_0fff, ..tiny }, 0x10_f000));
    }

    #[test]
    fn what_wraps_or_leaves_its_segment_proves_nothing() {
        let code = &[0xf3, 0xaa];
        let legacy = Registers { code_size: CodeSize::Bits32, rcx: 8192, ..registers() };
        let based = |base, limit| Segment { base, limit };
        let at = |es, rdi| proves_at(code, Registers { es, rdi, ..legacy }, 0x3000);
        assert!(at(Segment::FLAT, 0x3000));
        assert!(at(based(0x1000, 0x2fff), 0x2000));
        assert!(!at(based(0x1000, 0x2ffe), 0x2000));
        // The offset wraps in the middle of the page.
        let odd = based(0x3800, u32::MAX);
        assert!(!proves_at(code, Registers { es: odd, rdi: 0xffff_f800, ..legacy }, 0x3000));
        let top = Registers { rdi: u64::MAX - 4095, rcx: 8192, ..registers() };
        assert!(proves_at(code, top, u64::MAX));
        let source = Registers { rsi: u64::MAX - 4094, rcx: 4096, ..registers() };
        assert!(!proves(&[0xf3, 0xa4], source));
    }

    #[test]
    fn segments_move_what_is_read() {
        // rep movsb es:[rdi], fs:[rsi]
        let code = &[0x64, 0xf3, 0xa4];
        let fs = |base| Segment { base, limit: 0 };
        let from = |base, rsi| Registers { rcx: 4096, rsi, fs: fs(base), ..registers() };
        assert!(proves(code, from(SOURCE, 0)));
        assert!(!proves(code, from(PAGE, 0)));
        assert!(!proves(code, from(PAGE - 0x1000, 0xfff)));
        // Other segments have no base in 64-bit code.
        let ds = Segment { base: 0x1000, limit: 0 };
        let es = Segment { base: 0x2000, limit: 0 };
        assert!(proves(&[0xf3, 0xa4], Registers { rcx: 4096, ds, es, ..registers() }));
    }

    #[test]
    fn neither_its_own_code_nor_single_steps() {
        let code = &[0xf3, 0x48, 0xab];
        assert!(!proves(code, Registers { rip: PAGE - 2, ..registers() }));
        assert!(!proves(code, Registers { rip: PAGE + 4095, ..registers() }));
        assert!(proves(code, Registers { rip: PAGE - 3, ..registers() }));
        assert!(!proves(code, Registers { rflags: TRAP, ..registers() }));
    }
}
