//! Waiting for events.

use std::fmt::{Debug, Display};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait. Anything on a test bench that takes longer is stuck, even with translated guests
/// on two busy cores.
const DEADLINE: Duration = Duration::from_secs(240);
/// Longest wait in a guest: a guest in it is translated twice.
const NESTED_DEADLINE: Duration = Duration::from_secs(720);
/// Environment variable that is set for tests in a guest.
pub const NESTED: &str = "EBB_TEST_NESTED";

/// Returns the longest wait for anything.
pub fn deadline() -> Duration {
    match std::env::var_os(NESTED) {
        Some(_) => NESTED_DEADLINE,
        None => DEADLINE,
    }
}

/// Whether somebody has asked that nobody waits any more.
static GIVEN_UP: AtomicBool = AtomicBool::new(false);

/// Makes every current and later wait panic, but for [`patiently`], which waits for a teardown.
pub fn give_up() {
    GIVEN_UP.store(true, Ordering::Relaxed);
}

const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Waits until `probe` finds something.
///
/// # Panics
/// `probe` finds nothing within [`deadline`].
pub fn until<T>(what: impl Display, probe: impl FnMut() -> Option<T>) -> T {
    until_or(probe).unwrap_or_else(|| panic!("waited {:?} in vain for {what}", deadline()))
}

/// Does what [`until`] does, but returns `None` when time is up.
///
/// # Panics
/// After [`give_up`].
pub fn until_or<T>(probe: impl FnMut() -> Option<T>) -> Option<T> {
    until_within(deadline(), probe)
}

/// Does what [`until_or`] does, with a deadline of the caller's.
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

/// Does what [`until`] does with the first look at something that `fits`. The message has the last look.
///
/// # Panics
/// No look fits within [`deadline`].
pub fn until_fits<T: Debug>(
    what: impl Display,
    mut look: impl FnMut() -> T,
    fits: impl Fn(&T) -> bool,
) -> T {
    let mut last = None;
    let found = until_or(|| {
        let seen = look();
        if fits(&seen) {
            return Some(seen);
        }
        last = Some(seen);
        None
    });
    found.unwrap_or_else(|| panic!("waited {:?} in vain for {what}: {last:?}", deadline()))
}

/// Waits for a teardown, also after [`give_up`]. Returns whether `probe` became true in time.
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
