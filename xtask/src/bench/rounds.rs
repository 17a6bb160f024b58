//! Figures that were taken several times.

use std::time::Duration;

use super::stats;

/// One figure per round.
#[derive(Clone, Default)]
pub struct Rounds(Vec<f64>);

impl Rounds {
    pub fn push(&mut self, figure: f64) {
        self.0.push(figure);
    }

    /// Returns the median, or NaN of no figures.
    pub fn median(&self) -> f64 {
        stats::median(&self.0)
    }

    /// Returns the figures in the order in which they were taken.
    pub fn figures(&self) -> &[f64] {
        &self.0
    }

    /// Returns the mean, or `None` of no figures.
    pub fn mean(&self) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.iter().sum::<f64>() / self.0.len() as f64)
    }

    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub fn max(&self) -> f64 {
        self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }
}

impl FromIterator<f64> for Rounds {
    fn from_iter<I: IntoIterator<Item = f64>>(figures: I) -> Rounds {
        Rounds(figures.into_iter().collect())
    }
}

/// Returns the time that `percent` of these do not exceed, in microseconds.
pub fn percentile_us(times: &mut [Duration], percent: usize) -> f64 {
    times.sort_unstable();
    let rank = (times.len() * percent).div_ceil(100).max(1);
    times.get(rank - 1).map_or(f64::NAN, |&time| us(time))
}

/// Returns a time in microseconds.
pub fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_even_and_no_rounds() {
        let of = |figures: &[f64]| figures.iter().copied().collect::<Rounds>().median();
        assert_eq!(of(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(of(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(of(&[]).is_nan());
    }

    #[test]
    fn percentiles_are_figures_that_were_measured() {
        let mut times: Vec<Duration> = (1..=200).rev().map(Duration::from_micros).collect();
        assert_eq!(percentile_us(&mut times, 50), 100.0);
        assert_eq!(percentile_us(&mut times, 99), 198.0);
        assert!(percentile_us(&mut [], 50).is_nan());
    }
}
