//! The seal of each slot: its generation and its tag, in a mapped file that outlives the daemon.
//! Layout: `docs/swap-store.md`.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ebb_sys::mapping::Mapping;

use crate::number_set::NumberSet;
use crate::sealer::{Protection, SlotGeneration, Tag};
use crate::{CLUSTER_SLOTS, Identity, StoreError};

/// The name of the file.
pub(crate) const FILE: &str = "swap.seals";

const MAGIC: u64 = u64::from_le_bytes(*b"EBBSEALS");
const VERSION: u64 = 1;
const HEADER_BYTES: u64 = 4096;
/// Where the header says which file or device the pages are in.
const IDENTITY_BYTE: u64 = 32;
const ROW_WORDS: usize = 4;
const ROW_BYTES: u64 = ROW_WORDS as u64 * 8;
/// Bytes of a cluster's rows: whole pages, so that they can be allocated and mapped by themselves.
const CLUSTER_BYTES: u64 = CLUSTER_SLOTS * ROW_BYTES;
const _: () = assert!(CLUSTER_BYTES.is_multiple_of(4096));
/// Bound on generations: a nonce has 48 bits for one, half of its bits.
const GENERATION_END: u64 = 1 << 48;

pub(crate) struct Seals {
    mapping: Mapping,
    slot_count: u64,
    /// Clusters whose rows have memory, as far as this process knows.
    prepared: NumberSet,
}

impl Seals {
    /// Makes the file, with all slots empty.
    pub(crate) fn create(run: &Path, kind: Protection, count: u64) -> Result<Seals, StoreError> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.open(run.join(FILE))?;
        file.set_len(bytes_for(count))?;
        let seals = Seals::map(&file, count)?;
        // The magic last: a file without it is not complete.
        for (index, value) in header(kind, count).into_iter().enumerate().rev() {
            if let Some(word) = seals.header(index) {
                word.store(value, Release);
            }
        }
        Ok(seals)
    }

    /// Opens the file. `None`: there is none, or it is not complete.
    pub(crate) fn open(
        run: &Path,
        kind: Protection,
        count: u64,
    ) -> Result<Option<Seals>, StoreError> {
        let path = run.join(FILE);
        let file = match File::options().read(true).write(true).open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            result => result?,
        };
        let length = file.metadata()?.len();
        if length < HEADER_BYTES {
            return Ok(None);
        }
        let foreign = || {
            let path = path.display();
            StoreError::Unusable(format!("{path}: of another version, size or protection"))
        };
        if length != bytes_for(count) {
            return Err(foreign());
        }
        let seals = Seals::map(&file, count)?;
        let found = [0, 1, 2, 3].map(|index| seals.header(index).map(|word| word.load(Acquire)));
        match found {
            [Some(0), ..] => Ok(None),
            found if found == header(kind, count).map(Some) => Ok(Some(seals)),
            _ => Err(foreign()),
        }
    }

    fn map(file: &File, slot_count: u64) -> Result<Seals, StoreError> {
        let mapping = Mapping::new(file, 0, bytes_for(slot_count))?;
        mapping.reserve(0, HEADER_BYTES).map_err(StoreError::RunDirectory)?;
        let prepared = NumberSet::new(slot_count.div_ceil(CLUSTER_SLOTS) as usize);
        Ok(Seals { mapping, slot_count, prepared })
    }

    /// Allocates memory for the rows of a slot's cluster: a touch of a row for which the file
    /// system has no memory would kill the process.
    ///
    /// # Errors
    /// The file system is full.
    pub(crate) fn prepare(&self, slot: u64) -> Result<(), StoreError> {
        let cluster = slot / CLUSTER_SLOTS;
        if !self.prepared.has(cluster as usize) {
            let at = HEADER_BYTES + cluster * CLUSTER_BYTES;
            self.mapping.reserve(at, CLUSTER_BYTES).map_err(StoreError::RunDirectory)?;
            self.prepared.insert(cluster as usize);
        }
        Ok(())
    }

    /// Returns a place that nothing was ever sealed for. The new generation is in the file before
    /// it is used: a death in between wastes a generation, and no generation is used twice.
    ///
    /// # Errors
    /// [`StoreError::Full`]: the slot was filled 2^48 times.
    pub(crate) fn next(&self, slot: u64) -> Result<SlotGeneration, StoreError> {
        let [number, ..] = self.row(slot).ok_or(StoreError::NotInUse { slot })?;
        let generation = number.load(Acquire) + 1;
        if generation >= GENERATION_END {
            return Err(StoreError::Full);
        }
        number.store(generation, Release);
        Ok(SlotGeneration { slot, generation })
    }

    /// Records the tag of the slot's present generation.
    pub(crate) fn set(&self, place: SlotGeneration, tag: Tag) {
        if let Some([_, low, high, _]) = self.row(place.slot) {
            low.store(tag[0], Relaxed);
            high.store(tag[1], Release);
        }
    }

    /// Returns the seal of a slot. `None`: it was never filled. Its cluster must be prepared.
    pub(crate) fn get(&self, slot: u64) -> Option<(SlotGeneration, Tag)> {
        let [generation, low, high, _] = self.row(slot)?;
        let tag = [low.load(Acquire), high.load(Acquire)];
        let generation = generation.load(Acquire);
        (generation != 0).then_some((SlotGeneration { slot, generation }, tag))
    }

    /// Returns what the swap file was when it was last noted; zeros: it never was.
    pub(crate) fn identity(&self) -> Identity {
        let words = self.mapping.words(IDENTITY_BYTE, 3).unwrap_or_default();
        [0, 1, 2].map(|index| words.get(index).map_or(0, |word| word.load(Acquire)))
    }

    /// Notes what the swap file is.
    pub(crate) fn note_identity(&self, identity: Identity) {
        let words = self.mapping.words(IDENTITY_BYTE, 3).unwrap_or_default();
        words.iter().zip(identity).for_each(|(word, number)| word.store(number, Release));
    }

    fn row(&self, slot: u64) -> Option<&[AtomicU64; ROW_WORDS]> {
        let inside = (slot < self.slot_count).then_some(HEADER_BYTES + slot * ROW_BYTES)?;
        self.mapping.words(inside, ROW_WORDS)?.first_chunk()
    }

    fn header(&self, index: usize) -> Option<&AtomicU64> {
        self.mapping.words(0, ROW_WORDS)?.get(index)
    }
}

fn header(kind: Protection, count: u64) -> [u64; 4] {
    let kind = match kind {
        Protection::Encrypted => 1,
        Protection::Checksum => 2,
    };
    [MAGIC, VERSION, count, kind]
}

fn bytes_for(count: u64) -> u64 {
    HEADER_BYTES + count.div_ceil(CLUSTER_SLOTS) * CLUSTER_BYTES
}
