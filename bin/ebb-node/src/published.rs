//! When the node is to be changed: each change goes to all who watch nodes.

use std::time::{Duration, Instant};

/// Smaller changes matter to nobody.
const CHANGE_LEAST_BYTES: u64 = 64 << 20;
/// Nor do changes by less than this part.
const CHANGE_PART: u64 = 16;
/// The same is published again so often: a kubelet that starts again forgets it. That costs nothing
/// if the node has it still.
const AGAIN: Duration = Duration::from_secs(300);

/// What was published last.
#[derive(Default)]
pub struct Published(Option<(Instant, Option<u64>)>);

impl Published {
    /// Whether anything was published.
    pub fn has_begun(&self) -> bool {
        self.0.is_some()
    }

    /// Whether to publish this figure. `None`: it is not known.
    pub fn is_due(&self, now: Instant, bytes: Option<u64>) -> bool {
        self.0.is_none_or(|(at, last)| {
            now.saturating_duration_since(at) >= AGAIN || differs(last, bytes)
        })
    }

    /// Notes that this figure was published.
    pub fn note(&mut self, now: Instant, bytes: Option<u64>) {
        self.0 = Some((now, bytes));
    }
}

fn differs(last: Option<u64>, bytes: Option<u64>) -> bool {
    match (last, bytes) {
        (Some(last), Some(bytes)) => {
            bytes.abs_diff(last) >= CHANGE_LEAST_BYTES.max(last / CHANGE_PART)
        }
        (last, bytes) => last != bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn only_what_matters_is_published() {
        let mut published = Published::default();
        let now = Instant::now();
        assert!(!published.has_begun() && published.is_due(now, None));
        published.note(now, Some(16 * GIB));
        assert!(published.has_begun());
        assert!(!published.is_due(now, Some(16 * GIB)));
        assert!(!published.is_due(now, Some(17 * GIB - 1)));
        assert!(published.is_due(now, Some(17 * GIB)) && published.is_due(now, Some(15 * GIB)));
        published.note(now, Some(0));
        assert!(!published.is_due(now, Some(CHANGE_LEAST_BYTES - 1)));
        assert!(published.is_due(now, Some(CHANGE_LEAST_BYTES)));
        assert!(published.is_due(now, None), "nothing is another thing than not known");
        published.note(now, None);
        assert!(!published.is_due(now, None) && published.is_due(now, Some(0)));
    }

    #[test]
    fn the_same_is_published_again_after_some_minutes() {
        let mut published = Published::default();
        let now = Instant::now();
        published.note(now, Some(GIB));
        assert!(!published.is_due(now + AGAIN - Duration::from_secs(1), Some(GIB)));
        assert!(published.is_due(now + AGAIN, Some(GIB)));
    }
}
