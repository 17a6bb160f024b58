//! The last figures of a VM, as its worker publishes them.

use std::sync::Arc;
use std::time::Instant;

use ebb_api::VmStatus;
use tokio::sync::watch;

use crate::model::figures::Figures;
use crate::model::member::Member;

/// What was published last.
pub struct Latest {
    /// The figures.
    pub figures: Figures,
    /// When they were true.
    pub at: Instant,
}

/// Where others see it; none: nothing was published yet.
pub type Seen = watch::Receiver<Option<Arc<Latest>>>;

/// The worker's end.
pub struct Publisher {
    to: watch::Sender<Option<Arc<Latest>>>,
    count: u64,
}

impl Publisher {
    /// Nothing is published yet.
    pub fn new() -> (Publisher, Seen) {
        let (to, seen) = watch::channel(None);
        (Publisher { to, count: 0 }, seen)
    }

    /// Shows everybody these figures.
    pub fn publish(&mut self, status: VmStatus, member: Option<Member>) {
        self.count += 1;
        let figures = Figures { number: self.count, status, member };
        // Whoever looks next sees them, also if nobody looks now.
        self.to.send_replace(Some(Arc::new(Latest { figures, at: Instant::now() })));
    }
}
