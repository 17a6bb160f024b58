//! The last figures of a VM, as its worker publishes them.

use std::sync::Arc;
use std::time::Instant;

use ebb_api::VmStatus;
use tokio::sync::watch;

use crate::model::figures::VmFigures;
use crate::model::member::Member;
use crate::model::piloted::Piloted;
use crate::model::times::Times;

/// The last publication.
pub struct Latest {
    /// The figures.
    pub figures: VmFigures,
    /// When the figures were true.
    pub at: Instant,
}

/// Where others read the publication; `None` before the first.
pub type LatestFigures = watch::Receiver<Option<Arc<Latest>>>;

/// The worker's end of the channel.
pub struct Publisher {
    to: watch::Sender<Option<Arc<Latest>>>,
    count: u64,
}

impl Publisher {
    /// Makes both ends, with nothing published yet.
    pub fn new() -> (Publisher, LatestFigures) {
        let (to, latest) = watch::channel(None);
        (Publisher { to, count: 0 }, latest)
    }

    /// Publishes these figures.
    pub fn publish(
        &mut self,
        status: VmStatus,
        member: Option<Member>,
        piloted: Option<Piloted>,
        times: Option<Times>,
    ) {
        self.count += 1;
        let figures = VmFigures { number: self.count, status, member, piloted, times };
        // Stores the value even if nobody looks now, so that the next reader sees it.
        self.to.send_replace(Some(Arc::new(Latest { figures, at: Instant::now() })));
    }
}
