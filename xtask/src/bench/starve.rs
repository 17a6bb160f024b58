//! What a VM that refills its memory again and again costs another VM on the same disk.
//!
//! The VMs are memory of this process with a pager each, as `ebbd` has them. The storm touches more
//! than its limit; the victim touches a non-resident page every 5 ms.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_ledger::{Ledger, Tables};
use ebb_pager::{
    DigestKey, FaultThread, Grain, NoDevices, NoDisk, NothingKnown, Pager, PagerParts,
    RefillThreads,
};
use ebb_store::{Disk, Medium, Protection, SwapFile, Traffic};
use ebb_sys::mapping::Mapping;
use ebb_sys::process::Process;
use ebb_sys::uffd::{Uffd, feature};
use ebb_units::{FRAME_BYTES, Gfn, Gpa};
use ebb_vm::ram::Backing;
use ebb_vm::{Puncher, Ram, Region};
use vmtest::Scratch;

use super::bare::Bare;
use super::handlers::run_directory;
use super::llfree::shuffle;
use super::report::Report;
use super::rounds::{Rounds, percentile_us, us};
use super::row::Row;
use super::session::Session;

/// Size of the storm's guest, and its limit.
const STORM_FRAMES: u64 = (192 << 20) / FRAME_BYTES;
const STORM_LIMIT_BYTES: u64 = 48 << 20;
/// Processors of the storm's guest.
const STORM_VCPUS: u64 = 4;
/// Frames that it touches in a row before it jumps.
const STRIDE: u64 = 64;
const VICTIM_FRAMES: u64 = (64 << 20) / FRAME_BYTES;
/// Distance between the victim's frames, so that none is read ahead with another.
const APART: u64 = 64;
const PAUSE: Duration = Duration::from_millis(5);
const REFILL_THREADS: usize = 16;
const EVICTED_AT_ONCE: u64 = 512;
/// Time to measure the storm alone.
const ALONE: Duration = Duration::from_secs(2);
/// Goal: with a budget, the storm has at least this part of its speed without one.
const SPEED: f64 = 0.95;

/// Disk with one head: time for each request, and bytes a second.
const SEEK: Duration = Duration::from_millis(2);
const HEAD_BYTES_S: f64 = 120e6;

/// Serves requests one by one, in the order in which they came.
#[derive(Default)]
struct Head {
    /// Number of requests that came, and of those that were served.
    counts: Mutex<(u64, u64)>,
    moved: Condvar,
}

impl Head {
    fn serve<T>(&self, bytes: usize, request: impl FnOnce() -> T) -> T {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = counts.0;
        counts.0 += 1;
        drop(self.moved.wait_while(counts, |(_, served)| *served != turn));
        thread::sleep(SEEK + Duration::from_secs_f64(bytes as f64 / HEAD_BYTES_S));
        let done = request();
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).1 += 1;
        self.moved.notify_all();
        done
    }
}

/// A file on this machine's disk: as it is, or as on a disk with one head.
struct Place(Disk, Option<Arc<Head>>);

impl Place {
    fn serve<T>(&self, bytes: usize, request: impl FnOnce(&Disk) -> T) -> T {
        match &self.1 {
            Some(head) => head.serve(bytes, || request(&self.0)),
            None => request(&self.0),
        }
    }
}

impl Medium for Place {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        self.serve(bytes.len(), |disk| disk.read_at(offset, bytes))
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize> {
        self.serve(bytes.len(), |disk| disk.write_at(offset, bytes))
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.0.discard(offset, bytes)
    }

    fn is_direct(&self) -> bool {
        self.0.is_direct()
    }
}

/// Memory with its pager.
struct Vm {
    // The threads must end before the mapping is dropped whose faults they serve.
    _threads: (FaultThread, RefillThreads),
    pager: Arc<Pager>,
    guest: Arc<Mapping>,
    frames: u64,
    _run: Scratch,
}

impl Vm {
    fn new(place: Place, frames: u64, traffic: Option<&Arc<Traffic>>) -> anyhow::Result<Vm> {
        let Bare { file, guest, own: mapping } = Bare::new(frames * FRAME_BYTES, false)?;
        let run = run_directory()?;
        let (bytes, hva) = (guest.bytes(), guest.address());
        let region = Region { gpa: Gpa(0), bytes, hva, file: 0, offset: 0 };
        let ram = Ram::new(vec![region], vec![Backing::new(file, mapping)])?;
        let uffd = Uffd::new().context("userfaultfd: run as root")?;
        uffd.handshake(feature::needed()).context("userfaultfd lacks a feature: `ebb doctor`")?;
        let ledger = Ledger::create(&run.path().join("ledger"), ram.end(), Tables::WhenSplit)?;
        let store = SwapFile::over(place, run.path(), frames, Protection::Encrypted)?;
        let store = match traffic {
            Some(traffic) => store.among(traffic),
            None => store,
        };
        let (pager, _) = Pager::new(PagerParts {
            puncher: Puncher::new(ram),
            ledger,
            uffd,
            grain: Grain::Frame,
            devices: Box::new(NoDevices),
            store: Box::new(store),
            disk: Box::new(NoDisk),
            digest_key: Arc::new(DigestKey::random()?),
        })?;
        pager.frames().watch_all()?;
        let pager = Arc::new(pager);
        let me = Process::open(std::process::id() as i32)?.as_fd().try_clone_to_owned()?;
        let faults = FaultThread::start(pager.clone(), me, |why| {
            eprintln!("the fault thread ends: {why:?}");
        })?;
        let refills = RefillThreads::start(&pager, REFILL_THREADS)?;
        let vm =
            Vm { _threads: (faults, refills), pager, guest: Arc::new(guest), frames, _run: run };
        // The memory is filled and evicted in pieces, so that no more of it than needed is
        // resident.
        for first in (0..frames).step_by(EVICTED_AT_ONCE as usize) {
            (first..first + EVICTED_AT_ONCE).for_each(|frame| write(&vm.guest, frame, frame));
            vm.evict(first)?;
        }
        Ok(vm)
    }

    fn evict(&self, first: u64) -> anyhow::Result<()> {
        let frames: Vec<Gfn> = (first..first + EVICTED_AT_ONCE).map(Gfn).collect();
        self.pager.evictor().evict(&frames, &NothingKnown)?;
        Ok(())
    }

    fn refilled(&self) -> u64 {
        let counters = &self.pager.counters();
        counters.refilled_frames.load(Relaxed) + counters.ahead_frames.load(Relaxed)
    }
}

/// Writes a page of which half does not compress. No two pages are alike.
fn write(guest: &Mapping, frame: u64, seed: u64) {
    let Some(words) = guest.words(frame * FRAME_BYTES, (FRAME_BYTES / 8) as usize) else { return };
    for (word, at) in words.iter().zip(1..) {
        word.store((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ at), Relaxed);
    }
}

/// A guest at work, and a thread that keeps it below its limit, until it is stopped.
struct Storm {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<anyhow::Result<()>>>,
}

impl Storm {
    fn start(vm: &Arc<Vm>) -> Storm {
        let stop = Arc::new(AtomicBool::new(false));
        let begin = |work: fn(&Vm, u64, &AtomicBool) -> anyhow::Result<()>, number| {
            let (vm, stop) = (Arc::clone(vm), Arc::clone(&stop));
            thread::spawn(move || work(&vm, number, &stop))
        };
        vm.pager.room().set_marks(STORM_LIMIT_BYTES - (4 << 20), STORM_LIMIT_BYTES);
        let mut threads = vec![begin(keep_limit, 0)];
        threads.extend((0..STORM_VCPUS).map(|number| begin(touch, number)));
        Storm { stop, threads }
    }

    fn end(self) -> anyhow::Result<()> {
        self.stop.store(true, Release);
        self.threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => Err(crate::guard::reason(&*panic)),
        })
    }
}

fn keep_limit(vm: &Vm, _: u64, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut parts = (0..vm.frames).step_by(EVICTED_AT_ONCE as usize).cycle();
    while !stop.load(Acquire) {
        match vm.pager.residency().taken_bytes()? > STORM_LIMIT_BYTES - (4 << 20) {
            true => parts.next().into_iter().try_for_each(|first| vm.evict(first))?,
            false => thread::sleep(Duration::from_micros(200)),
        }
    }
    Ok(())
}

/// Writes some frames in a row, then some others.
fn touch(vm: &Vm, number: u64, stop: &AtomicBool) -> anyhow::Result<()> {
    let strides = vm.frames / STRIDE;
    // This is a permutation: the prime and the number of strides have no common factor.
    for turn in (0..).take_while(|_| !stop.load(Acquire)) {
        let stride = (turn * STORM_VCPUS + number).wrapping_mul(40_507) % strides;
        for frame in stride * STRIDE..(stride + 1) * STRIDE {
            if let Some([word]) = vm.guest.words(frame * FRAME_BYTES, 1) {
                word.fetch_add(1, Relaxed);
            }
        }
    }
    Ok(())
}

/// Two VMs on a disk.
struct Pair {
    storm: Arc<Vm>,
    victim: Vm,
    seed: u64,
}

impl Pair {
    fn new(disk: &Path, head: Option<Arc<Head>>, has_budget: bool) -> anyhow::Result<Pair> {
        let shared = has_budget.then(Traffic::new);
        let place = |what: &str, frames: u64| -> anyhow::Result<Place> {
            let path = disk.join(format!("{what}-{has_budget}.swap"));
            Ok(Place(Disk::open(&path, frames * FRAME_BYTES)?, head.clone()))
        };
        let storm = Vm::new(place("storm", STORM_FRAMES)?, STORM_FRAMES, shared.as_ref())?;
        let victim = Vm::new(place("victim", VICTIM_FRAMES)?, VICTIM_FRAMES, shared.as_ref())?;
        let storm = Arc::new(storm);
        Ok(Pair { storm, victim, seed: 1 })
    }

    /// Measures how long each of the victim's touches takes.
    fn victims_times(&mut self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let mut frames: Vec<u64> = (0..VICTIM_FRAMES).step_by(APART as usize).collect();
        shuffle(&mut frames, &mut self.seed);
        let times = frames.into_iter().take(count).map(|frame| {
            thread::sleep(PAUSE);
            let began = Instant::now();
            let read = self.victim.guest.words(frame * FRAME_BYTES, 1);
            std::hint::black_box(read.map(|words| words[0].load(Relaxed)));
            began.elapsed()
        });
        let times = times.collect();
        (0..VICTIM_FRAMES)
            .step_by(EVICTED_AT_ONCE as usize)
            .try_for_each(|first| self.victim.evict(first))?;
        Ok(times)
    }
}

/// Figures of one side, one each round.
#[derive(Default)]
struct Figures {
    /// The victim's p50 and p99 without a storm and with one, in microseconds.
    victim: [[Rounds; 2]; 2],
    /// What the storm refills alone, and beside the victim, in MiB/s.
    storm: [Rounds; 2],
}

impl Figures {
    fn round(&mut self, pair: &mut Pair, touches: usize) -> anyhow::Result<()> {
        push(&mut self.victim[0], pair.victims_times(touches)?);
        let (storm, count) = (Storm::start(&pair.storm), |pair: &Pair| pair.storm.refilled());
        let mut measure = |beside: bool| {
            let (began, before) = (Instant::now(), count(pair));
            match beside {
                true => push(&mut self.victim[1], pair.victims_times(touches)?),
                false => thread::sleep(ALONE),
            }
            let bytes = (count(pair) - before) * FRAME_BYTES;
            let seconds = us(began.elapsed()) / 1e6;
            self.storm[usize::from(beside)].push(bytes as f64 / seconds / (1 << 20) as f64);
            anyhow::Ok(())
        };
        // After this, the storm is at its limit, and no victim was read lately.
        thread::sleep(ALONE / 4);
        let measured = measure(false).and_then(|()| measure(true));
        storm.end().and(measured)
    }
}

fn push(rounds: &mut [Rounds; 2], mut times: Vec<Duration>) {
    for (rounds, percent) in rounds.iter_mut().zip([50, 99]) {
        rounds.push(percentile_us(&mut times, percent));
    }
}

/// Runs the benchmark.
///
/// # Errors
/// The privilege for userfaultfd or for loop devices is missing.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("starve");
    report.note(
        "Two VMs on one disk. ebb: a swap file leaves the disk's queue to others while they ask; \
         other: it does not. Which side goes first in a round is by chance.",
    );
    let target = vmtest::assets::target_directory();
    let (rounds, slow_rounds) = if quick { (3, 3) } else { (15, 9) };
    measure(&mut report, "this disk", &target, None, (rounds, 200))?;
    let head = Some(Arc::default());
    measure(&mut report, "one head", &target, head, (slow_rounds, 100))?;
    Ok(report)
}

fn measure(
    report: &mut Report,
    name: &str,
    target: &Path,
    head: Option<Arc<Head>>,
    (rounds, touches): (usize, usize),
) -> anyhow::Result<()> {
    let disk = tempfile::tempdir_in(target)?;
    let (one, other) =
        (Pair::new(disk.path(), head.clone(), true)?, Pair::new(disk.path(), head, false)?);
    let mut pairs = [one, other];
    let (mut figures, mut seed) = (<[Figures; 2]>::default(), 7);
    for _ in 0..rounds {
        let mut sides = [0, 1];
        shuffle(&mut sides, &mut seed);
        for side in sides.map(|side| side as usize) {
            crate::interrupt::check()?;
            figures[side].round(&mut pairs[side], touches)?;
        }
    }
    let [ebb, other] = &figures;
    let without = "no budget";
    for (beside, when) in ["alone", "beside a storm"].into_iter().enumerate() {
        for (index, percent) in [50, 99].into_iter().enumerate() {
            let what = format!("{}: victim {when}, p{percent}", name);
            let [ebb, other] = [ebb, other].map(|figures| &figures.victim[beside][index]);
            report.row(Row::new(what, "us", ebb).against(without, other));
        }
    }
    for (beside, when) in ["alone", "beside a victim"].into_iter().enumerate() {
        let what = format!("{}: storm {when}", name);
        let row =
            Row::new(what, "MiB/s", &ebb.storm[beside]).against(without, &other.storm[beside]);
        report.row(if beside == 0 { row.at_least(SPEED) } else { row });
    }
    Ok(())
}
