//! Pages in slots on a disk, each sealed: `docs/swap-store.md`.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_units::FRAME_BYTES;

use crate::clusters::{CLUSTER_SLOTS, Clusters};
use crate::page_buffer::{Pages, Pool};
use crate::room::{Part, Promise, Quota, SharedRoom};
use crate::sealer::{Protection, Sealer, SlotGeneration, Tag};
use crate::seals::Seals;
use crate::traffic::{Lane, Traffic};
use crate::{
    Disk, Loaded, MEMORY_SLOTS, Medium, Page, SavedBatch, Store, StoreError, StoreUsage, key,
    medium,
};

/// Pages to read at once where the reader's memory is not aligned.
const PIECE_PAGES: usize = 16;
/// Longest time of one trimming, up to one more discard: other work of its thread waits.
const TRIM: Duration = Duration::from_millis(50);

/// Slots on a disk. A released slot takes no space once it is trimmed.
pub struct SwapFile<M = Disk> {
    medium: M,
    clusters: Clusters,
    seals: Seals,
    sealer: Sealer,
    /// Buffers for sealed pages to write.
    buffers: Pool,
    part: Part,
    lane: Lane,
}

impl SwapFile {
    /// Opens or makes the swap file, with room for `slot_count` slots. Their seals and key are in
    /// `run`, the VM's run directory. No slot is in use until it is saved or claimed.
    ///
    /// # Errors
    /// As open(2) and ftruncate(2). [`StoreError::Unusable`]: it is another VM's.
    pub fn open(
        path: &Path,
        run: &Path,
        slot_count: u64,
        protection: Protection,
    ) -> Result<SwapFile, StoreError> {
        let disk = Disk::open(path, slot_count.saturating_mul(FRAME_BYTES))?;
        let swap = SwapFile::over(disk, run, slot_count, protection)?;
        swap.note_identity()?;
        Ok(swap)
    }

    /// Opens a swap file that has pages in these slots, some of all. It makes no file, and takes no
    /// other file for it: it must be the one that was opened last, or have one of these pages, as a
    /// copy of it does.
    ///
    /// # Errors
    /// Those of [`SwapFile::open`], and those of reading the pages. [`StoreError::Gone`]: it is not
    /// there. [`StoreError::Unusable`]: its seals or its key are lost. Nothing is changed then.
    pub fn open_again(
        path: &Path,
        run: &Path,
        slot_count: u64,
        protection: Protection,
        held: &[u64],
    ) -> Result<SwapFile, StoreError> {
        let bytes = slot_count.saturating_mul(FRAME_BYTES);
        let disk = Disk::open_again(path, bytes)?;
        let is_sealed = match (protection, Seals::open(run, protection, slot_count)?) {
            (_, None) => false,
            (Protection::Encrypted, _) => key::load(run)?.is_some(),
            (Protection::Checksum, _) => true,
        };
        if !is_sealed {
            let why = format!("{}: the seals or the key of its pages are lost", run.display());
            return Err(StoreError::Unusable(why));
        }
        let swap = SwapFile::over(disk, run, slot_count, protection)?;
        let is_last = swap.medium.identity()? == Some(swap.seals.identity());
        if !is_last && !swap.has_one_of(held)? {
            let why = format!("{} is another file, or a new one", path.display());
            return Err(StoreError::Gone(why));
        }
        swap.medium.make_room(bytes)?;
        swap.note_identity()?;
        Ok(swap)
    }

    fn note_identity(&self) -> Result<(), StoreError> {
        self.seals.note_identity(self.medium.identity()?.unwrap_or_default());
        Ok(())
    }
}

impl<M: Medium> SwapFile<M> {
    /// Opens a swap file on any medium, with slot 0 at the medium's byte 0.
    ///
    /// # Errors
    /// As [`SwapFile::open`].
    pub fn over(
        medium: M,
        run: &Path,
        slot_count: u64,
        protection: Protection,
    ) -> Result<SwapFile<M>, StoreError> {
        if slot_count > MEMORY_SLOTS {
            return Err(StoreError::Unusable(format!("{slot_count} slots are too many")));
        }
        let (seals, sealer) = match protection {
            Protection::Encrypted => keyed(run, slot_count)?,
            Protection::Checksum => match Seals::open(run, protection, slot_count)? {
                Some(seals) => (seals, Sealer::Xxh3),
                None => (Seals::create(run, protection, slot_count)?, Sealer::Xxh3),
            },
        };
        let clusters = Clusters::new(slot_count);
        let buffers = Pool::new(CLUSTER_SLOTS as usize);
        let part = Part::new(&SharedRoom::new(Quota { floor_bytes: Some(0), ..Quota::default() }));
        let lane = Lane::new(&Traffic::new());
        Ok(SwapFile { medium, clusters, seals, sealer, buffers, part, lane })
    }

    /// Limits it to a room that it shares with others. Until then it has no limit.
    #[must_use]
    pub fn within(self, room: &Arc<SharedRoom>) -> SwapFile<M> {
        SwapFile { part: Part::new(room), ..self }
    }

    /// Makes it share a disk's traffic with others. Until then it has the disk for itself.
    #[must_use]
    pub fn among(self, traffic: &Arc<Traffic>) -> SwapFile<M> {
        SwapFile { lane: Lane::new(traffic), ..self }
    }

    /// Takes adjacent slots with room, up to `most`: either room is promised for them, or they have
    /// space on the disk already.
    fn take_run(&self, most: u64) -> Result<(u64, u64, Option<Promise<'_>>), StoreError> {
        match self.part.promise(&self.medium, most) {
            Ok(promise) => {
                let run = self.clusters.take_run(promise.pages).ok_or(StoreError::Full)?;
                Ok((run.0, run.1, Some(promise)))
            }
            Err(error) => match self.clusters.take_stale_run(most) {
                Some((first, count)) => Ok((first, count, None)),
                None => {
                    self.part.tell_others(&error);
                    Err(error)
                }
            },
        }
    }

    /// Frees a slot whose page could not be stored. A part of that page may be in it, until the
    /// slot's next page overwrites it.
    fn give_back(&self, slot: u64, promised: bool) {
        match promised {
            true => self.clusters.give_back(slot),
            false => self.clusters.release(slot),
        }
    }

    /// Seals pages and writes them to adjacent slots. Returns how many are stored.
    fn save_run(&self, first: u64, pages: &[Page]) -> (usize, Option<StoreError>) {
        if let Err(error) = self.seals.prepare(first) {
            return (0, Some(error));
        }
        match pages {
            _ if self.sealer.is_plain() && medium::takes(&self.medium, pages) => {
                let sealed = { pages.iter().zip(first..) }.try_for_each(|(page, slot)| {
                    let place = self.seals.next(slot)?;
                    self.seals.set(place, Sealer::tag(place, page));
                    Ok(())
                });
                self.write_sealed(first, pages, sealed)
            }
            [page] => {
                let mut sealed = Pages::<1>::zeroed();
                let result = self.seal(first, &[*page], &mut sealed.0);
                self.write_sealed(first, &sealed.0, result)
            }
            _ => self.buffers.with(|buffer| {
                let sealed = buffer.get_mut(..pages.len()).unwrap_or_default();
                let result = self.seal(first, pages, sealed);
                self.write_sealed(first, sealed, result)
            }),
        }
    }

    fn seal(&self, first: u64, pages: &[Page], sealed: &mut [Page]) -> Result<(), StoreError> {
        for ((page, sealed), slot) in pages.iter().zip(sealed).zip(first..) {
            let place = self.seals.next(slot)?;
            let tag = self.sealer.seal(place, page, sealed).ok_or(StoreError::Full)?;
            self.seals.set(place, tag);
        }
        Ok(())
    }

    fn write_sealed(
        &self,
        first: u64,
        pages: &[Page],
        sealed: Result<(), StoreError>,
    ) -> (usize, Option<StoreError>) {
        if let Err(error) = sealed {
            return (0, Some(error));
        }
        let mut stored = 0;
        while let Some(rest) = pages.get(stored..).filter(|rest| !rest.is_empty()) {
            let piece = rest.get(..self.lane.most_pages() as usize).unwrap_or(rest);
            let at = (first + stored as u64) * FRAME_BYTES;
            let (count, error) = medium::write(&self.medium, at, piece);
            stored += count;
            if error.is_some() {
                return (stored, error);
            }
        }
        (stored, None)
    }

    /// Returns the seal of a slot that is in use.
    fn seal_of(&self, slot: u64) -> Option<(SlotGeneration, Tag)> {
        self.clusters.is_taken(slot).then(|| self.seals.get(slot))?
    }

    /// Whether one of these slots has its page.
    ///
    /// # Errors
    /// None has, and one cannot be read.
    fn has_one_of(&self, slots: &[u64]) -> Result<bool, StoreError> {
        let (mut sealed, mut page) = (Pages::<1>::zeroed(), [0; FRAME_BYTES as usize]);
        let mut unread = None;
        for &slot in slots {
            self.seals.prepare(slot)?;
            let Some((place, tag)) = self.seals.get(slot) else { continue };
            match medium::read(&self.medium, slot * FRAME_BYTES, &mut sealed.0) {
                (_, Some(error)) => unread = Some(error),
                _ if self.sealer.open(place, tag, &sealed.0[0], &mut page) => return Ok(true),
                _ => {}
            }
        }
        unread.map_or(Ok(false), |error| Err(error.into()))
    }

    /// Opens in place what was read for the slots from `first` on.
    fn open_each(&self, first: u64, pages: &mut [Page], mut good: impl FnMut(usize)) {
        for ((index, page), slot) in pages.iter_mut().enumerate().zip(first..) {
            if let Some((place, tag)) = self.seal_of(slot)
                && self.sealer.open_in_place(place, tag, page)
            {
                good(index);
            }
        }
    }

    /// Loads pages through aligned memory, a piece at a time.
    fn load_pieces(
        &self,
        first: u64,
        pages: &mut [Page],
        loaded: &mut Loaded,
    ) -> Result<(), StoreError> {
        let mut piece = Pages::<PIECE_PAGES>::zeroed();
        for (number, to) in pages.chunks_mut(PIECE_PAGES).enumerate() {
            let (start, length) = (number * PIECE_PAGES, to.len());
            let sealed = piece.0.get_mut(..length).unwrap_or_default();
            let slot = first + start as u64;
            let turn = self.lane.read();
            let (count, error) = medium::read(&self.medium, slot * FRAME_BYTES, sealed);
            drop(turn);
            let read = sealed.get_mut(..count).unwrap_or_default();
            self.open_each(slot, read, |index| loaded.set(start + index));
            to.copy_from_slice(sealed);
            match error {
                Some(error) if loaded.count() == 0 => return Err(error.into()),
                Some(_) => break,
                None => {}
            }
        }
        Ok(())
    }
}

/// Opens or makes seals and their key, always together. A key whose seals are lost must not be
/// used again, since nobody knows for which places it was used.
fn keyed(run: &Path, slot_count: u64) -> Result<(Seals, Sealer), StoreError> {
    let seals = Seals::open(run, Protection::Encrypted, slot_count)?;
    match (seals, key::load(run)?) {
        (Some(seals), Some(key)) => Ok((seals, Sealer::aes(&key))),
        _ => {
            crate::remove_file(&run.join(key::FILE))?;
            let seals = Seals::create(run, Protection::Encrypted, slot_count)?;
            Ok((seals, Sealer::aes(&*key::create(run)?)))
        }
    }
}

impl<M: Medium> Store for SwapFile<M> {
    fn save(&self, page: &Page) -> Result<u64, StoreError> {
        let (slot, _, promise) = self.take_run(1)?;
        match self.save_run(slot, std::slice::from_ref(page)) {
            (1, _) => Ok(slot),
            (_, error) => {
                self.give_back(slot, promise.is_some());
                Err(error.unwrap_or(StoreError::Full))
            }
        }
    }

    fn save_batch(&self, pages: &[Page]) -> SavedBatch {
        let mut batch = SavedBatch { slots: vec![None; pages.len()], error: None };
        let mut left = (pages, batch.slots.as_mut_slice());
        while batch.error.is_none() && !left.0.is_empty() {
            let (first, count, promise) = match self.take_run(left.0.len() as u64) {
                Ok(run) => run,
                Err(error) => {
                    batch.error = Some(error);
                    break;
                }
            };
            let (now, pages) = left.0.split_at(count as usize);
            let (slots, later) = left.1.split_at_mut(count as usize);
            let (stored, error) = self.save_run(first, now);
            for (index, (to, slot)) in slots.iter_mut().zip(first..).enumerate() {
                match index < stored {
                    true => *to = Some(slot),
                    false => self.give_back(slot, promise.is_some()),
                }
            }
            // Update what the file takes before the promise ends.
            let _ = self.part.look(&self.medium);
            drop(promise);
            (left, batch.error) = ((pages, later), error);
        }
        batch
    }

    fn load(&self, slot: u64, page: &mut Page) -> Result<(), StoreError> {
        let (place, tag) = self.seal_of(slot).ok_or(StoreError::NotInUse { slot })?;
        let mut sealed = Pages::<1>::zeroed();
        let turn = self.lane.read();
        let (_, error) = medium::read(&self.medium, slot * FRAME_BYTES, &mut sealed.0);
        drop(turn);
        let [sealed] = &sealed.0;
        match error {
            Some(error) => Err(error.into()),
            None if self.sealer.open(place, tag, sealed, page) => Ok(()),
            None => Err(StoreError::Damaged { slot }),
        }
    }

    fn load_batch(&self, first: u64, pages: &mut [Page]) -> Result<Loaded, StoreError> {
        let most = pages.len().min(CLUSTER_SLOTS as usize) as u64;
        let end = first.saturating_add(most).min(self.clusters.count());
        let mut loaded = Loaded::default();
        // Free slots at the end need not be read.
        let Some(last) = (first..end).rev().find(|&slot| self.clusters.is_taken(slot)) else {
            return Ok(loaded);
        };
        let pages = pages.get_mut(..=(last - first) as usize).unwrap_or_default();
        if !medium::takes(&self.medium, pages) {
            self.load_pieces(first, pages, &mut loaded)?;
            return Ok(loaded);
        }
        let turn = self.lane.read();
        let (count, error) = medium::read(&self.medium, first * FRAME_BYTES, pages);
        drop(turn);
        let read = pages.get_mut(..count).unwrap_or_default();
        self.open_each(first, read, |index| loaded.set(index));
        match error {
            Some(error) if count == 0 => Err(error.into()),
            _ => Ok(loaded),
        }
    }

    fn load_some(
        &self,
        first: u64,
        pages: &mut [Page],
        which: &[usize],
        ready: &mut dyn FnMut(usize, &Page),
    ) -> Result<(), StoreError> {
        let most = pages.len().min(CLUSTER_SLOTS as usize);
        let pages = pages.get_mut(..most).unwrap_or_default();
        if !medium::takes(&self.medium, pages) {
            let mut loaded = Loaded::default();
            let read = self.load_pieces(first, pages, &mut loaded);
            return read.map(|()| loaded.tell(pages, which, ready));
        }
        let turn = self.lane.read();
        let (count, error) = medium::read(&self.medium, first * FRAME_BYTES, pages);
        drop(turn);
        for &at in which.iter().filter(|at| **at < count) {
            if let Some((place, tag)) = self.seal_of(first + at as u64)
                && self.sealer.open_in_place(place, tag, &mut pages[at])
            {
                ready(at, &pages[at]);
            }
        }
        match error {
            Some(error) if count == 0 => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn release(&self, slot: u64) {
        self.clusters.release(slot);
    }

    fn trim(&self) -> Result<(), StoreError> {
        let (mut any, end) = (false, Instant::now() + TRIM);
        let discard = |first, count| {
            any = true;
            Ok(self.medium.discard(first * FRAME_BYTES, count * FRAME_BYTES)?)
        };
        let trimmed = self.clusters.take_stale(discard, || Instant::now() < end);
        if any {
            // Others may use the space that was freed.
            self.part.look(&self.medium)?;
        }
        trimmed
    }

    fn is_room_wanted(&self) -> bool {
        self.part.is_wanted()
    }

    fn is_removed(&self) -> bool {
        self.medium.is_removed()
    }

    fn claim(&self, slot: u64) -> Result<(), StoreError> {
        if !self.clusters.take_this(slot) {
            return Err(StoreError::NotInUse { slot });
        }
        let known = self.seals.prepare(slot).map(|()| self.seals.get(slot).is_some());
        match known {
            Ok(true) => Ok(()),
            result => {
                self.clusters.release(slot);
                result.and(Err(StoreError::NotInUse { slot }))
            }
        }
    }

    fn most_at_once(&self) -> usize {
        self.lane.most_pages() as usize
    }

    fn usage(&self) -> StoreUsage {
        let (disk_slots, disk_slots_used) = (self.clusters.count(), self.clusters.used());
        let file_bytes = self.part.taken_bytes();
        StoreUsage { disk_slots, disk_slots_used, file_bytes, ..StoreUsage::default() }
    }
}
