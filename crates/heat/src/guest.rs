//! Tracking by the accessed bits in the guest's own page tables.
//!
//! A round begins at the roots of the processes' page tables, in the half that belongs to programs.
//! It goes down level by level and reads each table once. It does not read a table whose entry in
//! the level above was not accessed, so the cost follows what is used, not what is mapped. Bits are
//! cleared from the top down, so that a use in between is seen the next time.
//!
//! What is read is the guest's word, and hostile: each table is read at most once a round, their
//! number is capped, and a table is written only while its metadata is locked and says that it is
//! one.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

use ebb_inspect::Guest;
use ebb_units::{FrameRange, Gfn};

use crate::door::{ENTRIES, Entries, LockedTables};
use crate::{Entry, Observer, Round, TableMemory, TrackError, Tracker, Verdict, Walk};

/// Page tables to look at in a round at most: one for this many frames of RAM.
const TABLES_PART: u64 = 32;
/// Page tables that a round may look at even in little RAM.
const TABLES_LEAST: u64 = 4096;
/// How often large leaves may map all of RAM before a round is cut short.
const LARGE_TIMES: u64 = 8;
/// The first kernel that accepts an entry above a page table whose accessed bit is clear (`pmd_bad`
/// of `arch/x86/include/asm/pgtable.h`). Older kernels take it for bad and clear it, and with it
/// what it maps.
const PRUNES_SINCE: (u32, u32) = (6, 1);
/// Most tables to read between two checks whether to go on.
const TABLES_AT_ONCE: usize = 256;
/// Level of the entries that lead to page tables of the lowest level.
const MIDDLE: u32 = 1;

/// Roots of the processes' page tables, as they were last found.
#[derive(Clone, Debug, Default)]
pub struct Roots(Vec<Gfn>);

impl Roots {
    /// Number of roots.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// Tracks uses by one guest's page tables.
pub struct GuestTracker<'a> {
    memory: &'a dyn TableMemory,
    guest: &'a Guest,
    roots: &'a mut Roots,
    is_running: &'a dyn Fn() -> bool,
}

impl<'a> GuestTracker<'a> {
    /// A tracker of a guest that is trusted now. `is_running` is asked again and again, and before
    /// bits are cleared: `false` once the kernel may have been reset, or the caller has no more
    /// time. It is asked while metadata is locked, so it must not wait for the VMM, which may wait
    /// for that metadata. `roots` are kept from one round to the next, and found anew by a full
    /// round.
    pub fn new(
        memory: &'a dyn TableMemory,
        guest: &'a Guest,
        roots: &'a mut Roots,
        is_running: &'a dyn Fn() -> bool,
    ) -> GuestTracker<'a> {
        GuestTracker { memory, guest, roots, is_running }
    }

    /// Whether tables whose entry above was not accessed are left out. Kernels before 6.1 take such
    /// an entry for a bad one, so Ebb does not clear its bit there.
    pub fn prunes(&self) -> bool {
        self.guest.note().version() >= PRUNES_SINCE
    }
}

impl Tracker for GuestTracker<'_> {
    fn round(&mut self, walk: Walk, observer: &mut dyn Observer) -> Result<Round, TrackError> {
        if walk == Walk::Full || self.roots.0.is_empty() {
            self.roots.0 = self.guest.roots(self.memory.memory());
        }
        if self.roots.0.is_empty() {
            return Err(TrackError::NoRoots);
        }
        let mut look = Look::new(self, walk, observer);
        look.go()?;
        Ok(look.round)
    }
}

/// The frames seen in this round, as a bit field.
struct Visited(Vec<u64>);

impl Visited {
    fn new(end: Gfn) -> Visited {
        Visited(vec![0; usize::try_from(end.0.div_ceil(64)).unwrap_or(0)])
    }

    /// Adds a frame. Returns whether it is new; never for a frame beyond the end.
    fn add(&mut self, gfn: Gfn) -> bool {
        let Some(word) = usize::try_from(gfn.0 / 64).ok().and_then(|at| self.0.get_mut(at)) else {
            return false;
        };
        let bit = 1 << (gfn.0 % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}

/// One round under way.
struct Look<'a> {
    memory: &'a dyn TableMemory,
    guest: &'a Guest,
    is_running: &'a dyn Fn() -> bool,
    roots: &'a [Gfn],
    observer: &'a mut dyn Observer,
    walk: Walk,
    prunes: bool,
    visited: Visited,
    tables_left: u64,
    large_frames_left: u64,
    /// Tables of the next lower level.
    next: Vec<Gfn>,
    last_locked: Option<Gfn>,
    round: Round,
}

impl<'a> Look<'a> {
    fn new(tracker: &'a GuestTracker<'_>, walk: Walk, observer: &'a mut dyn Observer) -> Look<'a> {
        let frames = tracker.guest.memmap().frames();
        let runs = tracker.guest.memmap().runs();
        let end = runs.last().map_or(0, |run| run.first.0 + run.frames);
        Look {
            memory: tracker.memory,
            guest: tracker.guest,
            is_running: tracker.is_running,
            roots: &tracker.roots.0,
            observer,
            walk,
            prunes: tracker.prunes(),
            visited: Visited::new(Gfn(end)),
            tables_left: TABLES_LEAST.max(frames / TABLES_PART),
            large_frames_left: LARGE_TIMES * frames,
            next: Vec::new(),
            last_locked: None,
            round: Round::default(),
        }
    }

    fn go(&mut self) -> Result<(), TrackError> {
        let roots = self.roots;
        roots.iter().for_each(|&root| self.add(root));
        let top = self.guest.tables().levels.saturating_sub(1);
        for level in (0..=top).rev() {
            let mut tables = std::mem::take(&mut self.next);
            // Neighbours share their metadata frame.
            tables.sort_unstable();
            // The other half of a root is the kernel's.
            let count = if level == top { ENTRIES / 2 } else { ENTRIES };
            let to_write = self.read(&tables, level, count)?;
            self.write(&to_write, level, count)?;
        }
        self.settle()
    }

    /// Protects metadata once more after the last bit was cleared. The host's kernel then has
    /// processors drop the translations by which a page in use would not set its bit again.
    fn settle(&mut self) -> Result<(), TrackError> {
        match self.last_locked {
            Some(metadata) => Ok(self.memory.while_locked(metadata, &mut |_| ()).map(drop)?),
            None => Ok(()),
        }
    }

    /// Reports what is in the tables. Returns the tables in which a bit is to be cleared, of which
    /// nothing was reported.
    fn read(&mut self, tables: &[Gfn], level: u32, count: usize) -> Result<Vec<Gfn>, TrackError> {
        let (mut entries, mut to_write) = ([0; ENTRIES], Vec::new());
        for (index, &table) in tables.iter().enumerate() {
            if index % TABLES_AT_ONCE == TABLES_AT_ONCE - 1 && !(self.is_running)() {
                return Err(TrackError::NotRunning);
            }
            if !self.memory.read(table, &mut entries) {
                continue;
            }
            self.round.tables += 1;
            if entries[..count].iter().any(|&entry| self.is_to_clear(Entry(entry), level)) {
                to_write.push(table);
                continue;
            }
            for &entry in &entries[..count] {
                self.tell(Entry(entry), level);
            }
        }
        Ok(to_write)
    }

    fn is_to_clear(&self, entry: Entry, level: u32) -> bool {
        entry.is_accessed()
            && match entry.leaf(level) {
                Some(frames) => self.is_ram(frames) && self.observer.would_clear(frames),
                None => level == MIDDLE && self.prunes,
            }
    }

    /// Reports one entry. Returns whether its accessed bit is to be cleared.
    fn tell(&mut self, entry: Entry, level: u32) -> bool {
        match (entry.leaf(level), entry.table(level)) {
            (Some(frames), _) => entry.is_accessed() && self.tell_leaf(frames, entry),
            (None, Some(table)) => self.tell_table(table, entry, level),
            (None, None) => false,
        }
    }

    fn tell_leaf(&mut self, frames: FrameRange, entry: Entry) -> bool {
        if !self.is_ram(frames) {
            return false;
        }
        if frames.count > 1 {
            let Some(left) = self.large_frames_left.checked_sub(frames.count) else {
                self.round.is_truncated = true;
                return false;
            };
            self.large_frames_left = left;
        }
        self.round.used_entries += 1;
        self.observer.saw(frames, entry.access()) == Verdict::Clear
    }

    fn tell_table(&mut self, table: Gfn, entry: Entry, level: u32) -> bool {
        let used = entry.is_accessed();
        if level == MIDDLE && self.walk == Walk::Pruned && !used {
            self.round.pruned_tables += 1;
            return false;
        }
        self.add(table);
        used && level == MIDDLE && self.prunes
    }

    fn add(&mut self, table: Gfn) {
        if !self.is_ram(FrameRange::new(table, 1)) || !self.visited.add(table) {
            return;
        }
        match self.tables_left.checked_sub(1) {
            Some(left) => {
                self.tables_left = left;
                self.next.push(table);
            }
            None => self.round.is_truncated = true,
        }
    }

    fn is_ram(&self, frames: FrameRange) -> bool {
        self.guest.memmap().in_ram(frames)
    }

    /// Clears bits in these tables. Tables whose metadata lies in one frame are written together.
    fn write(&mut self, tables: &[Gfn], level: u32, count: usize) -> Result<(), TrackError> {
        let (memory, guest) = (self.memory, self.guest);
        let metadata = |table: &Gfn| guest.table_metadata(memory.memory(), *table);
        let places: Vec<Option<Gfn>> = tables.iter().map(metadata).collect();
        let mut at = 0;
        for group in places.chunk_by(|a, b| a == b) {
            let group_tables = &tables[at..at + group.len()];
            at += group.len();
            let Some(metadata) = group[0] else {
                group_tables.iter().for_each(|&table| self.miss(table, level, count));
                continue;
            };
            let mut result = Ok(());
            let held = memory.while_locked(metadata, &mut |held| {
                result = self.write_group(group_tables, metadata, held, level, count);
            })?;
            result?;
            match held {
                true => {
                    self.round.locked_frames += 1;
                    self.last_locked = Some(metadata);
                }
                false => group_tables.iter().for_each(|&table| self.miss(table, level, count)),
            }
        }
        Ok(())
    }

    /// Clears bits in these tables while their metadata is locked.
    fn write_group(
        &mut self,
        tables: &[Gfn],
        metadata: Gfn,
        held: &dyn LockedTables,
        level: u32,
        count: usize,
    ) -> Result<(), TrackError> {
        if !(self.is_running)() {
            return Err(TrackError::NotRunning);
        }
        for &table in tables {
            // This look counts: from now on the frame stays a page table.
            let now = self.guest.table_metadata(self.memory.memory(), table);
            let done = now == Some(metadata)
                && held.table(table, &mut |entries, words| {
                    self.clear(entries, words, level, count);
                });
            if !done {
                self.miss(table, level, count);
            }
        }
        Ok(())
    }

    fn clear(&mut self, entries: &Entries, words: &[AtomicU64], level: u32, count: usize) {
        for (&entry, word) in entries.iter().zip(words).take(count) {
            let entry = Entry(entry);
            if !self.tell(entry, level) {
                continue;
            }
            match swap(word, entry) {
                true => self.round.cleared_entries += 1,
                false => self.round.missed_entries += 1,
            }
        }
    }

    /// Handles a table that cannot be written now. Nothing is reported of its pages: their bits
    /// stay, and report the next time. Tables below it are still looked at.
    fn miss(&mut self, table: Gfn, level: u32, count: usize) {
        let mut entries = [0; ENTRIES];
        if !self.memory.read(table, &mut entries) {
            return;
        }
        for entry in entries[..count].iter().map(|&entry| Entry(entry)) {
            match entry.leaf(level) {
                Some(_) => self.round.missed_entries += u64::from(entry.is_accessed()),
                None => drop(self.tell(entry, level)),
            }
        }
    }
}

/// Clears the accessed bit of the word that was read as `entry`. Tries once more if the guest
/// changed something else of the same mapping, most likely the dirty bit.
fn swap(word: &AtomicU64, entry: Entry) -> bool {
    let exchange =
        |entry: Entry| word.compare_exchange(entry.0, entry.cleared().0, AcqRel, Relaxed);
    exchange(entry)
        .or_else(|now| match Entry(now) {
            now if now.is_accessed() && now.leaf(0) == entry.leaf(0) => exchange(now),
            now => Err(now.0),
        })
        .is_ok()
}
