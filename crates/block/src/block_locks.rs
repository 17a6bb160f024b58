//! Locks on blocks: requests of any queue that meet on a block, one of them writing, run one
//! after the other.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Blocks that a request reads or writes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) blocks: Range<u64>,
    pub(crate) writes: bool,
}

impl Span {
    fn meets(&self, other: &Span) -> bool {
        (self.writes || other.writes)
            && self.blocks.start < other.blocks.end
            && other.blocks.start < self.blocks.end
    }
}

/// All block locks of a disk.
#[derive(Default)]
pub(crate) struct BlockLocks {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// Locked spans with the ID of their lock: at most the requests in flight, a few hundred.
    held: Vec<(u64, Span)>,
    next_id: u64,
    /// The eventfds of queues that wait for any lock.
    waiting: Vec<Arc<OwnedFd>>,
}

/// A lock on some blocks, until it is dropped.
pub(crate) struct Held {
    locks: Arc<BlockLocks>,
    id: u64,
}

impl BlockLocks {
    /// Locks all spans or none. If none, it writes to `wake` when another try is worthwhile.
    pub(crate) fn try_lock(self: &Arc<Self>, spans: &[Span], wake: &Arc<OwnedFd>) -> Option<Held> {
        let mut table = self.table();
        let busy = |span: &Span| table.held.iter().any(|(_, held)| held.meets(span));
        if spans.iter().any(busy) {
            if !table.waiting.iter().any(|waiting| Arc::ptr_eq(waiting, wake)) {
                table.waiting.push(wake.clone());
            }
            return None;
        }
        let id = table.next_id;
        table.next_id += 1;
        table.held.extend(spans.iter().map(|span| (id, span.clone())));
        Some(Held { locks: self.clone(), id })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut table = self.locks.table();
        table.held.retain(|(id, _)| *id != self.id);
        table.waiting.drain(..).for_each(|wake| wake_up(&wake));
    }
}

/// Makes an eventfd readable.
pub(crate) fn wake_up(wake: &OwnedFd) {
    // It fails only if the counter is at its maximum: the eventfd is readable then.
    let _: io::Result<usize> = rustix::io::write(wake, &1u64.to_ne_bytes()).map_err(Into::into);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn span(blocks: Range<u64>, writes: bool) -> Span {
        Span { blocks, writes }
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        let locks = Arc::new(BlockLocks::default());
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let reads = |blocks| locks.try_lock(&[span(blocks, false)], &wake);
        let writes = |blocks| locks.try_lock(&[span(blocks, true)], &wake);
        let (one, two) = (reads(0..4).unwrap(), reads(2..6).unwrap());
        assert!(writes(5..9).is_none());
        let beside = writes(6..9).unwrap();
        assert!(reads(8..9).is_none());
        drop((one, two));
        assert!(writes(0..6).is_some());
        drop(beside);
        assert!(locks.table().held.is_empty());
    }

    #[test]
    fn a_waiter_is_woken() {
        let locks = Arc::new(BlockLocks::default());
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let held = locks.try_lock(&[span(0..1, true)], &wake).unwrap();
        for _ in 0..3 {
            assert!(locks.try_lock(&[span(3..4, true), span(0..1, false)], &wake).is_none());
        }
        assert_eq!(locks.table().waiting.len(), 1);
        let mut count = [0; 8];
        assert!(rustix::io::read(&wake, &mut count).is_err());
        drop(held);
        assert!(rustix::io::read(&wake, &mut count).is_ok());
        // Where not all were free, none was locked.
        assert!(locks.try_lock(&[span(3..4, true)], &wake).is_some());
    }
}
