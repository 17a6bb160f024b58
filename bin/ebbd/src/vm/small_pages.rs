//! Forbids huge pages in a VM of small pages, where attach did not come to it.

use std::time::Duration;

use ebb_api::Backing;

use super::context::VmContext;
use crate::support::retry::Retry;
use crate::system::small_pages;

/// First pause before a QEMU that could not be told is told again.
const RETRY_FIRST: Duration = Duration::from_millis(500);
/// Longest pause before a QEMU that could not be told is told again.
const RETRY_MOST: Duration = Duration::from_secs(10);

/// The controller of one VM's small pages.
pub struct SmallPages(Retry);

impl Default for SmallPages {
    fn default() -> SmallPages {
        SmallPages(Retry::new(RETRY_FIRST, RETRY_MOST))
    }
}

impl SmallPages {
    /// Forbids huge pages in a recovered VM if the process before did not. The VM's faults must be
    /// served by then: the thread of QEMU's that does this may wait in one.
    pub fn keep(&mut self, cx: &mut VmContext) {
        if cx.record.small_pages || cx.record.backing != Backing::Small || !self.0.is_due() {
            return;
        }
        let kept = small_pages::keep(&cx.process, cx.pager.ram());
        match kept.and_then(|()| small_pages::await_khugepaged()) {
            Ok(()) => cx.record.note(|record| record.small_pages = true),
            Err(error) => {
                tracing::warn!("small pages: {error}");
                self.0.failed();
            }
        }
    }
}
