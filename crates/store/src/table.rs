//! The table by which the swap files of a host share their figures: a slot for each, in memory
//! that the processes of all VMs map. Format: `docs/run-directory.md`, *swap.shared*.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_sys::mapping::Mapping;

/// Slots for swap files in a shared table, which is in a file.
const SLOTS: usize = 1023;
/// Slots for swap files in a table of a single process.
const OWN_SLOTS: usize = 15;
/// Words of a slot, two cache lines: the owner's name, and what changes.
const SLOT_WORDS: usize = 16;
const NAME_WORDS: usize = 8;
/// Bytes of a table in a file.
pub const TABLE_BYTES: u64 = ((SLOTS + 1) * SLOT_WORDS * size_of::<u64>()) as u64;
/// The header's word that counts slots up to the last one that ever had an owner.
const USED: usize = 0;

/// The words of a slot after its owner's name.
#[derive(Clone, Copy)]
pub(crate) enum Word {
    /// The device number of the disk that the swap file is on.
    Disk = NAME_WORDS as isize,
    /// Bytes that the swap file takes.
    Taken,
    /// Bytes promised to writes in flight.
    Promised,
    /// How often the swap file found no room in what all share.
    Refusals,
    /// Reads that were requested and have not ended.
    Reads,
    /// When a read last began or ended, in milliseconds of the host's monotonic clock. 0: never.
    LastRead,
}

/// The slots of all swap files. It reads only numbers, whatever another process writes there. All
/// accesses are sequentially consistent, so that of two swap files that ask at once each sees the
/// other.
pub struct Table {
    words: Words,
    /// Held while slots are given and taken back.
    giving: Mutex<()>,
}

enum Words {
    Own(Box<[AtomicU64]>),
    Shared(Mapping),
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Table").field(&self.used()).finish()
    }
}

impl Table {
    /// Makes a table that no other process sees.
    pub fn own() -> Arc<Table> {
        let words = (0..(OWN_SLOTS + 1) * SLOT_WORDS).map(|_| AtomicU64::new(0)).collect();
        Table::new(Words::Own(words))
    }

    fn new(words: Words) -> Arc<Table> {
        Arc::new(Table { words, giving: Mutex::default() })
    }

    /// Maps the table in a file of [`TABLE_BYTES`].
    ///
    /// # Errors
    /// As mmap(2). `StorageFull`: the file system has no room for it.
    pub fn over(file: impl AsFd) -> io::Result<Arc<Table>> {
        let mapping = Mapping::new(file, 0, TABLE_BYTES)?.guarded()?;
        mapping.reserve(0, TABLE_BYTES)?;
        Ok(Table::new(Words::Shared(mapping)))
    }

    /// Returns the slot of this owner, which gets one if it has none. `None`: no slot is free.
    /// Only one process gives slots.
    pub fn give(&self, owner: &str) -> Option<usize> {
        let _alone = self.giving();
        let (name, free) = (words_of(owner), [0; NAME_WORDS]);
        let has = |slot: &usize, wanted: [u64; NAME_WORDS]| self.owner(*slot) == wanted;
        let slot = { (0..self.used()).find(|slot| has(slot, name)) }
            .or_else(|| (0..self.slots()).find(|slot| has(slot, free)))?;
        for (word, value) in name.into_iter().enumerate() {
            self.set(slot, word, value);
        }
        self.note_used(slot);
        Some(slot)
    }

    /// Frees the slot of an owner whose swap file no longer exists.
    pub fn take_back(&self, owner: &str) {
        let _alone = self.giving();
        let name = words_of(owner);
        if let Some(slot) = (0..self.used()).find(|slot| self.owner(*slot) == name) {
            self.clear(slot);
        }
    }

    /// Frees the slots of all owners for which `stays` is false.
    pub fn keep_only(&self, stays: impl Fn(&str) -> bool) {
        let _alone = self.giving();
        for slot in 0..self.used() {
            let name = name_of(self.owner(slot));
            if !name.is_empty() && !stays(&name) {
                self.clear(slot);
            }
        }
    }

    /// Returns the bytes that all swap files take.
    pub fn taken_bytes(&self) -> u64 {
        self.sum(Word::Taken)
    }

    /// Returns the sum of a word over all slots.
    pub(crate) fn sum(&self, word: Word) -> u64 {
        (0..self.used()).fold(0, |sum: u64, slot| sum.saturating_add(self.get(slot, word)))
    }

    fn giving(&self) -> MutexGuard<'_, ()> {
        self.giving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees a slot. It clears the name last: until then nobody else gets the slot.
    fn clear(&self, slot: usize) {
        (0..SLOT_WORDS).rev().for_each(|word| self.set(slot, word, 0));
    }

    /// Returns a free slot of a table of this process, the last slot if none is free.
    fn next(&self) -> usize {
        let is_free = |slot: &usize| {
            let word = self.word(*slot, 0);
            word.is_some_and(|word| word.compare_exchange(0, 1, SeqCst, SeqCst).is_ok())
        };
        let slot = (0..self.slots()).find(is_free).unwrap_or(self.slots() - 1);
        self.note_used(slot);
        slot
    }

    /// Returns the number of slots up to the last one that ever had an owner.
    fn used(&self) -> usize {
        let used = self.words().get(USED).map_or(0, |word| word.load(SeqCst));
        usize::try_from(used).unwrap_or(usize::MAX).min(self.slots())
    }

    fn slots(&self) -> usize {
        match &self.words {
            Words::Own(_) => OWN_SLOTS,
            Words::Shared(_) => SLOTS,
        }
    }

    fn note_used(&self, slot: usize) {
        if let Some(used) = self.words().get(USED) {
            used.fetch_max(slot as u64 + 1, SeqCst);
        }
    }

    fn owner(&self, slot: usize) -> [u64; NAME_WORDS] {
        std::array::from_fn(|word| self.word(slot, word).map_or(0, |word| word.load(SeqCst)))
    }

    fn get(&self, slot: usize, word: Word) -> u64 {
        self.word(slot, word as usize).map_or(0, |word| word.load(SeqCst))
    }

    fn set(&self, slot: usize, word: usize, value: u64) {
        if let Some(word) = self.word(slot, word) {
            word.store(value, SeqCst);
        }
    }

    fn word(&self, slot: usize, word: usize) -> Option<&AtomicU64> {
        self.words().get((slot + 1) * SLOT_WORDS + word)
    }

    fn words(&self) -> &[AtomicU64] {
        match &self.words {
            Words::Own(words) => words,
            Words::Shared(mapping) => {
                mapping.words(0, (TABLE_BYTES / 8) as usize).unwrap_or_default()
            }
        }
    }
}

fn words_of(name: &str) -> [u64; NAME_WORDS] {
    let mut bytes = name.bytes();
    std::array::from_fn(|_| {
        u64::from_le_bytes(std::array::from_fn(|_| bytes.next().unwrap_or_default()))
    })
}

/// Returns the name in these words. Bytes that are no name give one that no owner has.
fn name_of(words: [u64; NAME_WORDS]) -> String {
    let bytes = words.into_iter().flat_map(u64::to_le_bytes).take_while(|byte| *byte != 0);
    String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
}

/// Says where one swap file's slot is.
#[derive(Clone, Debug)]
pub struct TableSlot {
    table: Arc<Table>,
    /// `None`: each user gets a slot of its own.
    slot: Option<usize>,
}

impl TableSlot {
    /// The slot that the table's owner gave.
    pub fn given(table: &Arc<Table>, slot: usize) -> TableSlot {
        TableSlot { table: Arc::clone(table), slot: Some(slot) }
    }

    /// A new table of this process, in which each user gets a slot.
    pub(crate) fn any() -> TableSlot {
        TableSlot { table: Table::own(), slot: None }
    }

    /// The first slot of a new table of this process.
    pub fn alone() -> TableSlot {
        TableSlot { table: Table::own(), slot: Some(0) }
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// Occupies the slot.
    pub(crate) fn sit(&self) -> Seat {
        let slot = self.slot.unwrap_or_else(|| self.table.next());
        self.table.note_used(slot);
        Seat { table: Arc::clone(&self.table), slot, is_own: self.slot.is_none() }
    }
}

/// The occupied slot of an open swap file.
#[derive(Debug)]
pub(crate) struct Seat {
    table: Arc<Table>,
    slot: usize,
    is_own: bool,
}

impl Seat {
    pub(crate) fn get(&self, word: Word) -> u64 {
        self.table.get(self.slot, word)
    }

    pub(crate) fn set(&self, word: Word, value: u64) {
        self.table.set(self.slot, word as usize, value);
    }

    pub(crate) fn add(&self, word: Word, value: u64) {
        if let Some(word) = self.table.word(self.slot, word as usize) {
            word.fetch_add(value, SeqCst);
        }
    }

    /// Subtracts, down to 0 at most.
    pub(crate) fn subtract(&self, word: Word, value: u64) {
        if let Some(word) = self.table.word(self.slot, word as usize) {
            let less = |now: u64| Some(now.saturating_sub(value));
            let _ = word.fetch_update(SeqCst, SeqCst, less);
        }
    }

    pub(crate) fn sum(&self, word: Word) -> u64 {
        self.table.sum(word)
    }

    /// Whether `holds` is true for any other slot.
    pub(crate) fn any_other(&self, holds: impl Fn(&dyn Fn(Word) -> u64) -> bool) -> bool {
        let others = (0..self.table.used()).filter(|slot| *slot != self.slot);
        others.into_iter().any(|slot| holds(&|word| self.table.get(slot, word)))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if self.is_own {
            self.table.clear(self.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_has_one_slot_until_that_is_freed() {
        let long = "n".repeat(64);
        let table = Table::own();
        let given = ["web", "db", "web", &long].map(|name| table.give(name));
        assert_eq!(given, [Some(0), Some(1), Some(0), Some(2)]);
        TableSlot::given(&table, 0).sit().set(Word::Taken, 7);
        assert_eq!(table.taken_bytes(), 7);
        table.take_back("web");
        table.take_back("nobody");
        assert_eq!((table.taken_bytes(), table.give("mail")), (0, Some(0)));
        assert_eq!(table.give(&long), Some(2));
        table.keep_only(|name| name == long);
        assert_eq!([table.give("db"), table.give(&long)], [Some(0), Some(2)]);
    }

    #[test]
    fn a_full_table_gives_no_more() {
        let table = Table::own();
        for number in 0..OWN_SLOTS {
            assert_eq!(table.give(&number.to_string()), Some(number));
        }
        assert_eq!((table.give("one more"), table.give("7")), (None, Some(7)));
    }

    #[test]
    fn processes_see_the_same_table() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(TABLE_BYTES).unwrap();
        let [one, other] = [(); 2].map(|()| Table::over(&file).unwrap());
        let slot = one.give("web").unwrap();
        TableSlot::given(&one, slot).sit().add(Word::Taken, 5);
        let seat = TableSlot::given(&other, other.give("db").unwrap()).sit();
        assert_eq!(seat.sum(Word::Taken), 5);
        assert!(seat.any_other(|word| word(Word::Taken) == 5));
        seat.subtract(Word::Taken, 1);
        assert_eq!(one.taken_bytes(), 5);
    }
}
