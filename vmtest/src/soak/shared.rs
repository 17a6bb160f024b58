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
use crate::host::Host;

/// Time between two looks at whether the soak goes on.
const LOOK_EVERY: Duration = Duration::from_millis(50);

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
    pub host: Host,
    pub swap: Option<FaultyDisk>,
    pub places: Vec<Place>,
    pub gate: Gate,
    pub began: Instant,
    pub numbers: AtomicUsize,
    tally: Mutex<Tally>,
    phase: AtomicU8,
}

impl<'a> Shared<'a> {
    pub fn new(
        plan: &'a Plan<'a>,
        host: Host,
        swap: Option<FaultyDisk>,
        places: Vec<Place>,
    ) -> Shared<'a> {
        Shared {
            plan,
            host,
            swap,
            places,
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
