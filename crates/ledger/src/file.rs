//! The ledger's words in a mapped file. Layout: `docs/ledger.md`.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::{Acquire, Release};

use ebb_sys::mapping::Mapping;
use ebb_units::FRAMES_PER_HUGE;

use crate::entry::Word;

const MAGIC: u64 = u64::from_le_bytes(*b"EBBLEDGR");
const VERSION: u64 = 1;
const HEADER_BYTES: u64 = 4096;
/// Most huge frames: 128 TiB of guest-physical space.
const MAX_HUGE: u64 = 1 << 26;

/// Why a ledger file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// An operation of the file system failed.
    #[error("ledger: {0}")]
    Io(#[from] io::Error),
    /// The file is no ledger, or one of another version or VM.
    #[error("ledger {0}: not one of this version and VM")]
    Foreign(String),
    /// Guest-physical memory is larger than the format has room for.
    #[error("ledger: guest-physical memory ends beyond 128 TiB")]
    TooLarge,
    /// The ledger's file system is full.
    #[error("ledger: {0}: make room in the run directory")]
    NoRoom(#[source] io::Error),
}

/// When the tables of frames' words get their memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tables {
    /// All of them at once, 2 MiB for each GiB: a fault may need any table, and must be served.
    AtOnce,
    /// Each when its huge frame is split: see [`crate::SplitError::NoRoom`].
    WhenSplit,
}

/// Header, huge frames' words, and tables of frames' words: see [`Words::bytes_for`].
pub(crate) struct Words {
    mapping: Mapping,
    huge_count: u64,
}

impl Words {
    pub(crate) fn create(
        path: &Path,
        huge_count: u64,
        tables: Tables,
    ) -> Result<Words, LedgerError> {
        if huge_count > MAX_HUGE {
            return Err(LedgerError::TooLarge);
        }
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(Words::bytes_for(huge_count))?;
        let words = Words::map(&file, huge_count)?;
        let reserved = match tables {
            Tables::AtOnce => Words::bytes_for(huge_count),
            Tables::WhenSplit => Words::tables_at(huge_count),
        };
        words.mapping.reserve(0, reserved).map_err(LedgerError::NoRoom)?;
        words.header(1).store(VERSION, Release);
        words.header(2).store(huge_count, Release);
        // The magic last: a file without it is not complete.
        words.header(0).store(MAGIC, Release);
        Ok(words)
    }

    pub(crate) fn open(path: &Path, huge_count: u64) -> Result<Words, LedgerError> {
        let foreign = || LedgerError::Foreign(path.display().to_string());
        let file = File::options().read(true).write(true).open(path)?;
        if huge_count > MAX_HUGE || file.metadata()?.len() != Words::bytes_for(huge_count) {
            return Err(foreign());
        }
        let words = Words::map(&file, huge_count)?;
        // Reserved since the file was made. A file of another Ebb may have holes.
        words.mapping.reserve(0, Words::tables_at(huge_count)).map_err(LedgerError::NoRoom)?;
        let header = [0, 1, 2].map(|index| words.header(index).load(Acquire));
        if header == [MAGIC, VERSION, huge_count] { Ok(words) } else { Err(foreign()) }
    }

    fn map(file: &File, huge_count: u64) -> io::Result<Words> {
        Ok(Words { mapping: Mapping::new(file, 0, Words::bytes_for(huge_count))?, huge_count })
    }

    /// Returns where the tables begin. Huge frames' words fill whole pages, so that each table is a
    /// page, which takes no memory until it is written.
    fn tables_at(huge_count: u64) -> u64 {
        HEADER_BYTES + (huge_count * 8).next_multiple_of(4096)
    }

    fn bytes_for(huge_count: u64) -> u64 {
        Words::tables_at(huge_count) + huge_count * FRAMES_PER_HUGE * 8
    }

    fn header(&self, index: usize) -> &Word {
        &self.slice(0, 3)[index]
    }

    pub(crate) fn huge(&self) -> &[Word] {
        self.slice(HEADER_BYTES, self.huge_count as usize)
    }

    /// Returns the words of one huge frame's frames. Its index must be in range, and its table
    /// reserved.
    pub(crate) fn table(&self, huge: u64) -> &[Word] {
        self.slice(self.table_at(huge), FRAMES_PER_HUGE as usize)
    }

    /// Allocates memory for the table of a huge frame.
    pub(crate) fn reserve_table(&self, huge: u64) -> io::Result<()> {
        self.mapping.reserve(self.table_at(huge), FRAMES_PER_HUGE * 8)
    }

    fn table_at(&self, huge: u64) -> u64 {
        Words::tables_at(self.huge_count) + huge * FRAMES_PER_HUGE * 8
    }

    fn slice(&self, offset: u64, count: usize) -> &[Word] {
        match self.mapping.words(offset, count) {
            Some(words) => words,
            // Offsets come only from `huge_count` and checked indices.
            None => unreachable!("the ledger's own layout leaves its file"),
        }
    }
}
