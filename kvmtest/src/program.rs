//! The guest's programs. The sources, `guest/*.s`, describe what each does.

/// A program for a vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Program {
    /// Takes, checks, fills and frees blocks.
    Churn,
    /// Counts in many pages.
    Counters,
    /// Takes, fills, checks and frees pages.
    Reuse,
    /// Counts in one word.
    Writer,
}

impl Program {
    pub(crate) const ALL: [Program; 4] =
        [Program::Churn, Program::Counters, Program::Reuse, Program::Writer];

    pub(crate) fn code(self) -> &'static [u8] {
        match self {
            Program::Churn => include_bytes!(concat!(env!("OUT_DIR"), "/churn.bin")),
            Program::Counters => include_bytes!(concat!(env!("OUT_DIR"), "/counters.bin")),
            Program::Reuse => include_bytes!(concat!(env!("OUT_DIR"), "/reuse.bin")),
            Program::Writer => include_bytes!(concat!(env!("OUT_DIR"), "/writer.bin")),
        }
    }
}
