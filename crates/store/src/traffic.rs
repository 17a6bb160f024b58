//! How much of a disk's queue each swap file on it may fill while others are read for faults.
//! Why: `docs/decisions/0039-*`.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::CLUSTER_SLOTS;

/// While others ask: reads of one swap file under way at once,
const READS_EACH: u64 = 2;
/// and pages in one of its reads or writes.
const PAGES_EACH: u64 = 64;
/// Whoever was read so lately still counts as one who asks.
const LATELY_MS: u64 = 100;

/// The reads of all swap files on one disk.
#[derive(Debug)]
pub struct Traffic {
    since: Instant,
    lanes: AtomicU64,
    /// Reads that were asked for and have not ended.
    reads: AtomicU64,
    /// Who was read last, and who was before that, if somebody else.
    last: [AtomicU64; 2],
}

impl Traffic {
    /// No swap file is on it yet.
    pub fn new() -> Arc<Traffic> {
        let (lanes, reads) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Traffic { since: Instant::now(), lanes, reads, last: Default::default() })
    }

    /// Milliseconds, from one second on: 0 is never.
    fn now_ms(&self) -> u64 {
        self.since.elapsed().as_millis() as u64 + 1000
    }
}

/// Who was read, and when, in one word.
const NUMBER_BITS: u32 = 20;

fn number_of(word: u64) -> u64 {
    word % (1 << NUMBER_BITS)
}

/// One swap file's part.
#[derive(Debug)]
pub(crate) struct Lane {
    traffic: Arc<Traffic>,
    number: u64,
    reads: Mutex<Reads>,
    ended: Condvar,
}

/// How many there ever were.
#[derive(Default, Debug)]
struct Reads {
    asked: u64,
    ended: u64,
}

impl Reads {
    /// Whether few of those before it are left. Others have passed it while nobody else asked:
    /// then more have ended than came before it.
    fn lets(&self, ticket: u64) -> bool {
        ticket.saturating_sub(self.ended) < READS_EACH
    }
}

/// A read that is under way.
pub(crate) struct Turn<'l>(&'l Lane);

impl Lane {
    pub(crate) fn new(traffic: &Arc<Traffic>) -> Lane {
        let number = number_of(traffic.lanes.fetch_add(1, Relaxed));
        let (reads, ended) = (Mutex::default(), Condvar::new());
        Lane { traffic: Arc::clone(traffic), number, reads, ended }
    }

    /// The most pages to read or write in one go.
    pub(crate) fn most_pages(&self) -> u64 {
        match self.is_shared(&self.reads()) {
            true => PAGES_EACH,
            false => CLUSTER_SLOTS,
        }
    }

    /// Begins a read. While others ask, those of one swap file go on a few at a time, in the
    /// order in which they come: each waits for reads only, never for whoever holds a frame.
    pub(crate) fn read(&self) -> Turn<'_> {
        let mut reads = self.reads();
        let ticket = reads.asked;
        reads.asked += 1;
        self.traffic.reads.fetch_add(1, Relaxed);
        // Some are under way as long as the first of those that wait does, and wake it.
        let waits = |reads: &mut Reads| !reads.lets(ticket) && self.is_shared(reads);
        drop(self.ended.wait_while(reads, waits).unwrap_or_else(PoisonError::into_inner));
        Turn(self)
    }

    /// Whether others are read for faults, or were lately.
    fn is_shared(&self, reads: &Reads) -> bool {
        let Traffic { reads: all, last, .. } = &*self.traffic;
        if all.load(Relaxed) > reads.asked - reads.ended {
            return true;
        }
        let others = |word: &u64| *word != 0 && number_of(*word) != self.number;
        let latest = last.iter().map(|word| word.load(Relaxed)).filter(others).max();
        let since = latest.map(|word| self.traffic.now_ms().saturating_sub(word >> NUMBER_BITS));
        since.is_some_and(|ms| ms <= LATELY_MS)
    }

    fn reads(&self) -> MutexGuard<'_, Reads> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Turn(lane) = self;
        let Traffic { reads, last: [last, other], .. } = &*lane.traffic;
        let now = lane.traffic.now_ms() << NUMBER_BITS | lane.number;
        let before = last.swap(now, Relaxed);
        if number_of(before) != lane.number {
            other.store(before, Relaxed);
        }
        let mut own = lane.reads();
        own.ended += 1;
        reads.fetch_sub(1, Relaxed);
        drop(own);
        lane.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_alone_has_all_of_it() {
        let traffic = Traffic::new();
        let lane = Lane::new(&traffic);
        let turns: Vec<Turn<'_>> = (0..8).map(|_| lane.read()).collect();
        assert_eq!(lane.most_pages(), CLUSTER_SLOTS);
        drop(turns);
        assert_eq!(lane.most_pages(), CLUSTER_SLOTS);
    }

    #[test]
    fn others_that_ask_or_asked_lately_have_it_shared() {
        let traffic = Traffic::new();
        let (one, other) = (Lane::new(&traffic), Lane::new(&traffic));
        let asks = other.read();
        assert_eq!((one.most_pages(), other.most_pages()), (PAGES_EACH, CLUSTER_SLOTS));
        drop(asks);
        drop(one.read());
        drop(one.read());
        assert_eq!((one.most_pages(), other.most_pages()), (PAGES_EACH, PAGES_EACH));
        // As if that had been long ago.
        traffic.last.iter().for_each(|word| word.store(number_of(word.load(Relaxed)), Relaxed));
        assert_eq!((one.most_pages(), other.most_pages()), (CLUSTER_SLOTS, CLUSTER_SLOTS));
    }

    #[test]
    fn reads_beyond_a_few_wait_for_those_before_them() {
        let traffic = Traffic::new();
        let (lane, other) = (Lane::new(&traffic), Lane::new(&traffic));
        let _asks = other.read();
        let (first, second) = (lane.read(), lane.read());
        std::thread::scope(|scope| {
            let third = scope.spawn(|| drop(lane.read()));
            while lane.reads().asked < 3 {
                std::thread::yield_now();
            }
            // It cannot end: only `first` or `second` let it begin.
            assert!(!third.is_finished());
            drop(first);
            third.join().unwrap();
            drop(second);
        });
        assert_eq!(lane.reads().ended, 3);
    }

    #[test]
    fn a_read_that_others_have_passed_goes_on() {
        let lets = |ended| Reads { asked: 9, ended }.lets(3);
        assert_eq!([0, 1, 2, 3, 4, 8].map(lets), [false, false, true, true, true, true]);
    }
}
