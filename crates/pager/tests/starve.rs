//! Two VMs whose swap files are on one disk: what one of them wants at once does not fill the
//! disk's queue ahead of the other's fault. This process is both guests.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use ebb_pager::testing::{Guest, Machine, Threads, available, page_of, serve, watching};
use ebb_pager::{NothingKnown, Pager, PagerParts};
use ebb_store::{Medium, Protection, SwapFile, Traffic};
use ebb_units::{FRAME_BYTES, Gfn};
use testkit::{require, until};

const REFILL_THREADS: usize = 4;
/// Number of a guest's frames that are evicted, and of those that are about to be.
const HALF: u64 = 256;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Read,
    Write,
}

/// The machine's number, the kind, and the number of pages.
type Request = (usize, Kind, u64);

/// A disk that has any number of requests wait while it stands still.
#[derive(Default)]
struct Stand {
    still: bool,
    /// Requests since it was last made to stand still, in order.
    came: Vec<Request>,
}

#[derive(Default)]
struct OneDisk {
    stand: Mutex<Stand>,
    goes_on: Condvar,
}

/// Has the disk go on when it is dropped, even if the test fails meanwhile.
struct Still<'d>(&'d OneDisk);

impl Drop for Still<'_> {
    fn drop(&mut self) {
        self.0.stand.lock().unwrap().still = false;
        self.0.goes_on.notify_all();
    }
}

impl OneDisk {
    fn stand_still(&self) -> Still<'_> {
        *self.stand.lock().unwrap() = Stand { still: true, came: Vec::new() };
        Still(self)
    }

    fn come(&self, request: Request) {
        let mut stand = self.stand.lock().unwrap();
        stand.came.push(request);
        drop(self.goes_on.wait_while(stand, |stand| stand.still).unwrap());
    }

    fn came(&self) -> Vec<Request> {
        self.stand.lock().unwrap().came.clone()
    }

    fn of(&self, machine: usize, kind: Kind) -> usize {
        self.came().iter().filter(|came| (came.0, came.1) == (machine, kind)).count()
    }
}

/// A machine's part of that disk.
struct Part {
    machine: usize,
    disk: Arc<OneDisk>,
    file: File,
}

impl Medium for Part {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        self.disk.come((self.machine, Kind::Read, bytes.len() as u64 / FRAME_BYTES));
        self.file.read_at(bytes, offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        self.disk.come((self.machine, Kind::Write, bytes.len() as u64 / FRAME_BYTES));
        self.file.write_at(bytes, offset)
    }

    fn discard(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn is_direct(&self) -> bool {
        false
    }
}

struct Vm {
    guest: Guest,
    pager: Arc<Pager>,
    _threads: Threads,
}

impl Vm {
    fn new(machine: &Machine, number: usize, disk: &Arc<OneDisk>, traffic: &Arc<Traffic>) -> Vm {
        let run = machine.run();
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * HALF * FRAME_BYTES).unwrap();
        let part = Part { machine: number, disk: Arc::clone(disk), file };
        let store = SwapFile::over(part, run, 2 * HALF, Protection::Encrypted).unwrap();
        let parts = PagerParts { store: Box::new(store.among(traffic)), ..machine.parts() };
        let pager = watching(parts);
        let threads = serve(&pager, REFILL_THREADS);
        let guest = machine.guest();
        (0..2 * HALF).for_each(|n| guest.write(Gfn(n), &page_of(n + 2)));
        Vm { guest, pager, _threads: threads }
    }

    fn evict(&self, frames: std::ops::Range<u64>) {
        let frames: Vec<Gfn> = frames.map(Gfn).collect();
        assert_eq!(self.pager.evictor().evict(&frames, &NothingKnown).unwrap().saved, HALF);
    }

    fn check(&self, n: u64) {
        assert!(self.guest.read(Gfn(n)) == page_of(n + 2), "frame {n}");
    }
}

#[test]
fn a_fault_waits_for_little_of_what_another_vm_wants_at_once() {
    require!(available());
    let (disk, traffic) = (Arc::new(OneDisk::default()), Traffic::new());
    let machines = [Machine::small(), Machine::small()];
    let [storm, victim] = [0, 1].map(|number| Vm::new(&machines[number], number, &disk, &traffic));
    [&storm, &victim].into_iter().for_each(|vm| vm.evict(0..HALF));
    thread::scope(|scope| {
        let still = disk.stand_still();
        let (storm, victim) = (&storm, &victim);
        scope.spawn(|| victim.check(0));
        until("the victim's first read", || (disk.of(1, Kind::Read) == 1).then_some(()));
        // All at once: more faults than there are threads, and frames to evict.
        let before = storm.pager.counters().missing.load(Relaxed);
        (0..8).for_each(|part| drop(scope.spawn(move || storm.check(part * HALF / 8))));
        scope.spawn(|| storm.evict(HALF..2 * HALF));
        until("the storm", || {
            let taken = storm.pager.counters().missing.load(Relaxed) - before;
            let all = taken == REFILL_THREADS as u64 && disk.of(0, Kind::Write) == 1;
            (all && disk.of(0, Kind::Read) >= 2).then_some(())
        });
        scope.spawn(|| victim.check(HALF / 2));
        until("the victim's second read", || (disk.of(1, Kind::Read) == 2).then_some(()));
        let came = disk.came();
        drop(still);
        let ahead: Vec<&Request> = came.iter().filter(|request| request.0 == 0).collect();
        assert_eq!(ahead.len(), 3, "two reads and a write: {came:?}");
        assert!(ahead.iter().all(|(_, _, pages)| *pages <= 64), "{came:?}");
    });
    [&storm, &victim].into_iter().for_each(|vm| (0..2 * HALF).for_each(|n| vm.check(n)));
}
