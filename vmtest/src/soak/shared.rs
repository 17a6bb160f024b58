//! What all threads of a soak share.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::Plan;
use super::gate::Gate;
use super::place::Place;
use super::tally::{Tally, count};
use crate::faulty::FaultyDisk;
use crate::host::{Host, permit};
use crate::mount::SmallFs;
use crate::undo::Scratch;

/// Time between two looks at whether the soak goes on.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Room of the run directory, and what it has for each VM: compressed memory of 64 MiB in it.
const RUN_BYTES: u64 = 128 << 20;
const RUN_BYTES_EACH: u64 = 96 << 20;

/// How far a soak is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Phase {
    /// Everything goes on at once.
    Storm,
    /// Nobody disturbs or asks anything any more.
    Calm,
    /// Guests check everything for the last time, and end.
    Last,
    /// All end at once.
    Over,
}

/// What all threads share.
pub struct Shared<'a> {
    pub plan: &'a Plan<'a>,
    // What VMs use is dropped after them, in this order.
    pub places: Vec<Place>,
    pub host: Host,
    /// What all of Ebb's own files are on, but for logs and swap files.
    pub run: SmallFs,
    pub swap: Option<FaultyDisk>,
    /// Disks of guests, and files of tiers.
    pub files: Scratch,
    pub gate: Gate,
    pub began: Instant,
    pub numbers: AtomicUsize,
    tally: Mutex<Tally>,
    phase: AtomicU8,
}

impl<'a> Shared<'a> {
    /// Makes a host for the VMs of these places.
    ///
    /// # Panics
    /// The host does not permit it.
    pub fn new(plan: &'a Plan<'a>, places: Vec<Place>) -> Shared<'a> {
        let swap = FaultyDisk::new();
        if let Err(why) = &swap {
            eprintln!("the swap disk never fails: {why}");
        }
        let swap = swap.ok();
        let run = SmallFs::tmpfs(RUN_BYTES + places.len() as u64 * RUN_BYTES_EACH);
        let host = Host::at(run.path());
        swap.iter().for_each(|disk| host.set("EBB_SWAP_DIR", disk.path()));
        host.set("EBB_COMPRESSED", "32M");
        let files = Scratch::new("ebb-test-").expect("a directory");
        // QEMUs are users of their own, and the sockets of their disks are below.
        permit(files.path(), 0o711);
        Shared {
            plan,
            places,
            host,
            run,
            swap,
            files,
            gate: Gate::default(),
            began: Instant::now(),
            numbers: AtomicUsize::new(0),
            tally: Mutex::new(Tally { seed: plan.seed, ..Tally::default() }),
            phase: AtomicU8::new(Phase::Storm as u8),
        }
    }

    /// Changes or reads the counts.
    pub fn tally<T>(&self, change: impl FnOnce(&mut Tally) -> T) -> T {
        change(&mut self.tally.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts something that a guest did.
    pub fn worked(&self, what: &str) {
        self.tally(|tally| count(&mut tally.work, what));
    }

    /// The counts, as they are now.
    pub fn so_far(&self) -> Tally {
        let seconds = self.began.elapsed().as_secs();
        self.tally(|tally| {
            tally.seconds = seconds;
            tally.clone()
        })
    }

    /// Notes what must not happen, and ends the soak. After an interruption it is no news.
    pub fn fail(&self, why: String) {
        if !(self.plan.is_interrupted)() {
            self.tally(|tally| tally.fail(why));
        }
        self.advance(Phase::Over);
    }

    /// Goes on to a later phase.
    pub fn advance(&self, phase: Phase) {
        self.phase.fetch_max(phase as u8, Ordering::SeqCst);
    }

    /// Whether this phase has begun.
    pub fn is_at(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::SeqCst) >= phase as u8
    }

    /// Waits, unless this phase begins. Returns whether it has not begun.
    pub fn pause(&self, time: Duration, unless: Phase) -> bool {
        let end = Instant::now() + time;
        while !self.is_at(unless) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            thread::sleep(left.min(LOOK_EVERY));
        }
        false
    }

    /// The number of the next VM of the soak.
    pub fn number(&self) -> usize {
        self.tally(|tally| tally.vms += 1);
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }
}
