//! Has a VM of small pages get no huge ones, where that was not done when it was attached.

use std::time::Duration;

use ebb_api::Backing;

use super::context::VmContext;
use crate::support::retry::Retry;
use crate::system::small_pages;

/// A QEMU that could not be told is told again after so long, at first and at most.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MOST: Duration = Duration::from_secs(10);

/// Of one VM.
pub struct SmallPages(Retry);

impl Default for SmallPages {
    fn default() -> SmallPages {
        SmallPages(Retry::new(RETRY_FIRST, RETRY_MOST))
    }
}

impl SmallPages {
    /// A VM that was recovered has this still to come, where the process before did not do it. Not
    /// before its faults are served: the thread that is to do it may wait in one.
    pub fn keep(&mut self, cx: &mut VmContext) {
        if cx.record.small_pages || cx.record.backing != Backing::Small || !self.0.is_due() {
            return;
        }
        let kept = small_pages::keep(&cx.process, cx.pager.ram());
        match kept.and_then(|()| small_pages::await_khugepaged()) {
            Ok(()) => cx.record.note(|record| record.small_pages = true),
            Err(error) => {
                tracing::warn!("{}: small pages: {error}", cx.name());
                self.0.failed();
            }
        }
    }
}
