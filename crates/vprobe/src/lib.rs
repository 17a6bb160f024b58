//! What a guest registers so that its host finds its free memory, as in V-Probe (Wang et al.,
//! ATC'23, sections 4.1 and 4.2): where its page metadata lies, and two helpers, pieces of x86-64
//! code that read it. `docs/vprobe.md` draws the record.
//!
//! ```text
//! page_size  bytes of one frame's page metadata
//! record     the registration record, and the host's answer
//! helper     a helper: its code is verified, translated, and evaluated over many pages
//! ```
//!
//! **The guest is hostile, and its code is never executed.** A helper becomes a program without
//! jumps, whose only input is a copy of page metadata (decision 46). A guest that lies misleads Ebb
//! about its own frames only.
//!
//! This crate has no I/O and no clock, and knows no guest memory: its callers read the words.
#![forbid(unsafe_code)]

mod helper;
mod page_size;
mod record;

pub use helper::{Cause, Helper, Kind, MAX_CODE_BYTES, Refusal};
pub use page_size::PageSize;
pub use record::{
    ACKNOWLEDGEMENT_AT, ANSWER_AT, Answer, MAGIC, MAX_ORDER, MetadataRange, RECORD_WORDS,
    RangeFault, Reason, Record, RecordError, STATE_AT, State, TOKEN_AT, VERSION,
    VIRTUAL_ADDRESS_AT, may_be_record,
};
