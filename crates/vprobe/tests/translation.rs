//! Translated helpers against a processor that executes them: of supported instructions in any
//! order, and of such code with a byte changed.

use ebb_vprobe::*;
use proptest::prelude::*;
use testkit::vprobe::processor;

const PAGE_WORDS: usize = 8;
/// More than one batch of pages.
const PAGES: usize = 67;
const RET: u8 = 0xc3;

/// What an instruction is made of. Fields that it has no use for are left out.
#[derive(Clone, Copy, Debug)]
struct Draft {
    form: u8,
    /// 0: 8 bits, 1: 16, 2: 32, 3: 64.
    width: u8,
    /// Selects one of several operations.
    choice: u8,
    /// Where to read: 8 bytes from there lie in the metadata.
    at: u8,
    immediate: u64,
}

impl Draft {
    /// The prefix for the width, and an opcode whose lowest bit tells 8 bits from more.
    fn sized(self, opcode: u8) -> Vec<u8> {
        match self.width {
            0 => vec![opcode],
            1 => vec![0x66, opcode | 1],
            2 => vec![opcode | 1],
            _ => vec![0x48, opcode | 1],
        }
    }

    /// As [`Draft::sized`] for an opcode of two bytes that knows no 8 bits.
    fn wide(self, opcode: u8) -> Vec<u8> {
        match self.width {
            0 | 2 => vec![0x0f, opcode],
            1 => vec![0x66, 0x0f, opcode],
            _ => vec![0x48, 0x0f, opcode],
        }
    }

    fn immediate(self) -> Vec<u8> {
        let bytes = [1, 2, 4, 4][usize::from(self.width)];
        self.immediate.to_le_bytes()[..bytes].to_vec()
    }

    fn byte(self) -> Vec<u8> {
        vec![self.immediate as u8]
    }

    /// rax, with `extension` in the middle of the byte, or metadata.
    fn operand(self, extension: u8) -> Vec<u8> {
        match self.immediate >> 63 {
            0 => self.memory(extension),
            _ => vec![0xc0 | extension << 3],
        }
    }

    fn memory(self, extension: u8) -> Vec<u8> {
        vec![0x47 | extension << 3, self.at]
    }

    /// A number of bits to shift by that shifts out no more than there are.
    fn count(self) -> Vec<u8> {
        let bits = 8u8 << self.width;
        vec![1 + self.immediate as u8 % (bits - 1)]
    }

    fn code(self) -> Vec<u8> {
        let choice = |among: &[u8]| among[usize::from(self.choice) % among.len()];
        let arithmetic = choice(&[0, 1, 2, 3, 4, 5, 6, 7]);
        let register = |extension: u8| vec![0xc0 | extension << 3];
        let shift = choice(&[0, 1, 4, 5, 7]);
        match self.form {
            0 => [self.sized(0x8a), self.memory(0)].concat(),
            1 => [self.wide(choice(&[0xb6, 0xb7, 0xbe, 0xbf])), self.operand(0)].concat(),
            2 => vec![0x48, 0x63, 0x47, self.at], // movsxd rax, [rdi+at]
            3 => [self.sized(0x80), register(arithmetic), self.immediate()].concat(),
            4 => [self.sized(0x83), register(arithmetic), self.byte()].concat(),
            5 => [self.sized(arithmetic << 3 | 2), self.operand(0)].concat(),
            6 => [self.sized(0x38), self.memory(0)].concat(), // cmp [rdi+at], rax
            7 => [self.sized(0x80), self.memory(7), self.immediate()].concat(), // cmp with metadata
            8 => [self.sized(0xc0), register(shift), self.count()].concat(),
            9 => [self.sized(0xd0), register(shift)].concat(),
            10 => [self.sized(0xf6), register(choice(&[2, 3]))].concat(), // not, neg
            11 => [self.sized(0xfe), register(choice(&[0, 1]))].concat(), // inc, dec
            12 => [self.sized(0xf6), self.operand(0), self.immediate()].concat(), // test
            13 => [self.sized(0x84), register(0)].concat(),               // test rax, rax
            14 => vec![0x0f, 0x90 | self.choice & 0xf, choice(&[0xc0, 0xc0, 0xc4])], // setcc
            15 => [self.wide(0x40 | self.choice & 0xf), self.operand(0)].concat(), // cmovcc
            16 => [self.wide(0xba), self.operand(4), self.byte()].concat(), // bt
            17 => choose(self.choice, &[&[0x98], &[0x66, 0x98], &[0x48, 0x98]]),
            18 => choose(self.choice, &[&[0x88, 0xc4], &[0x8a, 0xc4], &[0x0f, 0xb6, 0xc4]]),
            19 => choose(self.choice, &[&[0x28, 0xe0], &[0x80, 0xcc, 0x81], &[0xfe, 0xc4]]),
            20 => [self.sized(0xc6), register(0), self.immediate()].concat(), // mov
            21 => [vec![0x48, 0xb8], self.immediate.to_le_bytes().to_vec()].concat(),
            22 => [vec![0x8d, 0x40], self.byte()].concat(), // lea eax, [rax+byte]
            23 => [vec![0x48, 0x8d, 0x44, choice(&[0x00, 0x40, 0x80, 0xc0])], self.byte()].concat(),
            _ => choose(
                self.choice,
                &[&[0x90], &[0x0f, 0x1f, 0x40, 0x00], &[0xf3, 0x0f, 0x1e, 0xfa]],
            ),
        }
    }
}

fn choose(choice: u8, among: &[&[u8]]) -> Vec<u8> {
    among[usize::from(choice) % among.len()].to_vec()
}

fn draft() -> impl Strategy<Value = Draft> {
    (0u8..25, 0u8..4, any::<u8>(), 0u8..=56, any::<u64>()).prop_map(
        |(form, width, choice, at, immediate)| Draft { form, width, choice, at, immediate },
    )
}

/// Code that defines all of rax and of the flags, then some instructions, then a ret.
fn program() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(draft(), 0..16).prop_map(|drafts| {
        // mov rax, [rdi+40]; test rax, rax
        let mut code = vec![0x48, 0x8b, 0x47, 0x28, 0x48, 0x85, 0xc0];
        for next in drafts.into_iter().map(Draft::code) {
            if code.len() + next.len() < MAX_CODE_BYTES {
                code.extend(next);
            }
        }
        code.push(RET);
        code
    })
}

fn metadata() -> impl Strategy<Value = Vec<u64>> {
    let edges = prop::sample::select(vec![0, 1, u64::MAX, 1 << 63, 1 << 31, 0x7fff_ffff, 0x8080]);
    prop::collection::vec(prop_oneof![3 => any::<u64>(), 1 => edges], PAGES * PAGE_WORDS)
}

/// Compares a helper with the processor, whatever the processor leaves undefined.
fn compare(
    kind: Kind,
    code: &[u8],
    pages: &[u64],
    undefined: [u64; 2],
) -> Result<(), TestCaseError> {
    let size = PageSize::new(8 * PAGE_WORDS as u16).expect("whole words");
    let Ok(helper) = Helper::new(kind, code, size) else {
        return Err(TestCaseError::reject("refused"));
    };
    let mut values = Vec::new();
    helper.evaluate(pages, &mut values);
    prop_assert_eq!(values.len(), PAGES);
    for (page, value) in pages.chunks(PAGE_WORDS).zip(values) {
        let bytes: Vec<u8> = page.iter().flat_map(|word| word.to_le_bytes()).collect();
        for undefined in undefined {
            let rax = processor::run(code, &bytes, undefined);
            let expected = match kind {
                Kind::PageFree => u64::from(rax as u8 != 0),
                Kind::PageOrder => rax,
            };
            prop_assert_eq!(value, expected, "{:x?} of {:x?}", code, page);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_helper_gives_what_the_processor_gives(
        code in program(),
        pages in metadata(),
        undefined in any::<[u64; 2]>(),
    ) {
        compare(Kind::PageOrder, &code, &pages, undefined)?;
        compare(Kind::PageFree, &code, &pages, undefined)?;
    }

    #[test]
    fn changed_code_is_refused_or_gives_what_the_processor_gives(
        mut code in program(),
        change in (any::<prop::sample::Index>(), any::<u8>()),
        pages in metadata(),
        undefined in any::<[u64; 2]>(),
    ) {
        let (at, value) = change;
        let at = at.index(code.len());
        code[at] = value;
        match compare(Kind::PageFree, &code, &pages, undefined) {
            Err(TestCaseError::Reject(_)) => {}
            result => result?,
        }
    }
}
