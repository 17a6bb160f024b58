//! Objects of up to 2040 bytes in a mapped file that outlives the daemon. Layout:
//! `docs/swap-store.md`.

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

/// The name of the file.
pub(crate) const FILE: &str = "compressed";
/// Bytes of a chunk, the unit by which the file's memory grows and shrinks.
pub(crate) const CHUNK_BYTES: u64 = 64 << 10;
/// Most bytes of an object.
pub(crate) const OBJECT_MAX: usize = CLASSES * STEP_BYTES as usize - 8;

const MAGIC: u64 = u64::from_le_bytes(*b"EBBSLABS");
const VERSION: u64 = 1;
/// Unit of the size of objects: those of class k take k + 1 steps, with a word before the bytes.
const STEP_BYTES: u64 = 256;
const CLASSES: usize = 8;
/// Divisor of the limit: this part of it is kept free for new objects.
const FREE_PART: u64 = 8;
/// Most chunks, 256 GiB: the room in the table.
const CHUNKS_MAX: u64 = 1 << 22;
const TABLE_AT: u64 = 4096;
const CHUNKS_AT: u64 = TABLE_AT + CHUNKS_MAX * 8;
const LENGTH_BITS: u64 = 0xffff;

/// Where an object is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Object {
    pub(crate) chunk: u64,
    /// Its index in the chunk, below 256.
    pub(crate) index: u64,
}

/// The objects of a store. One thread at a time takes objects, any thread may read and release.
pub(crate) struct Slabs {
    file: File,
    mapping: Mapping,
    /// Which objects of each chunk are in use.
    used: Vec<SlotBits>,
    /// Chunks of each class with a free object, eventually.
    roomy: [NumberSet; CLASSES],
    /// Chunks with memory and no object, eventually.
    empty: NumberSet,
    /// Chunks without memory.
    absent: NumberSet,
    present_count: AtomicU64,
    object_count: AtomicU64,
    /// The number of the last put into each chunk, counted over all chunks.
    put_at: Vec<AtomicU64>,
    puts: AtomicU64,
    limit_chunks: AtomicU64,
    taking: Mutex<()>,
}

impl Slabs {
    /// Opens or makes the file, for at most `limit_bytes`. No object is in use until it is claimed.
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
            // Existing chunks need no more room: a daemon recovers them even if there is none.
            Err(_) if had > 0 => {
                let mapped = map(&file, had);
                file.set_len(length)?;
                mapped?
            }
            Err(error) => {
                // The file has no chunk, so there is no object to lose.
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
        match slabs.open_chunks(count) {
            true => Ok(slabs),
            false => Err(unusable("not of this version")),
        }
    }

    /// Checks or writes the header, and lists the chunks. `false`: the file is not Ebb's.
    fn open_chunks(&self, count: u64) -> bool {
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

    /// Puts bytes into a free object. `None`: the limit or the host leaves no room.
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

    /// Returns an object's bytes. `None`: they are not what was put there.
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

    /// Frees an object. It never waits.
    pub(crate) fn release(&self, object: Object) {
        let Some(used) = self.used.get(object.chunk as usize) else { return };
        if used.clear(object.index) {
            let before = self.object_count.fetch_sub(1, Relaxed);
            debug_assert!(before > 0, "an object was in use that nobody had counted");
            self.list(object.chunk);
        }
    }

    /// Marks an object as in use. `false`: it cannot exist, or is in use already.
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

    /// Returns the memory of chunks without objects to the host.
    pub(crate) fn trim(&self) -> Result<(), StoreError> {
        loop {
            let _taking = self.taking();
            let Some(chunk) = self.take_empty() else { return Ok(()) };
            // Record first, then punch: a death in between wastes memory only.
            if let Some(kind) = self.kind(chunk) {
                kind.store(0, Release);
            }
            let before = self.present_count.fetch_sub(1, Relaxed);
            debug_assert!(before > 0, "a chunk had memory that nobody had counted");
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

    /// Returns how many chunks there can be.
    pub(crate) fn chunk_count(&self) -> u64 {
        self.used.len() as u64
    }

    /// Returns the objects of the chunks with the oldest last put. It goes through as many chunks
    /// as exceed the limit less an eighth of it, until there are `most` objects, rounded up to
    /// whole chunks.
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
                let is_new = used.set(index);
                debug_assert!(is_new, "only the holder of `taking` takes objects");
                if let Some(at) = self.put_at.get(chunk as usize) {
                    at.store(self.puts.fetch_add(1, Relaxed) + 1, Relaxed);
                }
                self.object_count.fetch_add(1, Relaxed);
                return Some(Object { chunk, index });
            }
            // Check again after the removal: a release after this adds the chunk again.
            roomy.remove(chunk as usize);
            self.list(chunk);
        }
    }

    /// Gives a chunk without objects to `class` and returns it.
    fn take_chunk(&self, class: usize) -> Option<u64> {
        let chunk = match self.take_empty() {
            Some(chunk) => chunk,
            None => {
                let within = self.present_count.load(Relaxed) < self.limit_chunks();
                let chunk = within.then(|| self.absent.first())?? as u64;
                // A touch of a chunk for which the host has no memory would kill the process.
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

    /// Returns a chunk that has memory and no object, and removes it from all lists.
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

    /// Returns the chunk's word in the table: 0 if it has no memory, otherwise its class plus 1.
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

/// Extends the file for `count` chunks and maps it, with memory for its table.
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

/// Returns the word before an object: a hash of its bytes, and their length.
fn head_of(bytes: &[u8]) -> u64 {
    (XxHash3_128::oneshot(bytes) as u64) & !LENGTH_BITS | bytes.len() as u64 & LENGTH_BITS
}
