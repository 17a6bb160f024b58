//! Samples of what guests have of the host's memory while they work, taken alike on all sides.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::ensure;

use super::compare;
use crate::bench::kept::Figures;
use crate::guard::{guard, reason};

/// Most memory of guests on average, in percent of their limit.
pub const HELD_PERCENT: f64 = 105.0;
/// Most memory of Linux's guests in blocks, in percent of their limit. It is higher, which favours
/// Linux.
pub const LINUX_PERCENT: f64 = 110.0;
/// Most memory of Linux's guests during screening, in percent of their limit. It is still higher,
/// because that work is shorter, and begins above the limit.
pub const SCREENED_PERCENT: f64 = 130.0;
/// Name of a VM's figure: memory of its guests on average, MiB.
pub const GUESTS: &str = "guest-mib";
const LIMIT: &str = "limit-mib";

/// One sample, in MiB.
#[derive(Clone, Copy)]
pub struct Sample {
    /// Memory of all guests, with their compressed memory.
    pub guests: f64,
    /// The daemon's own memory; 0 without a daemon.
    pub daemon: f64,
}

/// All samples of a run.
pub struct Held(Vec<Sample>);

impl Held {
    /// Does the work, and takes a sample after each time `every`.
    ///
    /// # Errors
    /// Those of `work` and `look`.
    pub fn during<T>(
        every: Duration,
        look: impl Fn() -> anyhow::Result<Sample> + Sync,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<(T, Held)> {
        let (is_done, look) = (&AtomicBool::new(false), &look);
        thread::scope(|scope| {
            let watcher = scope.spawn(move || {
                let mut samples = Vec::new();
                while !is_done.load(Ordering::Relaxed) {
                    samples.push(guard(look)?);
                    thread::park_timeout(every);
                }
                anyhow::Ok(Held(samples))
            });
            let done = guard(work);
            is_done.store(true, Ordering::Relaxed);
            watcher.thread().unpark();
            let held = watcher.join().unwrap_or_else(|panic| Err(reason(&*panic)));
            Ok((done?, held?))
        })
    }

    /// Adds the figures, with the limit if there is one.
    pub fn add_to(&self, figures: &mut Figures, limit_mib: Option<u64>) {
        let most = self.0.iter().map(|sample| sample.guests).fold(0.0, f64::max);
        compare::add(figures, GUESTS, self.mean(|sample| sample.guests));
        compare::add(figures, "guest-most-mib", most);
        compare::add(figures, "daemon-mib", self.mean(|sample| sample.daemon));
        compare::add(figures, "all-mib", self.mean(|sample| sample.guests + sample.daemon));
        if let Some(limit) = limit_mib {
            compare::add(figures, LIMIT, limit as f64);
        }
    }

    /// Returns a mean of the samples, or NaN of no samples.
    fn mean(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        self.0.iter().map(of).sum::<f64>() / self.0.len() as f64
    }
}

/// Checks that a VM's guests had at most `percent` of their limit on average, if they had a limit.
///
/// # Errors
/// The guests had more.
pub fn check(figures: &Figures, percent: f64) -> anyhow::Result<()> {
    let of = |name: &str| figures.get(name).and_then(|all| all.first()).copied();
    if let Some(limit) = of(LIMIT) {
        let guests = of(GUESTS).unwrap_or(f64::NAN);
        ensure!(
            guests <= limit * percent / 100.0,
            "{guests:.0} MiB of {limit} were taken on average: it does not hold"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(guests: &[f64]) -> Held {
        Held(guests.iter().map(|&guests| Sample { guests, daemon: 10.0 }).collect())
    }

    #[test]
    fn a_side_above_its_limit_on_average_fails() {
        let of = |guests: &[f64], limit| {
            let mut figures = Figures::new();
            held(guests).add_to(&mut figures, limit);
            figures
        };
        // A peak is accepted, and reported.
        let figures = of(&[90.0, 115.0, 101.0], Some(100));
        check(&figures, HELD_PERCENT).unwrap();
        assert_eq!(figures["guest-mib"], [102.0]);
        assert_eq!(figures["guest-most-mib"], [115.0]);
        assert_eq!(figures["all-mib"], [112.0]);
        // The memory at the end is not all that counts.
        let figures = of(&[120.0, 110.0, 100.0], Some(100));
        let error = check(&figures, HELD_PERCENT).unwrap_err();
        assert!(error.to_string().contains("on average"), "{error}");
        check(&figures, LINUX_PERCENT).unwrap();
        check(&of(&[120.0], None), HELD_PERCENT).unwrap();
        assert!(check(&of(&[], Some(100)), HELD_PERCENT).is_err());
    }

    #[test]
    fn work_is_watched_from_its_beginning_on_and_fails_by_itself() {
        let has_looked = AtomicBool::new(false);
        let look = || {
            has_looked.store(true, Ordering::Relaxed);
            Ok(Sample { guests: 1.0, daemon: 0.0 })
        };
        let hour = Duration::from_secs(3600);
        let ((), held) = Held::during(hour, look, || {
            vmtest::until("a look", || has_looked.load(Ordering::Relaxed).then_some(()));
            Ok(())
        })
        .unwrap();
        assert_eq!(held.0.len(), 1);
        let failed = Held::during::<()>(hour, look, || panic!("no"));
        assert_eq!(failed.err().unwrap().to_string(), "no");
    }
}
