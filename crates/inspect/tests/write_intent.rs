//! The proof that a page is overwritten, compared with an interpreter that executes the instruction
//! byte by byte.

use ebb_inspect::{CodeSize, Registers, Segment, Stopped, WriteIntent};
use ebb_units::Gpa;
use proptest::prelude::*;

/// The linear address space: `PAGES` pages of 4 KiB, from `BASE` on.
const BASE: u64 = 0x10_0000;
const PAGES: u64 = 6;
const PAGE: u64 = 4096;

/// A random case: an instruction and its registers.
#[derive(Clone, Debug)]
struct Case {
    copies: bool,
    element: u64,
    repeated: bool,
    short_addresses: bool,
    code_size: CodeSize,
    down: bool,
    to: u64,
    from: u64,
    left: u64,
    /// Where each page is in physical memory.
    frames: Vec<u64>,
    es: u64,
    ds: u64,
}

impl Case {
    fn code(&self) -> Vec<u8> {
        let mut code = Vec::new();
        let is_long = self.code_size == CodeSize::Bits64;
        if self.short_addresses {
            code.push(0x67);
        }
        let wide = self.code_size == CodeSize::Bits16;
        if self.element == 2 && !wide || self.element == 4 && wide {
            code.push(0x66);
        }
        if self.repeated {
            code.push(0xf3);
        }
        if self.element == 8 {
            assert!(is_long);
            code.push(0x48);
        }
        let opcode = if self.copies { 0xa4 } else { 0xaa };
        code.push(opcode + u8::from(self.element > 1));
        code
    }

    fn address_bits(&self) -> u32 {
        match (self.code_size, self.short_addresses) {
            (CodeSize::Bits64, false) => 64,
            (CodeSize::Bits64, true) | (CodeSize::Bits32, false) | (CodeSize::Bits16, true) => 32,
            (CodeSize::Bits32, true) | (CodeSize::Bits16, false) => 16,
        }
    }

    fn base(&self, base: u64) -> u64 {
        if self.code_size == CodeSize::Bits64 { 0 } else { base }
    }

    fn registers(&self) -> Registers {
        let flat = Segment::FLAT;
        let based = |base| Segment { base, ..flat };
        Registers {
            rip: 0x1000,
            rcx: self.left,
            rdi: self.to.wrapping_sub(self.base(self.es)),
            rsi: self.from.wrapping_sub(self.base(self.ds)),
            rflags: 2 | u64::from(self.down) << 10,
            code_size: self.code_size,
            cs: flat,
            ds: based(self.ds),
            es: based(self.es),
            fs: flat,
            gs: flat,
            ss: flat,
        }
    }

    /// Physical address of a linear address. `None` outside.
    fn physical(&self, linear: u64) -> Option<u64> {
        let page = linear.checked_sub(BASE)? / PAGE;
        Some(self.frames.get(page as usize)? * PAGE + linear % PAGE)
    }
}

/// Executes the instruction on a machine of bytes. Returns whether it overwrites the frame of the
/// first byte that it writes, and reads none of it first.
fn overwrites(case: &Case) -> bool {
    let bits = case.address_bits();
    let mask = if bits == 64 { u64::MAX } else { (1 << bits) - 1 };
    let registers = case.registers();
    let (mut di, mut si) = (registers.rdi & mask, registers.rsi & mask);
    let mut left = registers.rcx & mask;
    let linear = |base: u64, offset: u64| {
        let linear = case.base(base).wrapping_add(offset);
        if case.code_size == CodeSize::Bits64 { linear } else { linear & 0xffff_ffff }
    };
    let Some(target) = case.physical(case.to).map(|at| at / PAGE) else { return false };
    let (mut written, mut count) = (vec![false; PAGE as usize], 0);
    // More repetitions would be far beyond the page.
    left = left.min(if case.repeated { 2 * PAGE } else { 1 });
    while left > 0 {
        for byte in (0..case.element).filter(|_| case.copies) {
            let at = case.physical(linear(case.ds, si.wrapping_add(byte) & mask));
            match at {
                None => return false,
                Some(at) if at / PAGE == target && !written[(at % PAGE) as usize] => return false,
                Some(_) => {}
            }
        }
        for byte in 0..case.element {
            match case.physical(linear(case.es, di.wrapping_add(byte) & mask)) {
                Some(at) if at / PAGE == target => {
                    let was = std::mem::replace(&mut written[(at % PAGE) as usize], true);
                    count += u64::from(!was);
                }
                // What lies beside the page may be unmapped: that is another fault.
                _ => {}
            }
        }
        if count == PAGE {
            return true;
        }
        let step = if case.down { case.element.wrapping_neg() } else { case.element };
        (di, si) = (di.wrapping_add(step) & mask, si.wrapping_add(step) & mask);
        left -= 1;
    }
    false
}

fn case() -> impl Strategy<Value = Case> {
    let place = |pages: u64| {
        let near = prop_oneof![Just(0u64), Just(4088), Just(4092), Just(4095), 0..PAGE];
        (0..pages, near).prop_map(|(page, at)| BASE + page * PAGE + at)
    };
    let size = prop_oneof![
        6 => Just(CodeSize::Bits64),
        2 => Just(CodeSize::Bits32),
        1 => Just(CodeSize::Bits16)
    ];
    let frames = prop_oneof![
        3 => Just((1..=PAGES).collect::<Vec<u64>>()),
        1 => prop::collection::vec(1..4u64, PAGES as usize),
    ];
    let base = prop_oneof![3 => Just(0u64), 1 => Just(BASE - 0x3000), 1 => Just(BASE + 0x123)];
    let shape = (any::<bool>(), 0..4u32, prop::bool::weighted(0.95), any::<bool>(), size);
    let run = (any::<bool>(), place(PAGES), place(PAGES));
    let left = prop_oneof![0..4300u64, Just(512), Just(4096), Just(513), Just(1 << 40)];
    (shape, run, left, frames, base.clone(), base).prop_map(
        |(
            (copies, log, repeated, short_addresses, code_size),
            (down, to, from),
            left,
            frames,
            es,
            ds,
        )| {
            let log = if code_size == CodeSize::Bits64 { log } else { log.min(2) };
            let element = 1 << log;
            Case {
                copies,
                element,
                repeated,
                short_addresses,
                code_size,
                down,
                to,
                from,
                left,
                frames,
                es,
                ds,
            }
        },
    )
}

/// The page at which the instruction would fault first.
fn fault(case: &Case) -> u64 {
    case.to
}

fn proves(case: &Case) -> bool {
    let code = case.code();
    let translate = |va| case.physical(va).map(Gpa);
    Stopped { code: &code, registers: case.registers(), translate }.overwrites_page(fault(case))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8_000))]

    /// Whatever is proven also happens.
    #[test]
    fn what_is_proven_is_true(case in case()) {
        if proves(&case) {
            prop_assert!(overwrites(&case), "{:x?}", case.code());
        }
    }

    /// In an ordinary program, whatever happens is also proven.
    #[test]
    fn what_is_true_is_proven(case in case()) {
        let plain = Case {
            frames: (1..=PAGES).collect(),
            es: 0,
            ds: 0,
            repeated: true,
            code_size: CodeSize::Bits64,
            short_addresses: false,
            ..case
        };
        // The instruction reads of the page only what it wrote there before, which is not worth a
        // proof.
        let reads_its_own = plain.copies && plain.from.abs_diff(plain.to) < 2 * PAGE;
        if overwrites(&plain) && !reads_its_own {
            prop_assert!(proves(&plain), "{:x?}", plain.code());
        }
    }
}

/// Without whole pages among the cases, the tests above would prove little.
#[test]
fn the_cases_are_worth_their_while() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let cases = (0..4000).map(|_| case().new_tree(&mut runner).expect("a case").current());
    let proven = cases.filter(proves).count();
    assert!(proven > 100, "{proven}");
}
