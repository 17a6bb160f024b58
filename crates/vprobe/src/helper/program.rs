//! A program without jumps over numbers of 64 bits. It is evaluated over many pages at once, one
//! lane for each page, step by step.

/// Pages that one pass over the steps evaluates. A step is a loop of this fixed length.
const LANES: usize = 64;

/// A number for each page of a batch.
type Lanes = [u64; LANES];

/// A number that a step uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operand {
    /// What an earlier step gave, by its index.
    Step(u16),
    /// The same for all pages.
    Constant(u64),
}

/// One operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// A word of the page's metadata, by its index.
    Word(u16),
    And(Operand, Operand),
    Or(Operand, Operand),
    Xor(Operand, Operand),
    Add(Operand, Operand),
    Sub(Operand, Operand),
    /// Shifts by fewer than 64 bits.
    Shl(Operand, u32),
    Shr(Operand, u32),
    /// Keeps the sign.
    Sar(Operand, u32),
    /// 1 if the number is 0, else 0.
    IsZero(Operand),
    /// 1 if the low byte has an even number of bits set, else 0.
    IsEven(Operand),
    /// The second number where the first is 1, the third where the first is 0.
    Choose(Operand, Operand, Operand),
}

/// The lowest `bits` bits, 1 to 64 of them.
pub const fn low_bits(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

/// Steps of a program that is being made.
#[derive(Default)]
pub struct Steps(Vec<Step>);

impl Steps {
    /// Appends a step and returns its number.
    pub fn add(&mut self, step: Step) -> Operand {
        let index = self.0.len() as u16;
        self.0.push(step);
        Operand::Step(index)
    }

    /// The lowest `bits` bits of a number.
    pub fn keep(&mut self, value: Operand, bits: u32) -> Operand {
        match bits {
            64 => value,
            _ => self.add(Step::And(value, Operand::Constant(low_bits(bits)))),
        }
    }

    pub fn shift_left(&mut self, value: Operand, by: u32) -> Operand {
        if by == 0 { value } else { self.add(Step::Shl(value, by)) }
    }

    pub fn shift_right(&mut self, value: Operand, by: u32) -> Operand {
        if by == 0 { value } else { self.add(Step::Shr(value, by)) }
    }

    /// Bit `index` of a number: 0 or 1.
    pub fn bit(&mut self, value: Operand, index: u32) -> Operand {
        let shifted = self.shift_right(value, index);
        self.keep(shifted, 1)
    }

    /// 1 for 0, and 0 for 1.
    pub fn invert(&mut self, bit: Operand) -> Operand {
        self.add(Step::Xor(bit, Operand::Constant(1)))
    }

    /// Loads `bits` bits that begin at byte `at` of the page's metadata.
    pub fn load(&mut self, at: usize, bits: u32) -> Operand {
        let (word, shift) = ((at / 8) as u16, (at % 8 * 8) as u32);
        let first = self.add(Step::Word(word));
        let mut value = self.shift_right(first, shift);
        if shift + bits > 64 {
            let second = self.add(Step::Word(word + 1));
            let high = self.shift_left(second, 64 - shift);
            value = self.add(Step::Or(value, high));
        }
        self.keep(value, bits)
    }

    pub fn into_program(self, result: Operand) -> Program {
        Program { steps: self.0, result }
    }
}

/// Steps, and which number is the result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    steps: Vec<Step>,
    result: Operand,
}

impl Program {
    /// Replaces `values` by the result for each page, of `page_words` words, in `pages`.
    pub fn evaluate(&self, pages: &[u64], page_words: usize, values: &mut Vec<u64>) {
        values.clear();
        let mut lanes = vec![[0; LANES]; self.steps.len()];
        for batch in pages.chunks(LANES * page_words) {
            for (index, step) in self.steps.iter().enumerate() {
                let (before, rest) = lanes.split_at_mut(index);
                step.run(before, batch, page_words, &mut rest[0]);
            }
            let whole_pages = batch.len() / page_words;
            values.extend_from_slice(&self.result.lanes(&lanes)[..whole_pages]);
        }
    }
}

impl Operand {
    fn lanes(self, done: &[Lanes]) -> Lanes {
        match self {
            Operand::Step(index) => done[usize::from(index)],
            Operand::Constant(value) => [value; LANES],
        }
    }
}

impl Step {
    /// `before` has what the steps before this one gave.
    fn run(self, before: &[Lanes], batch: &[u64], page_words: usize, into: &mut Lanes) {
        let of = |operand: Operand| operand.lanes(before);
        *into = match self {
            Step::Word(word) => words(batch, page_words, word.into()),
            Step::And(a, b) => each_two(of(a), of(b), |a, b| a & b),
            Step::Or(a, b) => each_two(of(a), of(b), |a, b| a | b),
            Step::Xor(a, b) => each_two(of(a), of(b), |a, b| a ^ b),
            Step::Add(a, b) => each_two(of(a), of(b), u64::wrapping_add),
            Step::Sub(a, b) => each_two(of(a), of(b), u64::wrapping_sub),
            Step::Shl(a, by) => each(of(a), |a| a << by),
            Step::Shr(a, by) => each(of(a), |a| a >> by),
            Step::Sar(a, by) => each(of(a), |a| (a.cast_signed() >> by).cast_unsigned()),
            Step::IsZero(a) => each(of(a), |a| u64::from(a == 0)),
            Step::IsEven(a) => each(of(a), |a| u64::from((a as u8).count_ones().is_multiple_of(2))),
            Step::Choose(bit, yes, no) => {
                let unlike = each_two(of(yes), of(no), |yes, no| yes ^ no);
                let chosen = each_two(unlike, of(bit), |unlike, bit| unlike & bit.wrapping_neg());
                each_two(chosen, of(no), |chosen, no| chosen ^ no)
            }
        };
    }
}

fn words(batch: &[u64], page_words: usize, index: usize) -> Lanes {
    let mut words = [0; LANES];
    for (word, page) in words.iter_mut().zip(batch.chunks_exact(page_words)) {
        *word = page[index];
    }
    words
}

fn each(mut lanes: Lanes, operation: impl Fn(u64) -> u64) -> Lanes {
    for lane in &mut lanes {
        *lane = operation(*lane);
    }
    lanes
}

fn each_two(mut first: Lanes, second: Lanes, operation: impl Fn(u64, u64) -> u64) -> Lanes {
    for (first, second) in first.iter_mut().zip(&second) {
        *first = operation(*first, *second);
    }
    first
}
