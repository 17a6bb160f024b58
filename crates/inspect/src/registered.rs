//! A guest whose kernel has registered its page metadata (V-Probe, section 4). Nothing else of it
//! is known, and it need not be Linux. `docs/vprobe.md` says what it promises.

mod blocks;
mod find;

use std::array;
use std::sync::atomic::Ordering::SeqCst;

use ebb_units::{FRAME_BYTES, FrameRange, Gpa};
use ebb_vprobe::{
    ACKNOWLEDGEMENT_AT, ANSWER_AT, Answer, Helper, Kind, RECORD_WORDS, Reason, Record, RecordError,
    STATE_AT, State, TOKEN_AT,
};
use twox_hash::XxHash3_128;

pub use self::find::{RECORDS_MAX, find_records, may_hold_record};
use crate::memory::in_ram;
use crate::{GuestMemory, PageTables};

/// Most frames that may be described for each frame of RAM: holes may be described, too.
const DESCRIBED_PART: u64 = 2;
/// Divisor of the RAM that gives the most metadata. Linux has a 64th of it.
const METADATA_PART: u64 = 8;

/// A registration that is in force, as it was when it was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Registered {
    at: Gpa,
    record: Record,
    page_free: Helper,
    page_order: Helper,
    /// The RAM's segments.
    ram: Vec<(Gpa, u64)>,
}

/// Why a record is no registration that Ebb may act on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotRegistered {
    /// The record is invalid.
    #[error("its registration is refused: {0}")]
    Record(#[from] RecordError),
    /// A helper is refused.
    #[error("its registration is refused: the helper {kind} breaks {refusal}")]
    Helper {
        /// The helper.
        kind: Kind,
        /// Why.
        refusal: ebb_vprobe::Refusal,
    },
    /// Ranges that no RAM of this size has.
    #[error(
        "its registration is refused: {metadata_frames} frames of metadata that describe {frames} \
         frames are too much for {ram_frames} frames of RAM"
    )]
    TooMuch {
        /// Frames that hold metadata.
        metadata_frames: u64,
        /// Frames that are described.
        frames: u64,
        /// The guest's RAM.
        ram_frames: u64,
    },
    /// The guest has withdrawn it.
    #[error("its registration was withdrawn by its kernel")]
    Withdrawn,
}

impl NotRegistered {
    /// What the host tells the guest, if it tells anything.
    pub fn answer(&self) -> Option<Answer> {
        match self {
            Self::Record(error) => error.answer(),
            Self::Helper { kind, refusal } => Some(Answer::Refused(refusal.reason(*kind))),
            Self::TooMuch { .. } => Some(Answer::Refused(Reason::Ranges)),
            Self::Withdrawn => None,
        }
    }
}

impl Registered {
    /// Reads the record at `at`, and checks all of it but who wrote it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(mem: &dyn GuestMemory, at: Gpa) -> Result<Registered, NotRegistered> {
        let words = page(mem, at).ok_or(RecordError::Magic)?;
        let record = Record::parse(&words, at)?;
        if record.state() == State::Withdrawn {
            return Err(NotRegistered::Withdrawn);
        }
        let ram = mem.segments();
        record.check_ram(|frames| in_ram(&ram, frames))?;
        check_size(&record, &ram)?;
        let helper =
            |kind| record.helper(kind).map_err(|refusal| NotRegistered::Helper { kind, refusal });
        let (page_free, page_order) = (helper(Kind::PageFree)?, helper(Kind::PageOrder)?);
        Ok(Registered { at, page_free, page_order, ram, record })
    }

    /// What was registered.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Names this registration. Nobody can tell the number who has not read the record, whose token
    /// is random.
    pub fn digest(&self) -> u64 {
        registration_digest(self.at, self.record.token())
    }

    /// Whether the record is still in place and not withdrawn. Reads three words.
    pub fn is_in_force(&self, mem: &dyn GuestMemory) -> bool {
        is_in_force(self.record.token(), |byte| mem.word(Gpa(self.at.0 + byte)))
    }

    /// Whether the page tables that a vCPU uses map the record where it says that its kernel has
    /// mapped it. A kernel may hide itself from the tables that its processes use.
    pub fn is_mapped_by(&self, mem: &dyn GuestMemory, cr3: u64, levels: u32) -> bool {
        PageTables::of_cr3(cr3, levels).maps(mem, self.record.virtual_address(), self.at)
    }

    /// As [`Registered::is_mapped_by`], also for a process of a kernel that hides itself
    /// ([`PageTables::pair_of_cr3`]). This tells that a kernel still runs, and not that it has made
    /// the record.
    pub fn may_be_mapped_by(&self, mem: &dyn GuestMemory, cr3: u64, levels: u32) -> bool {
        let va = self.record.virtual_address();
        PageTables::pair_of_cr3(cr3, levels).iter().any(|tables| tables.maps(mem, va, self.at))
    }

    /// Writes the host's answer and then its acknowledgement into the record. Returns whether it
    /// did: not if the record has changed since it was read.
    pub fn answer(&self, mem: &dyn GuestMemory, answer: Answer) -> bool {
        answer_record(mem, self.at, self.record.token(), Some(answer))
    }

    /// The frames that each look reads: the record and all metadata.
    pub fn needed_frames(&self) -> Vec<FrameRange> {
        let record = FrameRange::new(self.at.gfn(), 1);
        [record].into_iter().chain(self.metadata_frames()).collect()
    }

    /// The frames that hold page metadata, a run for each range of the record.
    pub fn metadata_frames(&self) -> impl Iterator<Item = FrameRange> {
        self.record.ranges().iter().map(|range| range.metadata_frames())
    }
}

/// Names the registration of the record at `at` with this token.
pub fn registration_digest(at: Gpa, token: u64) -> u64 {
    XxHash3_128::oneshot_with_seed(at.0, &token.to_le_bytes()) as u64
}

/// Answers the record at `at`, which names itself by `token`: writes the answer, and then the
/// acknowledgement. `None` takes the acknowledgement back. Returns whether it did.
///
/// Writes into guest memory, so the caller has checked that the guest's kernel keeps a record there
/// ([`RecordError::answer`]). No write can be atomic with the guest's reuse of the page: a kernel
/// keeps the page for ever (`docs/vprobe.md`).
pub fn answer_record(mem: &dyn GuestMemory, at: Gpa, token: u64, answer: Option<Answer>) -> bool {
    let Some(words) = mem.words(at, RECORD_WORDS) else { return false };
    let is_in_force = is_in_force(token, |byte| Some(words[byte as usize / 8].load(SeqCst)));
    let [acknowledgement, answered] =
        [ACKNOWLEDGEMENT_AT, ANSWER_AT].map(|at| &words[at as usize / 8]);
    let (before, last) = (answered.load(SeqCst), acknowledgement.load(SeqCst));
    let Some(answer) = answer else {
        return is_in_force && acknowledgement.compare_exchange(token, 0, SeqCst, SeqCst).is_ok();
    };
    // Whatever else is in this word is the guest's, so a change of it is not overwritten.
    let after = before & !u64::from(u32::MAX) | u64::from(answer.code());
    is_in_force
        && answered.compare_exchange(before, after, SeqCst, SeqCst).is_ok()
        && acknowledgement.compare_exchange(last, token, SeqCst, SeqCst).is_ok()
}

/// Whether a record with this token is in force. `word` reads the word in which a byte of its page
/// lies.
fn is_in_force(token: u64, word: impl Fn(u64) -> Option<u64>) -> bool {
    let state = word(STATE_AT / 8 * 8).map(|word| word >> 32);
    word(0).is_some_and(ebb_vprobe::may_be_record)
        && word(TOKEN_AT) == Some(token)
        && state == Some(State::Registered.number().into())
}

/// Checks that the metadata is no more than RAM of this size may have. Every look reads all of it,
/// and it stays resident.
fn check_size(record: &Record, ram: &[(Gpa, u64)]) -> Result<(), NotRegistered> {
    let ram_frames: u64 = ram.iter().map(|(_, bytes)| bytes / FRAME_BYTES).sum();
    let frames: u64 = record.ranges().iter().map(|range| range.frames.count).sum();
    let metadata_frames: u64 =
        record.ranges().iter().map(|range| range.metadata_frames().count).sum();
    let is_too_much = frames > ram_frames * DESCRIBED_PART
        || metadata_frames > (ram_frames / METADATA_PART).max(1);
    match is_too_much {
        true => Err(NotRegistered::TooMuch { metadata_frames, frames, ram_frames }),
        false => Ok(()),
    }
}

/// Reads each word of a page once.
fn page(mem: &dyn GuestMemory, at: Gpa) -> Option<[u64; RECORD_WORDS]> {
    let words = mem.words(at, RECORD_WORDS)?;
    Some(array::from_fn(|index| words[index].load(SeqCst)))
}
