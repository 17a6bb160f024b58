//! Memory that a VM has and the host need not give it, summed up over time: what somebody may pay
//! for. `docs/metrics.md` defines it.

use std::time::{Duration, Instant};

use ebb_api::VmStatus;

/// Longest time between two publications that counts. Of a longer one nothing is known.
const GAP_MOST: Duration = Duration::from_secs(10);

/// What one VM has saved since this daemon lists it. It never decreases.
#[derive(Default)]
pub struct Saved {
    /// The last publication: when, and what was saved then. `None`: there was none yet.
    last: Option<(Instant, u64)>,
    /// Saved bytes, each times the microseconds for which it was saved.
    byte_micros: u128,
}

impl Saved {
    /// Takes what the VM's process published. `at`: when the figures were true. Of the time since
    /// the last publication the smaller one of both figures counts.
    pub fn take(&mut self, at: Instant, status: &VmStatus) {
        let bytes = saved_bytes(status);
        if let Some((before, then)) = self.last {
            let elapsed = at.saturating_duration_since(before);
            if elapsed <= GAP_MOST {
                let grown = u128::from(bytes.min(then)) * elapsed.as_micros();
                self.byte_micros = self.byte_micros.saturating_add(grown);
            }
        }
        self.last = Some((at, bytes));
    }

    /// The sum, in byte-seconds.
    pub fn byte_seconds(&self) -> f64 {
        self.byte_micros as f64 / 1e6
    }
}

/// What the VM saves now. Its compressed memory is not saved as far as the compressed pages take
/// memory themselves.
fn saved_bytes(status: &VmStatus) -> u64 {
    let taken = status.resident_bytes.saturating_add(status.limit.compressed_bytes);
    status.memory_bytes.saturating_sub(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing;

    /// The sum after publications at milliseconds, with so many bytes saved.
    fn byte_seconds(publications: &[(u64, u64)]) -> f64 {
        let (mut saved, began) = (Saved::default(), Instant::now());
        let mut last = 0.0;
        for (ms, bytes) in publications {
            let mut status = testing::status();
            (status.memory_bytes, status.resident_bytes) = (1 << 40, (1 << 40) - *bytes);
            status.limit.compressed_bytes = 0;
            saved.take(began + Duration::from_millis(*ms), &status);
            assert!(saved.byte_seconds() >= last, "it decreased");
            last = saved.byte_seconds();
        }
        last
    }

    fn assert_is(publications: &[(u64, u64)], expected: f64) {
        let found = byte_seconds(publications);
        assert!((found - expected).abs() < 1e-3, "{found} for {publications:?}");
    }

    #[test]
    fn the_smaller_figure_counts_for_the_time_between_two() {
        assert_is(&[(0, 1000)], 0.0);
        assert_is(&[(0, 1000), (2000, 1000)], 2000.0);
        assert_is(&[(0, 1000), (2000, 400), (2500, 900)], 800.0 + 200.0);
        assert_is(&[(0, 0), (5000, 1 << 39)], 0.0);
    }

    #[test]
    fn a_silence_does_not_count() {
        assert_is(&[(0, 1000), (60_000, 1000), (61_000, 1000)], 1000.0);
        // As after the end of its process.
        assert_is(&[(0, 1000), (8000, 1000)], 8000.0);
    }

    #[test]
    fn what_compressed_pages_take_is_not_saved() {
        let mut status = testing::status();
        (status.memory_bytes, status.resident_bytes) = (1000, 300);
        status.limit.compressed_bytes = 200;
        assert_eq!(saved_bytes(&status), 500);
        status.resident_bytes = 900;
        assert_eq!(saved_bytes(&status), 0);
    }
}
