//! How much of a disk's queue each swap file on it may fill while faults wait for others on the
//! same disk. Why: `docs/decisions/0039-*`.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::time::{ClockId, clock_gettime};

use crate::CLUSTER_SLOTS;
use crate::table::{Seat, TableSlot, Word};

/// Most reads in flight of one swap file while others are read.
const READS_EACH: u64 = 2;
/// Most pages of one read or write of a swap file while others are read.
const PAGES_EACH: u64 = 64;
/// A swap file counts as being read for this long after a read.
const LATELY_MS: u64 = 100;
/// A read of another process that takes longer than this never ends: the process was killed.
const LONGEST_MS: u64 = 10_000;

/// The reads of all swap files on one disk.
#[derive(Debug)]
pub struct Traffic {
    place: TableSlot,
    disk: u64,
}

impl Traffic {
    /// A disk that only swap files of this process share. None is on it yet.
    pub fn new() -> Arc<Traffic> {
        Arc::new(Traffic { place: TableSlot::any(), disk: 0 })
    }

    /// The disk with this device number, for one swap file. The table says what others read.
    pub fn at(place: TableSlot, disk: u64) -> Arc<Traffic> {
        Arc::new(Traffic { place, disk })
    }
}

/// Returns milliseconds of a clock that all processes of the host share, never 0.
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanoseconds) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds.saturating_mul(1000) + nanoseconds / 1_000_000 + 1
}

/// One swap file's part of the traffic.
#[derive(Debug)]
pub(crate) struct Lane {
    seat: Seat,
    disk: u64,
    reads: Mutex<Reads>,
    ended: Condvar,
}

/// Reads of this swap file since it was opened.
#[derive(Default, Debug)]
struct Reads {
    asked: u64,
    ended: u64,
}

impl Reads {
    /// Whether a read may begin: few of those before it are left. More than those may have ended,
    /// since reads pass it while no other swap file is read.
    fn lets(&self, ticket: u64) -> bool {
        ticket.saturating_sub(self.ended) < READS_EACH
    }
}

/// A read in flight.
pub(crate) struct Turn<'l>(&'l Lane);

impl Lane {
    pub(crate) fn new(traffic: &Arc<Traffic>) -> Lane {
        let (seat, disk) = (traffic.place.sit(), traffic.disk);
        seat.set(Word::Disk, disk);
        // Reads of a process that was killed have ended.
        seat.set(Word::Reads, 0);
        Lane { seat, disk, reads: Mutex::default(), ended: Condvar::new() }
    }

    /// Returns the most pages to read or write at once.
    pub(crate) fn most_pages(&self) -> u64 {
        match self.is_shared() {
            true => PAGES_EACH,
            false => CLUSTER_SLOTS,
        }
    }

    /// Begins a read. While other swap files are read, only a few reads of one swap file are in
    /// flight, in the order in which they come. A read waits for reads only, never for whoever has
    /// locked a frame.
    pub(crate) fn read(&self) -> Turn<'_> {
        let mut reads = self.reads();
        let ticket = reads.asked;
        reads.asked += 1;
        self.seat.add(Word::Reads, 1);
        self.seat.set(Word::LastRead, now_ms());
        // While the first of those that wait does so, others are in flight and wake it.
        let waits = |reads: &mut Reads| !reads.lets(ticket) && self.is_shared();
        drop(self.ended.wait_while(reads, waits).unwrap_or_else(PoisonError::into_inner));
        Turn(self)
    }

    /// Whether other swap files on the disk are read for faults, or were lately.
    fn is_shared(&self) -> bool {
        let now = now_ms();
        self.seat.any_other(|word| {
            let since = now.saturating_sub(word(Word::LastRead));
            let lasts = if word(Word::Reads) > 0 { LONGEST_MS } else { LATELY_MS };
            word(Word::Disk) == self.disk && word(Word::LastRead) > 0 && since <= lasts
        })
    }

    fn reads(&self) -> MutexGuard<'_, Reads> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Turn(lane) = self;
        let mut own = lane.reads();
        own.ended += 1;
        lane.seat.set(Word::LastRead, now_ms());
        lane.seat.subtract(Word::Reads, 1);
        drop(own);
        lane.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Table;

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
        // On a busy host, the first read may be long ago by the time of the look.
        let is_shared_by_both = || {
            [&other, &one, &one].iter().for_each(|lane| drop(lane.read()));
            (one.most_pages(), other.most_pages()) == (PAGES_EACH, PAGES_EACH)
        };
        assert!((0..100).any(|_| is_shared_by_both()));
        // As if both reads were long ago.
        [&one, &other].iter().for_each(|lane| lane.seat.set(Word::LastRead, 1));
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
            // It cannot have ended: only the end of `first` or `second` lets it begin.
            assert!(!third.is_finished());
            drop(first);
            third.join().unwrap();
            drop(second);
        });
        assert_eq!(lane.reads().ended, 3);
    }

    #[test]
    fn a_read_of_a_process_that_was_killed_ends_some_time() {
        let traffic = Traffic::new();
        let (one, other) = (Lane::new(&traffic), Lane::new(&traffic));
        std::mem::forget(other.read());
        assert!(one.is_shared());
        other.seat.set(Word::LastRead, 1);
        assert!(!one.is_shared() || now_ms() <= LONGEST_MS);
    }

    #[test]
    fn swap_files_of_another_disk_do_not_count() {
        let table = Table::own();
        let lane = |name: &str, disk| {
            let place = TableSlot::given(&table, table.give(name).unwrap());
            Lane::new(&Traffic::at(place, disk))
        };
        let (one, same, other) = (lane("one", 1), lane("same", 1), lane("other", 2));
        let _reads = other.read();
        assert!(!one.is_shared());
        drop(same.read());
        assert!(one.is_shared() && !other.is_shared());
    }

    #[test]
    fn a_read_that_others_have_passed_goes_on() {
        let lets = |ended| Reads { asked: 9, ended }.lets(3);
        assert_eq!([0, 1, 2, 3, 4, 8].map(lets), [false, false, true, true, true, true]);
    }
}
