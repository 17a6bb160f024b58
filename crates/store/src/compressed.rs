//! Keeps pages that compress well in memory, in front of another store.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, OnceLock, PoisonError};

use ebb_units::FRAME_BYTES;
use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};

use crate::page_buffer::Pool;
use crate::slabs::{CHUNK_BYTES, OBJECT_MAX, Object, Slabs};
use crate::{
    CLUSTER_SLOTS, Loaded, MEMORY_SLOTS, Page, SavedBatch, Store, StoreError, StoreUsage,
    is_in_memory,
};

/// First slot of this store. Slots below it belong to the store behind.
const FRONT: u64 = MEMORY_SLOTS;
/// First slot for pages filled with one byte, which is the low byte of the slot number.
const FILLED: u64 = FRONT | 1 << 46;
/// Bits of an object's index. An object's slot is `FRONT | chunk << INDEX_BITS | index`.
const INDEX_BITS: u32 = 8;
/// Slots that are surplus at a time, rounded up to whole chunks. They are locked while they are
/// written.
const SURPLUS_SLOTS: usize = 512;
/// Bytes that lz4 wants for its output, however badly a page compresses.
const LZ4_MAX: usize = get_maximum_output_size(FRAME_BYTES as usize);

/// Keeps compressed pages in memory, up to a limit. All other pages go to the store behind.
pub struct Compressed<S> {
    /// The pages in memory; unset: their file is not made yet.
    slabs: OnceLock<Slabs>,
    later: Option<Later>,
    behind: S,
    filled_count: AtomicU64,
    workspaces: Mutex<Vec<Box<Workspace>>>,
    /// Copies of pages that go to the store behind together.
    buffers: Pool,
}

/// A file that is made once there is to be something in it.
struct Later {
    run: PathBuf,
    most_bytes: u64,
}

struct Workspace {
    table: CompressTable,
    output: [u8; LZ4_MAX],
}

/// Where the page of a slot number is.
enum Home {
    Filled(u8),
    Object(Object),
    Behind,
}

impl Home {
    fn of(slot: u64) -> Home {
        match slot {
            _ if slot & FRONT == 0 => Home::Behind,
            _ if slot & FILLED == FILLED => Home::Filled(slot as u8),
            _ => {
                let (chunk, index) = ((slot & !FRONT) >> INDEX_BITS, slot % (1 << INDEX_BITS));
                Home::Object(Object { chunk, index })
            }
        }
    }
}

impl<S: Store> Compressed<S> {
    /// Opens what an earlier daemon left in `run`, or makes a store there, in front of `behind`.
    /// If the limit is smaller than before, pages in memory stay until they are released, or are
    /// moved as surplus.
    ///
    /// # Errors
    /// As open(2) and ftruncate(2). [`StoreError::Unusable`]: `run` is on a disk, where others
    /// could read compressed pages, or the file is not Ebb's.
    pub fn open(run: &Path, limit_bytes: u64, behind: S) -> Result<Compressed<S>, StoreError> {
        check_in_memory(run)?;
        let slabs = OnceLock::from(Slabs::open(run, limit_bytes)?);
        Ok(Compressed::new(slabs, None, behind))
    }

    /// Prepares a store in `run` where no earlier daemon had one. It keeps nothing in memory and has
    /// no file until [`Store::limit_memory`] gives it memory, of `most_bytes` at most.
    ///
    /// # Errors
    /// [`StoreError::Unusable`]: `run` is on a disk.
    pub fn prepare(run: &Path, most_bytes: u64, behind: S) -> Result<Compressed<S>, StoreError> {
        check_in_memory(run)?;
        let later = Later { run: run.to_owned(), most_bytes };
        Ok(Compressed::new(OnceLock::new(), Some(later), behind))
    }

    fn new(slabs: OnceLock<Slabs>, later: Option<Later>, behind: S) -> Compressed<S> {
        Compressed {
            slabs,
            later,
            behind,
            filled_count: AtomicU64::new(0),
            workspaces: Mutex::default(),
            buffers: Pool::new(CLUSTER_SLOTS as usize),
        }
    }

    /// Makes the file, if there is none yet. Only the thread that saves calls it.
    fn make(&self) -> Result<Option<&Slabs>, StoreError> {
        if let (None, Some(later)) = (self.slabs.get(), &self.later) {
            let made = Slabs::open(&later.run, later.most_bytes)?;
            return Ok(Some(self.slabs.get_or_init(|| made)));
        }
        Ok(self.slabs.get())
    }

    /// Returns the store behind this one.
    pub fn behind(&self) -> &S {
        &self.behind
    }

    /// Keeps a page in memory. `None`: it does not compress enough, or there is no room.
    fn keep(&self, page: &Page, workspace: &mut Workspace) -> Option<u64> {
        let slabs = self.slabs.get()?;
        if let Some(byte) = filled_with(page) {
            self.filled_count.fetch_add(1, Relaxed);
            return Some(FILLED | u64::from(byte));
        }
        if slabs.limit_bytes() == 0 {
            return None;
        }
        let Workspace { table, output } = workspace;
        let length = compress_into_with_table(page, output, table).ok()?;
        let object = slabs.put(output.get(..length)?)?;
        Some(slot_of(object))
    }

    fn with_workspace<T>(&self, work: impl FnOnce(&mut Workspace) -> T) -> T {
        let idle = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let new = || Box::new(Workspace { table: CompressTable::small(), output: [0; LZ4_MAX] });
        let mut workspace = idle.unwrap_or_else(new);
        let result = work(&mut workspace);
        self.workspaces.lock().unwrap_or_else(PoisonError::into_inner).push(workspace);
        result
    }

    fn load_object(&self, slot: u64, object: Object, page: &mut Page) -> Result<(), StoreError> {
        let taken = self.slabs.get().filter(|slabs| slabs.is_taken(object));
        let slabs = taken.ok_or(StoreError::NotInUse { slot })?;
        let mut buffer = [0; OBJECT_MAX];
        let bytes = slabs.get(object, &mut buffer).ok_or(StoreError::Damaged { slot })?;
        match decompress_into(bytes, page) {
            Ok(length) if length as u64 == FRAME_BYTES => Ok(()),
            _ => Err(StoreError::Damaged { slot }),
        }
    }

    /// Saves the pages that have no slot yet in the store behind, in a row.
    fn save_behind(&self, pages: &[Page], batch: &mut SavedBatch) {
        let rest: Vec<usize> = { batch.slots.iter().enumerate() }
            .filter_map(|(at, s)| s.is_none().then_some(at))
            .collect();
        if rest.len() == pages.len() {
            *batch = self.behind.save_batch(pages);
            return;
        }
        for part in rest.chunks(CLUSTER_SLOTS as usize) {
            let saved = self.buffers.with(|buffer| {
                let copies = buffer.get_mut(..part.len()).unwrap_or_default();
                let from = part.iter().filter_map(|&at| pages.get(at));
                copies.iter_mut().zip(from).for_each(|(to, page)| to.copy_from_slice(page));
                self.behind.save_batch(copies)
            });
            for (&at, slot) in part.iter().zip(saved.slots) {
                batch.slots.get_mut(at).into_iter().for_each(|to| *to = slot);
            }
            batch.error = saved.error;
            if batch.error.is_some() {
                break;
            }
        }
    }
}

fn check_in_memory(run: &Path) -> Result<(), StoreError> {
    match is_in_memory(run)? {
        true => Ok(()),
        false => Err(StoreError::Unusable(format!(
            "{}: not on tmpfs; compressed memory is kept in memory only",
            run.display()
        ))),
    }
}

fn slot_of(object: Object) -> u64 {
    FRONT | object.chunk << INDEX_BITS | object.index
}

/// Returns the byte that all bytes of the page equal, if there is one.
fn filled_with(page: &Page) -> Option<u8> {
    let byte = *page.first()?;
    let (words, _) = page.as_chunks::<8>();
    words.iter().all(|word| *word == [byte; 8]).then_some(byte)
}

impl<S: Store> Store for Compressed<S> {
    fn save(&self, page: &Page) -> Result<u64, StoreError> {
        match self.with_workspace(|workspace| self.keep(page, workspace)) {
            Some(slot) => Ok(slot),
            None => self.behind.save(page),
        }
    }

    fn save_batch(&self, pages: &[Page]) -> SavedBatch {
        let keep = |workspace: &mut Workspace| {
            pages.iter().map(|page| self.keep(page, workspace)).collect()
        };
        let mut batch = SavedBatch { slots: self.with_workspace(keep), error: None };
        if batch.slots.iter().any(Option::is_none) {
            self.save_behind(pages, &mut batch);
        }
        batch
    }

    fn load(&self, slot: u64, page: &mut Page) -> Result<(), StoreError> {
        match Home::of(slot) {
            Home::Filled(byte) => {
                page.fill(byte);
                Ok(())
            }
            Home::Object(object) => self.load_object(slot, object, page),
            Home::Behind => self.behind.load(slot, page),
        }
    }

    fn load_batch(&self, first: u64, pages: &mut [Page]) -> Result<Loaded, StoreError> {
        let most = match Home::of(first) {
            Home::Behind => return self.behind.load_batch(first, pages),
            // The next number is for another byte: it is no neighbour.
            Home::Filled(_) => 1,
            Home::Object(_) => CLUSTER_SLOTS as usize,
        };
        let mut loaded = Loaded::default();
        for ((index, page), slot) in pages.iter_mut().take(most).enumerate().zip(first..) {
            if slot & FRONT != 0 && self.load(slot, page).is_ok() {
                loaded.set(index);
            }
        }
        Ok(loaded)
    }

    fn load_some(
        &self,
        first: u64,
        pages: &mut [Page],
        which: &[usize],
        ready: &mut dyn FnMut(usize, &Page),
    ) -> Result<(), StoreError> {
        if let Home::Behind = Home::of(first) {
            return self.behind.load_some(first, pages, which, ready);
        }
        self.load_batch(first, pages).map(|loaded| loaded.tell(pages, which, ready))
    }

    fn release(&self, slot: u64) {
        match Home::of(slot) {
            Home::Filled(_) => {
                let less = |count: u64| count.checked_sub(1);
                // The count stays 0 if a slot is released once too often.
                let _ = self.filled_count.fetch_update(Relaxed, Relaxed, less);
            }
            Home::Object(object) => {
                self.slabs.get().into_iter().for_each(|slabs| slabs.release(object));
            }
            Home::Behind => self.behind.release(slot),
        }
    }

    fn trim(&self) -> Result<(), StoreError> {
        self.slabs.get().map_or(Ok(()), Slabs::trim)?;
        self.behind.trim()
    }

    fn claim(&self, slot: u64) -> Result<(), StoreError> {
        match Home::of(slot) {
            Home::Filled(_) => {
                self.filled_count.fetch_add(1, Relaxed);
                Ok(())
            }
            Home::Object(object) if self.slabs.get().is_some_and(|it| it.claim(object)) => Ok(()),
            Home::Object(_) => Err(StoreError::NotInUse { slot }),
            Home::Behind => self.behind.claim(slot),
        }
    }

    fn surplus(&self) -> Vec<u64> {
        // Chunks without objects count as free, so they are trimmed first.
        match self.slabs.get() {
            Some(slabs) if slabs.trim().is_ok() => {
                slabs.surplus(SURPLUS_SLOTS).into_iter().map(slot_of).collect()
            }
            _ => Vec::new(),
        }
    }

    fn save_to_disk(&self, pages: &[Page]) -> SavedBatch {
        self.behind.save_batch(pages)
    }

    fn limit_memory(&self, bytes: u64) -> Result<(), StoreError> {
        let slabs = if bytes == 0 { self.slabs.get() } else { self.make()? };
        slabs.into_iter().for_each(|slabs| slabs.set_limit(bytes));
        Ok(())
    }

    fn is_room_wanted(&self) -> bool {
        self.behind.is_room_wanted()
    }

    fn is_removed(&self) -> bool {
        self.behind.is_removed()
    }

    fn most_at_once(&self) -> usize {
        self.behind.most_at_once()
    }

    fn usage(&self) -> StoreUsage {
        let slabs = self.slabs.get();
        let later = || self.later.as_ref().map_or(0, |later| later.most_bytes / CHUNK_BYTES);
        StoreUsage {
            memory_slots: slabs.map_or_else(later, Slabs::chunk_count) << INDEX_BITS,
            memory_bytes: slabs.map_or(0, Slabs::present_bytes),
            memory_limit_bytes: slabs.map_or(0, Slabs::limit_bytes),
            compressed_pages: slabs.map_or(0, Slabs::object_count),
            filled_pages: self.filled_count.load(Relaxed),
            ..self.behind.usage()
        }
    }
}
