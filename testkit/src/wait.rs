//! Waiting for events.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Nothing on a test bench takes so long unless it is stuck: translated guests
/// on two busy cores included.
const DEADLINE: Duration = Duration::from_secs(240);
/// A guest in a guest is translated twice.
const NESTED_DEADLINE: Duration = Duration::from_secs(720);
/// Set for tests that run in a guest.
pub const NESTED: &str = "EBB_TEST_NESTED";

/// How long anything is waited for.
pub fn deadline() -> Duration {
    match std::env::var_os(NESTED) {
        Some(_) => NESTED_DEADLINE,
        None => DEADLINE,
    }
}

/// Somebody asked that nobody waits any more.
static GIVEN_UP: AtomicBool = AtomicBool::new(false);

/// Has whoever waits, or will wait, panic; what is taken down is waited for by [`patiently`].
pub fn give_up() {
    GIVEN_UP.store(true, Ordering::Relaxed);
}

const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Looks until `probe` finds something.
///
/// # Panics
/// It does not within [`deadline`].
pub fn until<T>(what: impl Display, probe: impl FnMut() -> Option<T>) -> T {
    until_or(probe).unwrap_or_else(|| panic!("waited {:?} in vain for {what}", deadline()))
}

/// The same, but `None` when time is up.
///
/// # Panics
/// After [`give_up`].
pub fn until_or<T>(probe: impl FnMut() -> Option<T>) -> Option<T> {
    until_within(deadline(), probe)
}

/// The same with a deadline of one's own.
pub fn until_within<T>(deadline: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + deadline;
    while Instant::now() < end {
        assert!(!GIVEN_UP.load(Ordering::Relaxed), "interrupted");
        if let Some(found) = probe() {
            return Some(found);
        }
        thread::sleep(LOOK_EVERY);
    }
    probe()
}

/// Waits while something is taken down, also after [`give_up`]; whether it came to its end.
pub fn patiently(mut probe: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + deadline();
    while Instant::now() < end {
        if probe() {
            return true;
        }
        thread::sleep(LOOK_EVERY);
    }
    probe()
}
