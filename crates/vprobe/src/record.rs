//! The registration record: one page of the guest's memory, which its kernel module fills in and
//! the host finds. `docs/vprobe.md` draws it.

mod answer;
mod error;
mod range;

use crc::{CRC_32_ISCSI, Crc};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};

pub use self::answer::{Answer, Reason};
pub use self::error::{RangeFault, RecordError};
pub use self::range::MetadataRange;
use crate::{Helper, Kind, PageSize, Refusal};

/// First word of a record.
pub const MAGIC: u64 = u64::from_le_bytes(*b"EBBVPROB");
/// Version of the record that this crate reads.
pub const VERSION: u32 = 1;
/// Words of the page that a record lies in.
pub const RECORD_WORDS: usize = FRAME_BYTES as usize / 8;
/// Greatest order of a free block that a record may name: 2^20 frames.
pub const MAX_ORDER: u8 = 20;

/// Byte of the page at which the token lies, 8 bytes.
pub const TOKEN_AT: u64 = 16;
/// Byte of the page at which the record's own virtual address lies, 8 bytes.
pub const VIRTUAL_ADDRESS_AT: u64 = 32;
/// Byte of the page at which the state lies, 4 bytes.
pub const STATE_AT: u64 = 44;
/// Byte of the page at which the host writes the token once it has answered, 8 bytes.
pub const ACKNOWLEDGEMENT_AT: u64 = 48;
/// Byte of the page at which the host writes [`Answer::code`], 4 bytes, before the acknowledgement.
pub const ANSWER_AT: u64 = 56;

const VERSION_LENGTH: usize = 1;
const TOKEN: usize = 2;
const OWN_ADDRESS: usize = 3;
const VIRTUAL_ADDRESS: usize = 4;
const CHECKSUM_STATE: usize = 5;
const ACKNOWLEDGEMENT: usize = 6;
const ANSWER_SIZES: usize = 7;
const CODE_LENGTHS: usize = 8;
const PAGE_FREE: usize = 9;
const PAGE_ORDER: usize = 17;
const RANGES: usize = 25;
/// Words for the code of one helper.
const CODE_WORDS: usize = 8;
const RANGE_WORDS: usize = 4;
/// The words up to here have the same meaning in every version.
const COMMON_WORDS: usize = 8;

const _: () = assert!(TOKEN as u64 * 8 == TOKEN_AT);
const _: () = assert!(VIRTUAL_ADDRESS as u64 * 8 == VIRTUAL_ADDRESS_AT);
const _: () = assert!(CHECKSUM_STATE as u64 * 8 + 4 == STATE_AT);
const _: () = assert!(ACKNOWLEDGEMENT as u64 * 8 == ACKNOWLEDGEMENT_AT);
const _: () = assert!(ANSWER_SIZES as u64 * 8 == ANSWER_AT);
const _: () = assert!(PAGE_FREE + CODE_WORDS == PAGE_ORDER && PAGE_ORDER + CODE_WORDS == RANGES);

static CRC32C: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

/// Whether a page may hold a record, by its first word.
pub const fn may_be_record(first_word: u64) -> bool {
    first_word == MAGIC
}

/// Whether a registration is in force.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The guest has registered it.
    Registered,
    /// The guest has withdrawn it.
    Withdrawn,
}

impl State {
    /// The number in the record.
    pub fn number(self) -> u32 {
        match self {
            State::Registered => 1,
            State::Withdrawn => 2,
        }
    }
}

/// What a guest has registered, checked as far as that needs no other memory than the record's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    token: u64,
    virtual_address: u64,
    state: State,
    page_size: PageSize,
    max_order: u8,
    page_free: Vec<u8>,
    page_order: Vec<u8>,
    ranges: Vec<MetadataRange>,
}

impl Record {
    /// Checks a copy of the page at `at`. Whether its metadata lies in RAM is left to
    /// [`Record::check_ram`], whether its code is accepted to [`Record::helper`].
    ///
    /// # Errors
    /// The page is no record, or an invalid one: [`RecordError::answer`] tells which.
    pub fn parse(words: &[u64; RECORD_WORDS], at: Gpa) -> Result<Record, RecordError> {
        let length = check_seal(words, at)?;
        let version = words[VERSION_LENGTH] as u32;
        if version != VERSION {
            return Err(RecordError::Version(version));
        }
        let virtual_address = words[VIRTUAL_ADDRESS];
        if virtual_address >> 63 == 0 || !virtual_address.is_multiple_of(FRAME_BYTES) {
            return Err(RecordError::VirtualAddress(virtual_address));
        }
        let [_, _, _, _, low, high, max_order, count] = words[ANSWER_SIZES].to_le_bytes();
        let page_bytes = u16::from_le_bytes([low, high]);
        let page_size = PageSize::new(page_bytes).ok_or(RecordError::PageBytes(page_bytes))?;
        if max_order > MAX_ORDER {
            return Err(RecordError::MaxOrder(max_order));
        }
        let [free_length, order_length, zero @ ..] = words[CODE_LENGTHS].to_le_bytes();
        if zero != [0; 6] {
            return Err(RecordError::Reserved);
        }
        Ok(Record {
            token: words[TOKEN],
            virtual_address,
            state: state(words)?,
            page_size,
            max_order,
            page_free: code(Kind::PageFree, &words[PAGE_FREE..PAGE_ORDER], free_length)?,
            page_order: code(Kind::PageOrder, &words[PAGE_ORDER..RANGES], order_length)?,
            ranges: ranges(&words[RANGES..], count, length, page_size)?,
        })
    }

    /// The random number that names this registration. Never 0.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Whether the registration is in force.
    pub fn state(&self) -> State {
        self.state
    }

    /// The record's own address in the guest's kernel, page-aligned.
    pub fn virtual_address(&self) -> u64 {
        self.virtual_address
    }

    /// Size of one frame's page metadata.
    pub fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// Greatest order of a free block, up to [`MAX_ORDER`].
    pub fn max_order(&self) -> u8 {
        self.max_order
    }

    /// Where the page metadata lies, in the order of the frames that it describes.
    pub fn ranges(&self) -> &[MetadataRange] {
        &self.ranges
    }

    /// Returns the address of a frame's page metadata, if it is registered.
    pub fn page_at(&self, gfn: Gfn) -> Option<Gpa> {
        let index = self.ranges.partition_point(|range| range.frames.end() <= gfn);
        self.ranges.get(index)?.page_at(gfn, self.page_size)
    }

    /// The code of a helper, 1 to 64 bytes.
    pub fn code(&self, kind: Kind) -> &[u8] {
        match kind {
            Kind::PageFree => &self.page_free,
            Kind::PageOrder => &self.page_order,
        }
    }

    /// Verifies and translates a helper.
    ///
    /// # Errors
    /// As for [`Helper::new`].
    pub fn helper(&self, kind: Kind) -> Result<Helper, Refusal> {
        Helper::new(kind, self.code(kind), self.page_size)
    }

    /// Asks `in_ram` of each run of frames that holds page metadata.
    ///
    /// # Errors
    /// The first range that does not lie in RAM.
    pub fn check_ram(&self, in_ram: impl Fn(FrameRange) -> bool) -> Result<(), RecordError> {
        match self.ranges.iter().position(|range| !in_ram(range.metadata_frames())) {
            Some(index) => Err(RecordError::Range { index, fault: RangeFault::OutsideRam }),
            None => Ok(()),
        }
    }
}

/// Checks what tells a record from any other page, in every version. Returns the length in bytes.
fn check_seal(words: &[u64; RECORD_WORDS], at: Gpa) -> Result<usize, RecordError> {
    if !may_be_record(words[0]) {
        return Err(RecordError::Magic);
    }
    let length = (words[VERSION_LENGTH] >> 32) as usize;
    let whole_words = COMMON_WORDS * 8 <= length && length.is_multiple_of(8);
    let used = words.get(..length / 8).filter(|_| whole_words);
    let used = used.ok_or(RecordError::Length(length))?;
    if checksum(used) != words[CHECKSUM_STATE] as u32 {
        return Err(RecordError::Checksum);
    }
    if words[OWN_ADDRESS] != at.0 {
        return Err(RecordError::OwnAddress(Gpa(words[OWN_ADDRESS])));
    }
    if words[TOKEN] == 0 {
        return Err(RecordError::Token);
    }
    Ok(length)
}

/// CRC-32C of a record, with what changes after the registration as zero.
fn checksum(used: &[u64]) -> u32 {
    let mut digest = CRC32C.digest();
    for (index, &word) in used.iter().enumerate() {
        let word = match index {
            CHECKSUM_STATE | ACKNOWLEDGEMENT => 0,
            ANSWER_SIZES => word & !u64::from(u32::MAX),
            _ => word,
        };
        digest.update(&word.to_le_bytes());
    }
    digest.finalize()
}

fn state(words: &[u64; RECORD_WORDS]) -> Result<State, RecordError> {
    let number = (words[CHECKSUM_STATE] >> 32) as u32;
    let known = [State::Registered, State::Withdrawn].into_iter();
    let state = { known }.find(|state| state.number() == number);
    state.ok_or(RecordError::State(number))
}

fn code(kind: Kind, words: &[u64], length: u8) -> Result<Vec<u8>, RecordError> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    if !(1..=bytes.len()).contains(&usize::from(length)) {
        return Err(RecordError::CodeLength { kind, bytes: length });
    }
    match bytes.split_off(length.into()).iter().all(|&byte| byte == 0) {
        true => Ok(bytes),
        false => Err(RecordError::Reserved),
    }
}

fn ranges(
    words: &[u64],
    count: u8,
    length: usize,
    page_size: PageSize,
) -> Result<Vec<MetadataRange>, RecordError> {
    let expected = (RANGES + usize::from(count) * RANGE_WORDS) * 8;
    if count == 0 || length != expected {
        return Err(RecordError::RangeCount { count, length });
    }
    let (quads, _) = words.as_chunks::<RANGE_WORDS>();
    let mut ranges: Vec<MetadataRange> = Vec::with_capacity(count.into());
    for (index, quad) in quads.iter().take(count.into()).enumerate() {
        let fault = |fault| RecordError::Range { index, fault };
        let range = MetadataRange::parse(quad, page_size).map_err(fault)?;
        range.check_behind(&ranges).map_err(fault)?;
        ranges.push(range);
    }
    Ok(ranges)
}
