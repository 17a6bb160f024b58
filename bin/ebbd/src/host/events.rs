//! What happens to VMs, for clients that follow it: a log in memory, bounded, from which each
//! stream reads at its own pace. Who has news calls [`EventLog::publish`].

mod kept;
mod news;
mod reader;
mod states;
#[cfg(test)]
mod tests;
mod warnings;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_api::VmName;
use jiff::Timestamp;
use tokio::sync::{Semaphore, watch};

use self::kept::{KEPT_OF_EACH_TYPE, Kept};
use crate::model::api_error::{Answer, ApiError};

pub use self::kept::Filter;
pub use self::news::News;
pub use self::reader::Reader;
pub use self::states::States;
pub use self::warnings::Warnings;

/// Most streams at once.
const STREAMS_MOST: usize = 32;
/// Most of them for other machines: those leave some to this one.
const STREAMS_AFAR_MOST: usize = 16;
/// Numbers of events for each millisecond until the daemon began. Numbers go on where those of the
/// daemon before cannot have come, and stay exact in a client that counts in 64-bit floats.
const NUMBERS_PER_MS: u64 = 1000;

/// The events of a daemon.
pub struct EventLog {
    kept: Mutex<Kept>,
    newest: watch::Sender<Newest>,
    streams: Arc<Semaphore>,
    streams_afar: Arc<Semaphore>,
}

/// Who reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asker {
    /// A client on this host.
    Host,
    /// A client on another machine.
    Afar,
}

/// What streams wait for a change of.
#[derive(Clone, Copy)]
struct Newest {
    /// Number of the newest event.
    number: u64,
    /// The daemon ends.
    is_closed: bool,
}

impl Default for EventLog {
    fn default() -> EventLog {
        let ms = u64::try_from(Timestamp::now().as_millisecond()).unwrap_or(0);
        EventLog::beginning_at(ms.saturating_mul(NUMBERS_PER_MS) + 1, KEPT_OF_EACH_TYPE)
    }
}

impl EventLog {
    fn beginning_at(first: u64, kept_of_each: usize) -> EventLog {
        let newest = Newest { number: first.saturating_sub(1), is_closed: false };
        EventLog {
            kept: Mutex::new(Kept::new(first, kept_of_each)),
            newest: watch::Sender::new(newest),
            streams: Arc::new(Semaphore::new(STREAMS_MOST)),
            streams_afar: Arc::new(Semaphore::new(STREAMS_AFAR_MOST)),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // The log is whole between any two statements that change it.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells everybody who follows the events. Waits for nobody, and takes no other lock.
    pub fn publish(&self, vm: Option<&VmName>, news: News) {
        let mut kept = self.kept();
        let number = kept.add(|number| news.event(number, vm.cloned()));
        self.newest.send_modify(|newest| newest.number = number);
    }

    /// Begins to read what is kept and passes the filter, after the event of the number `since`.
    ///
    /// # Errors
    /// So many streams are open already.
    pub fn read(
        self: &Arc<EventLog>,
        filter: Filter,
        since: Option<u64>,
        follow: bool,
        asker: Asker,
    ) -> Answer<Reader> {
        let permit = |of: &Arc<Semaphore>, most| {
            Arc::clone(of).try_acquire_owned().map_err(|_| ApiError::TooMany(most))
        };
        let mut permits = vec![permit(&self.streams, STREAMS_MOST)?];
        if asker == Asker::Afar {
            permits.push(permit(&self.streams_afar, STREAMS_AFAR_MOST)?);
        }
        Ok(Reader::new(self, filter, since, follow, permits))
    }

    /// How many more streams can be opened.
    #[cfg(test)]
    pub fn free_streams(&self) -> usize {
        self.streams.available_permits()
    }

    /// Ends all streams: the daemon ends, and waits for requests under way.
    pub fn close(&self) {
        self.newest.send_modify(|newest| newest.is_closed = true);
    }
}
