//! Where the content of a VM's evicted frames is, and what becomes of it there.

use self::dead::Dead;
use self::digests::Digests;
use self::disk_backed::{DiskBacked, GuestDisk};
use self::kept::Kept;
use self::owners::Owners;
use self::refaults::{Comeback, Refaults};
use self::view::View;
use std::io;
use std::sync::{Arc, OnceLock};

use ebb_digest::DigestKey;
use ebb_ledger::Content;
use ebb_store::{Store, StoreUsage};
use ebb_units::{FrameRange, Gfn};

use crate::frames::Frames;
use crate::support::counters::add;

pub mod arrive;
pub mod compare;
pub mod dead;
pub mod digests;
pub mod disk_backed;
pub mod huge;
pub mod judge;
pub mod kept;
pub mod owners;
pub mod place;
pub mod refaults;
pub mod slots;
pub mod verdict;
pub mod view;

/// Where the content of one VM's evicted frames is.
pub struct Residency {
    frames: Arc<Frames>,
    store: Box<dyn Store>,
    disk: Box<dyn GuestDisk>,
    disk_backed: DiskBacked,
    /// Digests of the content of disk-backed frames.
    digests: OnceLock<Digests>,
    owners: Owners,
    digest_key: Arc<DigestKey>,
    kept: Kept,
    dead: Dead,
    refaults: Refaults,
}

impl Residency {
    /// Starts from what the ledger says.
    ///
    /// # Errors
    /// `InvalidInput`: the ledger names slots that the store does not have.
    pub(crate) fn new(
        frames: &Arc<Frames>,
        store: Box<dyn Store>,
        disk: Box<dyn GuestDisk>,
        digest_key: Arc<DigestKey>,
    ) -> io::Result<Residency> {
        let (end, usage) = (frames.ram().end().0, store.usage());
        let residency = Residency {
            frames: Arc::clone(frames),
            owners: Owners::new(usage),
            kept: Kept::new(end, usage.disk_slots),
            store,
            disk,
            disk_backed: DiskBacked::default(),
            digests: OnceLock::new(),
            digest_key,
            dead: Dead::new(end),
            refaults: Refaults::new(end),
        };
        for (frames, content) in residency.frames.ledger().runs() {
            residency.take_note(frames, content)?;
        }
        Ok(residency)
    }

    /// Takes over the content of frames as an earlier process left it on record.
    fn take_note(&self, frames: FrameRange, content: Content) -> io::Result<()> {
        if !matches!(content, Content::Watch { .. }) && !self.frames.devices().was_taken(frames) {
            // No device is served before the pager exists.
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let counters = self.frames.counters();
        match content {
            Content::Empty { .. } => add(&counters.empty_frames, frames.count),
            Content::Saved { slot } => {
                // Adjacent frames may share a slot: each of them claims it.
                frames.frames().try_for_each(|_| self.store.claim(slot))?;
                frames.frames().for_each(|gfn| self.owners.set(slot, gfn));
                add(&counters.saved_frames, frames.count);
            }
            Content::OnDisk { block } => {
                frames.frames().for_each(|gfn| self.disk_backed.insert(gfn, block));
                add(&counters.on_disk_frames, frames.count);
            }
            _ => {}
        }
        Ok(())
    }

    /// The store that holds saved content.
    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// The guest's disks.
    pub(crate) fn disk(&self) -> &dyn GuestDisk {
        &*self.disk
    }

    /// Which frames are disk-backed by which blocks.
    pub(crate) fn disk_backed(&self) -> &DiskBacked {
        &self.disk_backed
    }

    /// Which frame's content is in a slot.
    pub(crate) fn owners(&self) -> &Owners {
        &self.owners
    }

    /// Slots that resident frames keep.
    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// What is known of content that the guest will not ask for.
    pub(crate) fn dead(&self) -> &Dead {
        &self.dead
    }

    /// Counts a frame whose content is read back because the frame was touched. Called while the
    /// frame is not resident yet. `is_at_limit`: something else has to go for it.
    pub(crate) fn count_refill(&self, gfn: Gfn, is_at_limit: impl FnOnce() -> bool) -> Comeback {
        let is_soon = self.refaults.came(gfn);
        let comeback = Comeback { is_soon, is_missed: is_soon || is_at_limit() };
        add(&self.frames.counters().refilled_frames, 1);
        self.count_comeback(1, comeback);
        comeback
    }

    /// Counts frames that were read ahead, and that a touch showed to be of use. They went when the
    /// touched frame did, and come back as it does.
    pub(crate) fn count_hits(&self, hits: u64, comeback: Comeback) {
        add(&self.frames.counters().ahead_hit_frames, hits);
        self.count_comeback(hits, comeback);
    }

    fn count_comeback(&self, frames: u64, Comeback { is_soon, is_missed }: Comeback) {
        let counters = self.frames.counters();
        add(&counters.refaulted_frames, if is_soon { frames } else { 0 });
        add(&counters.missed_frames, if is_missed { frames } else { 0 });
    }

    /// The key of content digests.
    pub(crate) fn digest_key(&self) -> &DigestKey {
        &self.digest_key
    }

    /// The VM's memory, for inspection.
    pub fn view(&self) -> View<'_> {
        View { ram: self.frames.ram(), ledger: self.frames.ledger(), store: &*self.store }
    }

    /// Returns how much of the store is in use.
    pub fn store_usage(&self) -> StoreUsage {
        self.store.usage()
    }

    /// Whether the swap file was removed: what it holds is lost once this process ends.
    pub fn is_store_removed(&self) -> bool {
        self.store.is_removed()
    }

    /// Limits the memory that the store uses for pages, to at most what it was made for. Called by
    /// the thread that evicts.
    ///
    /// # Errors
    /// The file for these pages cannot be made. Nothing has changed then.
    pub fn limit_store_memory(&self, bytes: u64) -> io::Result<()> {
        Ok(self.store.limit_memory(bytes)?)
    }

    /// Returns the memory that the host gives for this VM's RAM, in bytes: what is resident, and
    /// what the store keeps in memory.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn taken_bytes(&self) -> io::Result<u64> {
        Ok(self.frames.ram().resident_bytes()? + self.store.usage().memory_bytes)
    }
}
