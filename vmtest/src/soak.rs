//! A soak: several VMs of unlike kinds, everything that Ebb can do with them at once, and everything
//! that can die or fail, while the guests check every byte.
//!
//! ```text
//! a thread for each VM:  guest works and checks --+
//! operators:             requests to Ebb ---------+--> Tally: counts, wrong bytes, failures
//! storm:                 kills, disk errors ------+
//! ```
//!
//! What a kill costs is known: a request without an answer, or a VM whose QEMU was killed, is no
//! failure. Everything else that a guest misses is one: a wrong byte, an answer that does not come,
//! a complaint of its kernel, a damaged file system, a VM that ends by itself.

mod chance;
mod gate;
mod guest;
mod operator;
mod place;
mod request;
mod shared;
mod spoil;
mod storm;
mod tally;
mod work;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use self::chance::Chance;
use self::place::{KINDS, Place};
use self::shared::{Phase, Shared};

pub use self::tally::{Counts, Tally};

/// Most VMs at once.
pub const VMS_MAX: usize = 12;
/// Threads that ask Ebb.
const OPERATORS: u64 = 2;
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What a soak is to be like.
pub struct Plan<'a> {
    /// The seed of all choices. How threads meet is by chance all the same.
    pub seed: u64,
    /// How long everything goes on at once. Checking everything for the last time comes after that.
    pub time: Duration,
    /// How many VMs there are at once, 1 to [`VMS_MAX`].
    pub vms: usize,
    /// Whether guests' memory is damaged, which must be found.
    pub spoils: bool,
    /// Whether somebody wants it to end at once.
    pub is_interrupted: &'a (dyn Fn() -> bool + Sync),
    /// Is told the counts after each time `tell_every`.
    pub tell: &'a (dyn Fn(&Tally) + Sync),
    /// The time between two of those.
    pub tell_every: Duration,
    /// A directory for logs of what failed.
    pub evidence: Option<&'a Path>,
}

/// Runs a soak to its end: until its time is up, or something fails, or somebody interrupts.
///
/// # Panics
/// `ebb` is not built, or there is no kernel to boot.
pub fn run(plan: &Plan<'_>) -> Tally {
    let kinds = KINDS.iter().cycle().take(plan.vms.clamp(1, VMS_MAX));
    let shared = Shared::new(plan, kinds.map(|kind| Place::new(*kind)).collect());
    thread::scope(|scope| {
        let shared = &shared;
        // The streams of chance are numbered: guests first.
        let guests: Vec<_> = (0_u64..)
            .zip(&shared.places)
            .map(|(number, place)| {
                let chance = Chance::new(plan.seed, number);
                scope.spawn(move || guest::live(shared, place, chance))
            })
            .collect();
        let stream = |number: u64| Chance::new(plan.seed, VMS_MAX as u64 + number);
        let begin = |number, work: fn(&Shared<'_>, Chance)| {
            let chance = stream(number);
            scope.spawn(move || {
                let done = guest::guarded(|| {
                    work(shared, chance);
                    Ok(())
                });
                done.unwrap_or_else(|why| shared.fail(why));
            })
        };
        let mut others = vec![
            begin(0, storm::kill),
            begin(1, storm::fail_disk),
            begin(2, storm::fill_run_directory),
        ];
        others.extend((0..OPERATORS).map(|number| begin(3 + number, operator::ask)));
        watch(shared);
        shared.advance(Phase::Calm);
        others.into_iter().for_each(|thread| drop(thread.join()));
        if !shared.is_at(Phase::Over) {
            storm::begin(shared);
        }
        shared.advance(Phase::Last);
        let guests_end = || guests.iter().all(thread::ScopedJoinHandle::is_finished);
        while !guests_end() {
            thread::sleep(LOOK_EVERY);
            if (plan.is_interrupted)() {
                shared.advance(Phase::Over);
            }
        }
    });
    shared.so_far()
}

/// Waits for the end of the storm, and tells the counts meanwhile.
fn watch(shared: &Shared<'_>) {
    let (plan, mut told) = (shared.plan, Instant::now());
    while shared.began.elapsed() < plan.time && !shared.is_at(Phase::Over) {
        thread::sleep(LOOK_EVERY);
        if (plan.is_interrupted)() {
            shared.advance(Phase::Over);
        }
        if told.elapsed() >= plan.tell_every {
            told = Instant::now();
            (plan.tell)(&shared.so_far());
        }
    }
}
