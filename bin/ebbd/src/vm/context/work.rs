//! Work of a VM's worker that a client follows, and may cancel.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::model::work::WorkProgress;

/// What the worker and those who follow its work know of it together. The worker writes down what it
/// has counted anyway.
#[derive(Default)]
pub struct Work {
    is_cancelled: AtomicBool,
    done_bytes: AtomicU64,
    /// 0: not known.
    total_bytes: AtomicU64,
}

impl Work {
    /// Has the worker end the work after its present step.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Relaxed);
    }

    /// Whether the work is to end.
    pub fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Relaxed)
    }

    /// Notes how far the work is; no total: nobody knows.
    pub fn note(&self, done_bytes: u64, total_bytes: Option<u64>) {
        self.total_bytes.store(total_bytes.unwrap_or(0), Relaxed);
        self.done_bytes.store(done_bytes, Relaxed);
    }

    /// Notes how much is left of a work. All of it is what was left when somebody looked first.
    pub fn note_left(&self, left_bytes: u64) {
        let total_bytes = self.total_bytes.fetch_max(left_bytes, Relaxed).max(left_bytes);
        self.done_bytes.store(total_bytes - left_bytes, Relaxed);
    }

    /// How far the work is.
    pub fn progress(&self) -> WorkProgress {
        WorkProgress {
            done_bytes: self.done_bytes.load(Relaxed),
            total_bytes: Some(self.total_bytes.load(Relaxed)).filter(|&bytes| bytes > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(work: &Work) -> (u64, Option<u64>) {
        let WorkProgress { done_bytes, total_bytes } = work.progress();
        (done_bytes, total_bytes)
    }

    #[test]
    fn progress_is_what_was_noted_last() {
        let work = Work::default();
        assert_eq!(told(&work), (0, None));
        work.note(3, Some(8));
        assert_eq!(told(&work), (3, Some(8)));
        work.note(4, None);
        assert_eq!(told(&work), (4, None));
    }

    #[test]
    fn what_comes_back_counts_from_what_was_left_at_most() {
        let work = Work::default();
        let told: Vec<_> = [0, 8, 5, 9, 0]
            .map(|left| {
                work.note_left(left);
                told(&work)
            })
            .into();
        assert_eq!(told, [(0, None), (0, Some(8)), (3, Some(8)), (0, Some(9)), (9, Some(9))]);
    }
}
