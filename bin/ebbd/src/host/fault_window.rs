//! How long a VM's faults of the last seconds took, by what it published in them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ebb_api::FaultSpread;
use ebb_pager::GROUPS;

use crate::model::fault_spread::spread;

/// Length of the window, which is longer where the VM has published less often.
pub const WINDOW: Duration = Duration::from_secs(6);
/// Two publications are less than this apart if a command makes a VM publish once more.
const LEAST: Duration = Duration::from_millis(500);

/// How many faults took how long, since the VM's process began.
struct Totals {
    at: Instant,
    counts: [u64; GROUPS],
}

/// What a VM published in the last seconds, and what it published last before them.
#[derive(Default)]
pub struct FaultWindow(VecDeque<Totals>);

impl FaultWindow {
    /// Takes what the VM's process published. `at`: when the counts were true. None: it does not
    /// count by size.
    pub fn take(&mut self, at: Instant, counts: Option<[u64; GROUPS]>) {
        let Some(counts) = counts else { return self.0.clear() };
        let last = self.0.back();
        if last.is_some_and(|last| at < last.at) {
            return;
        }
        let is_anew = |last: &Totals| counts.iter().zip(&last.counts).any(|(now, was)| now < was);
        if last.is_some_and(is_anew) {
            // The VM's next process counts from 0.
            self.0.clear();
            self.0.push_back(Totals { at, counts: [0; GROUPS] });
        }
        let before_last = self.0.iter().nth_back(1);
        if before_last.is_some_and(|before| at.saturating_duration_since(before.at) < LEAST) {
            self.0.pop_back();
        }
        self.0.push_back(Totals { at, counts });
        let reaches = |totals: &Totals| at.saturating_duration_since(totals.at) >= WINDOW;
        while self.0.get(1).is_some_and(reaches) {
            self.0.pop_front();
        }
    }

    /// Time that the faults of these seconds took. None: not known, as it has published once at
    /// most.
    pub fn spread(&self) -> Option<FaultSpread> {
        let (first, last) = (self.0.front()?, self.0.back()?);
        let counts =
            std::array::from_fn(|group| last.counts[group].saturating_sub(first.counts[group]));
        (self.0.len() > 1).then(|| spread(&counts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts of faults that took less than a microsecond, and of longer ones.
    fn counts(short: u64, long: u64) -> Option<[u64; GROUPS]> {
        let mut counts = [0; GROUPS];
        (counts[0], counts[7]) = (short, long);
        Some(counts)
    }

    /// The counts in the window after publications at milliseconds.
    fn window(publications: &[(u64, u64, u64)]) -> Option<Vec<u64>> {
        let (mut window, began) = (FaultWindow::default(), Instant::now());
        for (ms, short, long) in publications {
            window.take(began + Duration::from_millis(*ms), counts(*short, *long));
        }
        window.spread().map(|spread| spread.counts)
    }

    #[test]
    fn faults_of_the_last_seconds_are_counted() {
        assert_eq!(window(&[(0, 70, 9)]), None);
        assert_eq!(window(&[(0, 70, 9), (1000, 75, 9)]), Some(vec![5]));
        assert_eq!(window(&[(0, 70, 9), (1000, 70, 9)]), Some(vec![]));
        let second = |second: u64| (second * 1000, 10 * second, second);
        let all: Vec<(u64, u64, u64)> = (0..30).map(second).collect();
        assert_eq!(window(&all), Some(vec![60, 0, 0, 0, 0, 0, 0, 6]));
        // A VM that was silent tells of all that happened meanwhile.
        assert_eq!(window(&[(0, 0, 0), (20_000, 0, 3)]), Some(vec![0, 0, 0, 0, 0, 0, 0, 3]));
    }

    #[test]
    fn the_next_process_counts_from_0() {
        assert_eq!(window(&[(0, 70, 9), (1000, 75, 0)]), Some(vec![75]));
        assert_eq!(window(&[(0, 70, 0), (1000, 3, 0), (2000, 5, 0)]), Some(vec![5]));
        let mut window = FaultWindow::default();
        let now = Instant::now();
        window.take(now, counts(1, 1));
        window.take(now + Duration::from_secs(1), counts(2, 2));
        window.take(now + Duration::from_secs(2), None);
        assert_eq!(window.spread(), None, "a process of an earlier release");
    }

    #[test]
    fn a_vm_that_publishes_often_takes_no_more_memory() {
        let (mut window, began) = (FaultWindow::default(), Instant::now());
        for number in 0..10_000 {
            window.take(began + Duration::from_millis(number), counts(number, 0));
        }
        assert!(window.0.len() <= 30, "{}", window.0.len());
        let seen = window.spread().unwrap().counts[0];
        assert!((6000..7000).contains(&seen), "{seen}");
        // Figures of an earlier moment change nothing.
        window.take(began, counts(u64::MAX, 0));
        assert_eq!(window.spread().unwrap().counts, [seen]);
    }
}
