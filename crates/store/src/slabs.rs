//! Objects of a few hundred bytes in a mapped file that outlives the daemon.
//! Layout: `docs/swap-store.md`.

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_sys::mapping::Mapping;
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use twox_hash::XxHash3_128;

use crate::StoreError;
use crate::number_set::NumberSet;
use crate::slot_bits::{self, SlotBits};

/// Its file.
pub(crate) const FILE: &str = "compressed";
/// The file grows and shrinks by this.
pub(crate) const CHUNK_BYTES: u64 = 64 << 10;
/// The longest object.
pub(crate) const OBJECT_MAX: usize = CLASSES * STEP_BYTES as usize - 8;

const MAGIC: u64 = u64::from_le_bytes(*b"EBBSLABS");
const VERSION: u64 = 1;
/// Objects of class k take k + 1 steps, a word in front of them included.
const STEP_BYTES: u64 = 256;
const CLASSES: usize = 8;
/// So much of the limit is kept free for what comes next.
const FREE_PART: u64 = 8;
/// 256 GiB of chunks: what the table has room for.
const CHUNKS_MAX: u64 = 1 << 22;
const TABLE_AT: u64 = 4096;
const CHUNKS_AT: u64 = TABLE_AT + CHUNKS_MAX * 8;
const LENGTH_BITS: u64 = 0xffff;

/// Where an object is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Object {
    pub(crate) chunk: u64,
    /// Which of the chunk's objects; below 256.
    pub(crate) index: u64,
}

/// One thread at a time takes; any may read and release.
pub(crate) struct Slabs {
    file: File,
    mapping: Mapping,
    /// Which objects of each chunk are in use.
    used: Vec<SlotBits>,
    /// Where chunks of a class with room are, sooner or later.
    roomy: [NumberSet; CLASSES],
    /// The same of chunks with no object.
    empty: NumberSet,
    /// Chunks without memory.
    absent: NumberSet,
    present_count: AtomicU64,
    object_count: AtomicU64,
    /// When something was last put into each chunk, by count of puts.
    put_at: Vec<AtomicU64>,
    puts: AtomicU64,
    limit_chunks: AtomicU64,
    taking: Mutex<()>,
}

impl Slabs {
    /// Opens the file, or makes it, for at most `limit_bytes`. Nothing is in use
    /// until it was claimed.
    pub(crate) fn open(run: &Path, limit_bytes: u64) -> Result<Slabs, StoreError> {
        let path = run.join(FILE);
        let unusable = |why| StoreError::Unusable(format!("{}: {why}", path.display()));
        let limit_chunks = (limit_bytes / CHUNK_BYTES).min(CHUNKS_MAX);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| unusable("in use by another Ebb"))?;
        let length = file.metadata()?.len();
        let had = length.saturating_sub(CHUNKS_AT) / CHUNK_BYTES;
        if had > CHUNKS_MAX {
            return Err(unusable("not of this version"));
        }
        let (count, mapping) = match map(&file, limit_chunks.max(had)) {
            // What was there needs no room: a daemon takes it up also where there is none.
            Err(_) if had > 0 => {
                let mapped = map(&file, had);
                file.set_len(length)?;
                mapped?
            }
            Err(error) => {
                // No table, so no object.
                fs::remove_file(&path)?;
                return Err(error);
            }
            Ok(mapped) => mapped,
        };
        let limit_chunks = limit_chunks.min(count);
        let slabs = Slabs {
            file,
            mapping,
            used: (0..count).map(|_| SlotBits::default()).collect(),
            roomy: std::array::from_fn(|_| NumberSet::new(count as usize)),
            empty: NumberSet::new(count as usize),
            absent: NumberSet::new(count as usize),
            present_count: AtomicU64::new(0),
            object_count: AtomicU64::new(0),
            put_at: (0..count).map(|_| AtomicU64::new(0)).collect(),
            puts: AtomicU64::new(0),
            limit_chunks: AtomicU64::new(limit_chunks),
            taking: Mutex::new(()),
        };
        match slabs.take_up(count) {
            true => Ok(slabs),
            false => Err(unusable("not of this version")),
        }
    }

    /// `false`: the file is none of ours.
    fn take_up(&self, count: u64) -> bool {
        let Some([magic, version]) = self.mapping.words(0, 2) else { return false };
        match [magic.load(Acquire), version.load(Acquire)] {
            [0, _] => {
                version.store(VERSION, Release);
                magic.store(MAGIC, Release);
            }
            [MAGIC, VERSION] => {}
            _ => return false,
        }
        (0..count).all(|chunk| {
            match self.kind(chunk).map(|kind| kind.load(Acquire)) {
                Some(0) => self.absent.insert(chunk as usize),
                Some(kind) if kind <= CLASSES as u64 => {
                    self.present_count.fetch_add(1, Relaxed);
                    self.list(chunk);
                }
                _ => return false,
            }
            true
        })
    }

    /// Puts bytes into a free object. `None`: no room, by the limit or the host's.
    pub(crate) fn put(&self, bytes: &[u8]) -> Option<Object> {
        let class = class_for(bytes.len())?;
        let object = self.take(class)?;
        let Some((head, words)) = self.words(object).and_then(<[_]>::split_first) else {
            self.release(object);
            return None;
        };
        let (whole, rest) = bytes.as_chunks::<8>();
        for (word, bytes) in words.iter().zip(whole) {
            word.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
        if let Some(word) = words.get(whole.len()) {
            let mut last = [0; 8];
            last.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
            word.store(u64::from_ne_bytes(last), Relaxed);
        }
        head.store(head_of(bytes), Release);
        Some(object)
    }

    /// An object's bytes; `None`: not what was put there.
    pub(crate) fn get<'a>(
        &self,
        object: Object,
        buffer: &'a mut [u8; OBJECT_MAX],
    ) -> Option<&'a [u8]> {
        let (head, words) = self.words(object)?.split_first()?;
        let head = head.load(Acquire);
        let length = (head & LENGTH_BITS) as usize;
        let (chunks, _) = buffer.get_mut(..length.next_multiple_of(8))?.as_chunks_mut::<8>();
        for (bytes, word) in chunks.iter_mut().zip(words) {
            *bytes = word.load(Relaxed).to_ne_bytes();
        }
        let bytes = buffer.get(..length)?;
        (head_of(bytes) == head && length <= words.len() * 8).then_some(bytes)
    }

    /// Waits for nobody.
    pub(crate) fn release(&self, object: Object) {
        let Some(used) = self.used.get(object.chunk as usize) else { return };
        if used.clear(object.index) {
            self.object_count.fetch_sub(1, Relaxed);
            self.list(object.chunk);
        }
    }

    /// The object is in use; `false`: it cannot be, or is already.
    pub(crate) fn claim(&self, object: Object) -> bool {
        let _taking = self.taking();
        let inside = self.words(object).is_some();
        let taken = inside
            && self.used.get(object.chunk as usize).is_some_and(|used| used.set(object.index));
        self.object_count.fetch_add(u64::from(taken), Relaxed);
        taken
    }

    pub(crate) fn is_taken(&self, object: Object) -> bool {
        self.used.get(object.chunk as usize).is_some_and(|used| used.has(object.index))
    }

    /// Gives the memory of chunks without objects to the host.
    pub(crate) fn trim(&self) -> Result<(), StoreError> {
        loop {
            let _taking = self.taking();
            let Some(chunk) = self.take_empty() else { return Ok(()) };
            // Absent before its memory goes: what a death in between leaves is waste.
            if let Some(kind) = self.kind(chunk) {
                kind.store(0, Release);
            }
            self.present_count.fetch_sub(1, Relaxed);
            self.absent.insert(chunk as usize);
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.file, hole, CHUNKS_AT + chunk * CHUNK_BYTES, CHUNK_BYTES)?;
        }
    }

    pub(crate) fn present_bytes(&self) -> u64 {
        self.present_count.load(Relaxed) * CHUNK_BYTES
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_chunks() * CHUNK_BYTES
    }

    pub(crate) fn set_limit(&self, bytes: u64) {
        self.limit_chunks.store((bytes / CHUNK_BYTES).min(self.chunk_count()), Relaxed);
    }

    /// How many chunks there may be.
    pub(crate) fn chunk_count(&self) -> u64 {
        self.used.len() as u64
    }

    /// What is in the chunks that nothing was put into for longest: in as many of them
    /// as are too many, with an eighth of the limit kept free, and up to `most` objects
    /// rounded up to a chunk's.
    pub(crate) fn surplus(&self, most: usize) -> Vec<Object> {
        let (present, limit) = (self.present_count.load(Relaxed), self.limit_chunks());
        let too_many = present.saturating_sub(limit.saturating_sub((limit / FREE_PART).max(1)));
        let mut objects = Vec::new();
        if too_many == 0 {
            return objects;
        }
        let mut by_age: Vec<(u64, u64)> = { (0..).zip(&self.put_at) }
            .filter(|(chunk, _)| self.class(*chunk).is_some())
            .map(|(chunk, at)| (at.load(Relaxed), chunk))
            .collect();
        by_age.sort_unstable();
        for (_, chunk) in by_age.into_iter().take(too_many as usize) {
            if objects.len() >= most {
                break;
            }
            let used = self.used.get(chunk as usize).map(SlotBits::words).unwrap_or_default();
            let indices = slot_bits::runs(used).flat_map(|(first, count)| first..first + count);
            objects.extend(indices.map(|index| Object { chunk, index }));
        }
        objects
    }

    pub(crate) fn object_count(&self) -> u64 {
        self.object_count.load(Relaxed)
    }

    fn take(&self, class: usize) -> Option<Object> {
        let _taking = self.taking();
        let roomy = self.roomy.get(class)?;
        loop {
            let chunk = match roomy.first() {
                Some(chunk) => chunk as u64,
                None => self.take_chunk(class)?,
            };
            if self.class(chunk) == Some(class)
                && let Some(used) = self.used.get(chunk as usize)
                && let Some((index, _)) = used.free_run(0, objects_in(class), 1)
            {
                used.set(index);
                if let Some(at) = self.put_at.get(chunk as usize) {
                    at.store(self.puts.fetch_add(1, Relaxed) + 1, Relaxed);
                }
                self.object_count.fetch_add(1, Relaxed);
                return Some(Object { chunk, index });
            }
            // Looked at once more after that: whoever releases adds it again.
            roomy.remove(chunk as usize);
            self.list(chunk);
        }
    }

    /// A chunk without objects, for objects of `class` from now on.
    fn take_chunk(&self, class: usize) -> Option<u64> {
        let chunk = match self.take_empty() {
            Some(chunk) => chunk,
            None => {
                let within = self.present_count.load(Relaxed) < self.limit_chunks();
                let chunk = within.then(|| self.absent.first())?? as u64;
                // A touch of what the host has no memory for would kill us.
                self.mapping.reserve(CHUNKS_AT + chunk * CHUNK_BYTES, CHUNK_BYTES).ok()?;
                self.absent.remove(chunk as usize);
                self.present_count.fetch_add(1, Relaxed);
                chunk
            }
        };
        self.kind(chunk)?.store(class as u64 + 1, Release);
        self.list(chunk);
        Some(chunk)
    }

    /// A chunk that has memory and no object, listed nowhere from now on.
    fn take_empty(&self) -> Option<u64> {
        while let Some(chunk) = self.empty.first() {
            self.empty.remove(chunk);
            let empty = self.used.get(chunk).is_some_and(|used| used.count() == 0);
            if let (true, Some(class)) = (empty, self.class(chunk as u64)) {
                self.roomy.get(class).into_iter().for_each(|roomy| roomy.remove(chunk));
                return Some(chunk as u64);
            }
        }
        None
    }

    fn list(&self, chunk: u64) {
        let known = (self.class(chunk), self.used.get(chunk as usize));
        let (Some(class), Some(used)) = known else { return };
        let count = u64::from(used.count());
        if count == 0 {
            self.empty.insert(chunk as usize);
        }
        if let (true, Some(roomy)) = (count < objects_in(class), self.roomy.get(class)) {
            roomy.insert(chunk as usize);
        }
    }

    fn limit_chunks(&self) -> u64 {
        self.limit_chunks.load(Relaxed)
    }

    fn class(&self, chunk: u64) -> Option<usize> {
        (self.kind(chunk)?.load(Acquire) as usize).checked_sub(1)
    }

    /// The chunk's word in the table: 0, or its class and 1.
    fn kind(&self, chunk: u64) -> Option<&AtomicU64> {
        let inside = (chunk < self.used.len() as u64).then_some(TABLE_AT + chunk * 8)?;
        self.mapping.words(inside, 1)?.first()
    }

    fn words(&self, object: Object) -> Option<&[AtomicU64]> {
        let class = self.class(object.chunk).filter(|&class| object.index < objects_in(class))?;
        let bytes = (class as u64 + 1) * STEP_BYTES;
        let at = CHUNKS_AT + object.chunk * CHUNK_BYTES + object.index * bytes;
        self.mapping.words(at, bytes as usize / 8)
    }

    fn taking(&self) -> MutexGuard<'_, ()> {
        self.taking.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The file with a table for so many chunks, and that table in memory.
fn map(file: &File, count: u64) -> Result<(u64, Mapping), StoreError> {
    file.set_len(file.metadata()?.len().max(CHUNKS_AT + count * CHUNK_BYTES))?;
    let mapping = Mapping::new(file, 0, CHUNKS_AT + count * CHUNK_BYTES)?;
    let table = (TABLE_AT + count * 8).next_multiple_of(4096);
    mapping.reserve(0, table).map_err(StoreError::RunDirectory)?;
    Ok((count, mapping))
}

fn class_for(length: usize) -> Option<usize> {
    let class = (length + 8).div_ceil(STEP_BYTES as usize) - 1;
    (class < CLASSES).then_some(class)
}

fn objects_in(class: usize) -> u64 {
    CHUNK_BYTES / ((class as u64 + 1) * STEP_BYTES)
}

/// Length, and a hash of the bytes.
fn head_of(bytes: &[u8]) -> u64 {
    (XxHash3_128::oneshot(bytes) as u64) & !LENGTH_BITS | bytes.len() as u64 & LENGTH_BITS
}
