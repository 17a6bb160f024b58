//! Which slots are in use. Slots are used one after the other in clusters, so that pages evicted
//! together are together on disk.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::number_set::NumberSet;
use crate::slot_bits::{self, SlotBits};

/// Slots of a cluster: 1 MiB of pages.
pub const CLUSTER_SLOTS: u64 = 256;

const _: () = assert!(CLUSTER_SLOTS == slot_bits::COUNT);
/// Classes of clusters by free slots: from 1, from 64, from 128, from 192 on, and all.
const CLASSES: usize = 5;

/// A fixed number of slots. One thread at a time takes slots, any thread may release them.
pub(crate) struct Clusters {
    clusters: Vec<Cluster>,
    /// Clusters with free slots by class, eventually. A release frees the slot and then adds the
    /// cluster. Only a thread that takes slots removes one, and looks at its slots after that.
    by_free: [NumberSet; CLASSES],
    /// Clusters with slots that were released since `take_stale` visited them.
    touched: NumberSet,
    taking: Mutex<Cursor>,
    slot_count: u64,
    used: AtomicU64,
}

/// The next slot to take, if it is free.
#[derive(Clone, Copy)]
struct Cursor {
    cluster: usize,
    slot: u64,
}

#[derive(Default)]
struct Cluster {
    /// 1: in use. Bits after the last slot are in use for ever.
    used: SlotBits,
    /// 1: released since `take_stale` visited it.
    stale: SlotBits,
}

impl Clusters {
    pub(crate) fn new(slot_count: u64) -> Clusters {
        let count = slot_count.div_ceil(CLUSTER_SLOTS) as usize;
        let clusters: Vec<Cluster> = (0..count).map(|_| Cluster::default()).collect();
        if let Some(last) = clusters.last()
            && !slot_count.is_multiple_of(CLUSTER_SLOTS)
        {
            last.used.fill(slot_count % CLUSTER_SLOTS, CLUSTER_SLOTS);
        }
        let by_free = std::array::from_fn(|_| NumberSet::new(count));
        let slots = Clusters {
            clusters,
            by_free,
            touched: NumberSet::new(count),
            taking: Mutex::new(Cursor { cluster: usize::MAX, slot: 0 }),
            slot_count,
            used: AtomicU64::new(0),
        };
        (0..count).for_each(|cluster| slots.list(cluster));
        slots
    }

    /// Marks adjacent free slots as in use, up to `most`. Returns the first one and how many.
    /// `None`: all slots are in use.
    pub(crate) fn take_run(&self, most: u64) -> Option<(u64, u64)> {
        let mut cursor = self.taking();
        loop {
            if let Some(cluster) = self.clusters.get(cursor.cluster)
                && let Some((first, count)) =
                    cluster.used.free_run(cursor.slot, CLUSTER_SLOTS, most)
            {
                cluster.used.fill(first, first + count);
                self.used.fetch_add(count, Relaxed);
                cursor.slot = first + count;
                return Some((cursor.cluster as u64 * CLUSTER_SLOTS + first, count));
            }
            // Slots before the cursor may have been released meanwhile.
            self.list(cursor.cluster);
            *cursor = Cursor { cluster: self.emptiest()?, slot: 0 };
        }
    }

    /// Does as [`Clusters::take_run`] with slots that were released and that
    /// [`Clusters::take_stale`] has not visited since: they have space on the disk.
    pub(crate) fn take_stale_run(&self, most: u64) -> Option<(u64, u64)> {
        let _taking = self.taking();
        let touched = self.clusters.iter().enumerate().filter(|(at, _)| self.touched.has(*at));
        let (index, cluster, first, free) = { touched }
            .filter_map(|(index, cluster)| {
                let (first, count) =
                    slot_bits::runs(cluster.stale.without(&cluster.used)).next()?;
                Some((index, cluster, first, count))
            })
            .next()?;
        let count = free.min(most);
        cluster.used.fill(first, first + count);
        self.used.fetch_add(count, Relaxed);
        Some((index as u64 * CLUSTER_SLOTS + first, count))
    }

    /// Marks this slot as in use. `false`: it is in use already, or does not exist.
    pub(crate) fn take_this(&self, slot: u64) -> bool {
        let _taking = self.taking();
        let taken = self.place(slot).is_some_and(|(cluster, at)| cluster.used.set(at));
        self.used.fetch_add(u64::from(taken), Relaxed);
        taken
    }

    /// Frees a slot that nothing was written to, and that so has no space of its own to free.
    pub(crate) fn give_back(&self, slot: u64) {
        let Some((cluster, at)) = self.place(slot) else { return };
        if cluster.used.clear(at) {
            self.count_free();
            self.list((slot / CLUSTER_SLOTS) as usize);
        }
    }

    /// Frees a slot that was written to. It never waits.
    pub(crate) fn release(&self, slot: u64) {
        let Some((cluster, at)) = self.place(slot) else { return };
        if !cluster.used.clear(at) {
            return;
        }
        // After the clear: a thread that looks for stale slots takes only free ones. It passes over
        // a slot that was taken again meanwhile.
        cluster.stale.set(at);
        let index = (slot / CLUSTER_SLOTS) as usize;
        self.touched.insert(index);
        self.count_free();
        self.list(index);
    }

    fn count_free(&self) {
        let before = self.used.fetch_sub(1, Relaxed);
        debug_assert!(before > 0, "a slot was in use that nobody had counted");
    }

    /// Calls `visit` with each run (first, count) of slots that were released since the last
    /// visit and are still free, until `go_on` returns false after one. Nobody gets these slots
    /// meanwhile.
    ///
    /// # Errors
    /// What `visit` returns. Slots whose visit failed, or was still to come, stay to be visited.
    pub(crate) fn take_stale<E>(
        &self,
        mut visit: impl FnMut(u64, u64) -> Result<(), E>,
        go_on: impl Fn() -> bool,
    ) -> Result<(), E> {
        while let Some(index) = self.touched.first() {
            self.touched.remove(index);
            let Some(cluster) = self.clusters.get(index) else { continue };
            let held = self.hold_stale(cluster);
            let first = index as u64 * CLUSTER_SLOTS;
            let (mut result, mut ends) = (Ok(()), false);
            for (at, count) in slot_bits::runs(held) {
                let visited = !ends;
                if visited {
                    result = visit(first + at, count);
                    ends = result.is_err() || !go_on();
                }
                if !visited || result.is_err() {
                    cluster.stale.fill(at, at + count);
                }
            }
            cluster.used.clear_all(held);
            self.list(index);
            if ends {
                self.touched.insert(index);
                return result;
            }
        }
        Ok(())
    }

    pub(crate) fn is_taken(&self, slot: u64) -> bool {
        self.place(slot).is_some_and(|(cluster, at)| cluster.used.has(at))
    }

    /// Returns how many slots are in use.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Returns how many slots there are.
    pub(crate) fn count(&self) -> u64 {
        self.slot_count
    }

    /// Marks the stale free slots of a cluster as in use, and returns them.
    fn hold_stale(&self, cluster: &Cluster) -> slot_bits::Words {
        let _taking = self.taking();
        let held = cluster.stale.take_all(&cluster.used);
        cluster.used.set_all(held);
        held
    }

    fn taking(&self) -> MutexGuard<'_, Cursor> {
        self.taking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first cluster of the emptiest class.
    fn emptiest(&self) -> Option<usize> {
        for (class, set) in self.by_free.iter().enumerate().rev() {
            while let Some(index) = set.first() {
                set.remove(index);
                // Look only after the removal: a release after this adds the cluster again.
                match self.clusters.get(index).and_then(Cluster::class) {
                    Some(now) if now >= class => return Some(index),
                    _ => self.list(index),
                }
            }
        }
        None
    }

    fn list(&self, index: usize) {
        let class = self.clusters.get(index).and_then(Cluster::class);
        if let Some(set) = class.and_then(|class| self.by_free.get(class)) {
            set.insert(index);
        }
    }

    /// Returns a slot's cluster and its index there.
    fn place(&self, slot: u64) -> Option<(&Cluster, u64)> {
        let inside = (slot < self.slot_count).then_some(slot)?;
        let cluster = self.clusters.get((inside / CLUSTER_SLOTS) as usize)?;
        Some((cluster, inside % CLUSTER_SLOTS))
    }
}

impl Cluster {
    /// Returns the class. `None`: no slot is free.
    fn class(&self) -> Option<usize> {
        let free = CLUSTER_SLOTS as usize - self.used.count() as usize;
        (free > 0).then_some(free / (CLUSTER_SLOTS as usize / (CLASSES - 1)))
    }
}

#[cfg(test)]
mod tests;
