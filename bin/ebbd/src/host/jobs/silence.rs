//! Looks at a VM whose process does not answer.

use ebb_api::{ApiErrorBody, ErrorCode};

/// Looks in a row without an answer after which a job fails: each may take a minute.
const LOOKS_MOST: u32 = 5;

/// How often in a row there was no answer.
#[derive(Default)]
pub struct Silence(u32);

impl Silence {
    /// Whether the job may look once more after this refusal. The VM's process may be recovered just
    /// now, and what was asked for is on record.
    pub fn bears(&mut self, why: &ApiErrorBody) -> bool {
        let is_silence =
            matches!(why.code, Some(ErrorCode::Unavailable | ErrorCode::OutcomeUnknown));
        self.0 += u32::from(is_silence);
        is_silence && self.0 <= LOOKS_MOST
    }

    /// Notes that there was an answer.
    pub fn end(&mut self) {
        self.0 = 0;
    }
}
