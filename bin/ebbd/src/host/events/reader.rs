//! One stream of events. It keeps its place in the log and nothing else, so one that is not read
//! costs nothing, and loses what the log drops meanwhile.

use std::sync::Arc;

use ebb_api::Event;
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::kept::{Filter, Next, Place};
use super::{EventLog, Newest, News};

/// Reads events in order.
pub struct Reader {
    log: Arc<EventLog>,
    filter: Filter,
    place: Place,
    /// Whether it waits for what happens from now on.
    follows: bool,
    changes: watch::Receiver<Newest>,
    _permits: Vec<OwnedSemaphorePermit>,
}

impl Reader {
    pub(super) fn new(
        log: &Arc<EventLog>,
        filter: Filter,
        since: Option<u64>,
        follows: bool,
        permits: Vec<OwnedSemaphorePermit>,
    ) -> Reader {
        let (place, changes) = (log.kept().place(since), log.newest.subscribe());
        Reader { log: Arc::clone(log), filter, place, follows, changes, _permits: permits }
    }

    /// The next event; none: there is no more, or the daemon ends.
    pub async fn next(&mut self) -> Option<Arc<Event>> {
        loop {
            // This comes first: what is published from here on changes it again.
            let is_closed = self.changes.borrow_and_update().is_closed;
            let next = self.log.kept().next(&mut self.place, &self.filter);
            match next {
                Next::Event(event) => return Some(event),
                Next::Lost(last) => {
                    return Some(Arc::new(News::Lost { last }.event(self.place.after, None)));
                }
                Next::Nothing if self.follows && !is_closed => {}
                Next::Nothing => return None,
            }
            self.changes.changed().await.ok()?;
        }
    }
}
