//! What three guests of unlike kinds do: requests one after the other, each of one piece of what a
//! guest has. At times a guest needs all of its pieces, at times few.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use vmtest::Vm;

use crate::bench::stats::Random;
use crate::interrupt;

/// Size of a piece.
pub const PIECE_MIB: u64 = 2;
/// Pieces of a guest.
pub const PIECES: usize = 120;
/// Pieces that it uses while it needs few of them.
const FEW: usize = 16;
/// Time between two requests of a guest.
const THINK: Duration = Duration::from_millis(20);

/// What a guest is for.
#[derive(Clone, Copy)]
pub struct Kind {
    pub name: &'static str,
    /// Its class, for the pilot.
    pub class: &'static str,
    /// The guest's commands that make a piece, and that use it. `#` is the piece.
    make: &'static str,
    using: &'static str,
}

/// The kinds: one guest of each.
pub const KINDS: [Kind; 3] = [
    Kind { name: "server", class: "latency", make: "fill # 2M", using: "check #" },
    Kind { name: "files", class: "normal", make: "timed read /mnt/#", using: "timed read /mnt/#" },
    Kind { name: "builder", class: "batch", make: "fill # 2M", using: "refill #" },
];

/// What a guest did.
#[derive(Default)]
pub struct Done {
    /// When each request began, since the beginning, and how long it took.
    pub requests: Vec<(Duration, Duration)>,
}

/// Returns the name of a piece. Half of them compress.
pub fn piece(number: usize) -> String {
    format!("{}{number}", if number.is_multiple_of(2) { "soft" } else { "hard" })
}

impl Kind {
    /// Makes all pieces.
    ///
    /// # Errors
    /// Somebody interrupted.
    pub fn prepare(self, vm: &Vm) -> anyhow::Result<()> {
        (0..PIECES).try_for_each(|number| {
            interrupt::check()?;
            vm.guest(&self.make.replace('#', &piece(number)));
            thread::sleep(THINK);
            Ok(())
        })
    }

    /// Does requests until `end`, of few pieces or of all.
    ///
    /// # Errors
    /// A byte is wrong, or somebody interrupted.
    pub fn work(
        self,
        vm: &Vm,
        (began, end): (Instant, Instant),
        needs_all: bool,
        (random, done): (&mut Random, &mut Done),
    ) -> anyhow::Result<()> {
        let pieces = if needs_all { PIECES } else { FEW };
        while Instant::now() < end {
            interrupt::check()?;
            let request = self.using.replace('#', &piece(random.below(pieces)));
            let start = Instant::now();
            let answer = vm.guest(&request);
            done.requests.push((start - began, start.elapsed()));
            ensure!(!request.starts_with("check") || answer == "0", "{request}: {answer}");
            thread::sleep(THINK);
        }
        Ok(())
    }
}

impl Done {
    /// Returns how long each request took.
    pub fn times(&self) -> Vec<Duration> {
        self.requests.iter().map(|request| request.1).collect()
    }

    /// Returns requests that began in each of `seconds` seconds.
    pub fn course(&self, seconds: u64) -> Vec<f64> {
        let mut course = vec![0.0; seconds as usize];
        for (began, _) in &self.requests {
            if let Some(count) = course.get_mut(began.as_secs() as usize) {
                *count += 1.0;
            }
        }
        course
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_count_in_the_second_in_which_they_begin() {
        let at = |ms| (Duration::from_millis(ms), Duration::from_millis(7));
        let done = Done { requests: vec![at(0), at(999), at(1000), at(5000)] };
        assert_eq!(done.course(3), [2.0, 1.0, 0.0]);
        assert_eq!(done.times().len(), 4);
    }

    #[test]
    fn half_of_the_pieces_compress() {
        assert_eq!((piece(0), piece(1)), ("soft0".into(), "hard1".into()));
        assert!(KINDS.iter().all(|kind| kind.make.contains('#') && kind.using.contains('#')));
        let size = format!("{PIECE_MIB}M");
        assert!(
            KINDS.iter().all(|kind| !kind.make.starts_with("fill") || kind.make.ends_with(&size))
        );
    }
}
