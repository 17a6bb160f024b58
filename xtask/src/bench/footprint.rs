//! The host's memory that VMs take, over time.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vmtest::{Host, Vm};

use super::held::Holders;
use super::kept::{self, Figures};
use super::taken::Taken;
use super::vm::GIB;
use crate::guard::guard;
use crate::interrupt;

/// Time between two samples: a fifth of the paper's.
const SAMPLE_EVERY: Duration = Duration::from_millis(200);

/// Names of a course's two figures in a block: seconds, and GiB at that time.
const SECONDS: &str = "footprint-s";
const GIB_THEN: &str = "footprint-gib";

/// Memory that some VMs took together, over time.
pub struct Footprint {
    /// Seconds since the beginning, and GiB, in order of time.
    points: Vec<(f64, f64)>,
    marks: Vec<(f64, String)>,
}

/// A course that is being recorded.
pub struct Course {
    began: Instant,
    marks: Mutex<Vec<(f64, String)>>,
}

impl Course {
    /// Returns the seconds since the beginning.
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Marks that something begins now.
    pub fn mark(&self, what: &str) {
        let mark = (self.seconds(), what.to_owned());
        self.marks.lock().unwrap_or_else(PoisonError::into_inner).push(mark);
    }

    /// Waits for some time, in which free memory may be reclaimed.
    ///
    /// # Errors
    /// The user interrupted.
    pub fn rest(&self, time: Duration) -> anyhow::Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            interrupt::check()?;
            thread::sleep(SAMPLE_EVERY.min(end.saturating_duration_since(Instant::now())));
        }
        Ok(())
    }
}

impl Footprint {
    /// Records the memory of `vms`, and of the daemon if one manages them, for as long as `work`
    /// takes.
    ///
    /// # Errors
    /// Those of `work`, or one of the VMs has ended.
    pub fn during<T>(
        vms: &[&Vm],
        daemon: Option<&Host>,
        work: impl FnOnce(&Course) -> anyhow::Result<T>,
    ) -> anyhow::Result<(T, Footprint)> {
        let daemon = daemon.map(Holders::of);
        let course = Course { began: Instant::now(), marks: Mutex::default() };
        let done = AtomicBool::new(false);
        let (result, points) = thread::scope(|scope| {
            let sampler =
                scope.spawn(|| guard(|| Ok(sample(vms, daemon.as_ref(), course.began, &done))));
            let result = guard(|| work(&course));
            done.store(true, Ordering::Relaxed);
            (result, sampler.join())
        });
        let points = points.map_err(|panic| crate::guard::reason(&*panic))??;
        let marks = course.marks.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok((result?, Footprint { points, marks }))
    }

    /// Returns the integral of the memory over time, in GiB s.
    pub fn gib_s(&self) -> f64 {
        let steps = self.points.windows(2);
        steps.map(|pair| (pair[1].0 - pair[0].0) * (pair[0].1 + pair[1].1) / 2.0).sum()
    }

    /// Returns the most memory at any time.
    pub fn peak_gib(&self) -> f64 {
        self.points.iter().map(|point| point.1).fold(0.0, f64::max)
    }

    /// Adds the course, and the times of all marks under names that begin with `mark`.
    pub fn add_to(&self, figures: &mut Figures, mark: &str) {
        figures.insert(SECONDS.into(), self.points.iter().map(|point| point.0).collect());
        figures.insert(GIB_THEN.into(), self.points.iter().map(|point| point.1).collect());
        for (at, what) in &self.marks {
            kept::add(figures, &format!("{mark}{what}"), *at);
        }
    }
}

/// Returns seconds and GiB of the last block, for pictures.
pub fn points(taken: &Taken, name: &str) -> Vec<(f64, f64)> {
    taken.course(name, SECONDS).into_iter().zip(taken.course(name, GIB_THEN)).collect()
}

/// Returns when what began, in the last block.
pub fn marks(taken: &Taken, name: &str, mark: &str) -> Vec<(f64, String)> {
    let all = taken.courses(name).filter_map(|(figure, times)| {
        Some((*times.first()?, figure.strip_prefix(mark)?.to_owned()))
    });
    all.collect()
}

fn sample(
    vms: &[&Vm],
    daemon: Option<&Holders>,
    began: Instant,
    done: &AtomicBool,
) -> Vec<(f64, f64)> {
    let mut points = Vec::new();
    loop {
        // The last sample comes after the work, so that the end is included.
        let is_last = done.load(Ordering::Relaxed);
        let own = daemon.map_or(0, Holders::bytes);
        let bytes: u64 = own + vms.iter().map(|vm| vm.host_bytes()).sum::<u64>();
        points.push((began.elapsed().as_secs_f64(), bytes as f64 / GIB as f64));
        if is_last {
            return points;
        }
        thread::sleep(SAMPLE_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_footprint_is_what_lies_below_the_curve() {
        let points = vec![(0.0, 1.0), (1.0, 1.0), (3.0, 2.0)];
        let footprint = Footprint { points, marks: Vec::new() };
        assert_eq!((footprint.gib_s(), footprint.peak_gib()), (4.0, 2.0));
    }

    #[test]
    fn work_that_panics_is_an_error() {
        let result = Footprint::during::<()>(&[], None, |_| panic!("no"));
        assert_eq!(result.err().map(|error| error.to_string()), Some("no".into()));
    }
}
