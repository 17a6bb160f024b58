//! A helper: a piece of the guest's x86-64 code that reads one frame's page metadata (V-Probe's
//! paper, section 4.2 and figure 6).
//!
//! ```text
//! rules       the six rules of the paper: code -> instructions
//! translator  instructions -> a program
//! operands    what an instruction names: registers, immediates, page metadata
//! flags       the processor's flags, each as a recipe that is followed when the flag is read
//! program     a program without jumps, evaluated over many pages at once
//! refusal     why code is refused
//! ```

mod flags;
mod operands;
mod program;
mod refusal;
mod rules;
mod translator;

use std::fmt;

use self::program::Program;
pub use self::refusal::{Cause, Refusal};
pub use self::rules::MAX_CODE_BYTES;
use self::translator::translate;
use crate::PageSize;

/// Which of the two helpers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Whether the frame is the first one of a free block: a `bool`, in al.
    PageFree,
    /// The order of that block: an `unsigned long`, in rax.
    PageOrder,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::PageFree => "page_free",
            Kind::PageOrder => "page_order",
        })
    }
}

/// A helper that was accepted, as a program of Ebb's own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Helper {
    program: Program,
    page_size: PageSize,
}

impl Helper {
    /// Verifies `code` by the rules of the paper and translates it.
    ///
    /// # Errors
    /// The first instruction that breaks a rule, or that Ebb does not translate.
    pub fn new(kind: Kind, code: &[u8], page_size: PageSize) -> Result<Helper, Refusal> {
        let checked = rules::check(code, page_size)?;
        Ok(Helper { program: translate(kind, &checked)?, page_size })
    }

    /// Replaces `values` by the helper's value for each page's metadata in `pages`. `pages` has
    /// [`PageSize::words`] words for each page; words at its end that make no whole page are left
    /// out.
    ///
    /// [`Kind::PageFree`] gives 0 or 1, [`Kind::PageOrder`] any number.
    pub fn evaluate(&self, pages: &[u64], values: &mut Vec<u64>) {
        self.program.evaluate(pages, self.page_size.words(), values);
    }
}
