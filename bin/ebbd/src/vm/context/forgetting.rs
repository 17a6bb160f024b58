//! How the VMM's page table is emptied, so that the next use of each page shows.

use std::cell::RefCell;
use std::io;
use std::time::{Duration, Instant};

use ebb_sys::process::Process;
use ebb_sys::remote_ring::RemoteRing;
use ebb_sys::uffd::HvaRange;

use crate::helpers::injector;
use crate::model::record::ForgetBy;

/// Ranges that an injected call is asked to forget at once: this many fit on a command line.
const RANGES_AT_ONCE: usize = 4096;
/// Time in which [`Forgetting::once`] begins pieces.
const ONCE: Duration = Duration::from_millis(5);
/// Longest time for all ranges.
const ALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after a ring has failed before the next one is tried.
const RING_AGAIN: Duration = Duration::from_secs(600);

/// Empties the page table of one VMM: by a ring in the VMM, or by injected calls, for which a thread
/// of the VMM is stopped.
pub struct Forgetting(RefCell<Method>);

enum Method {
    Ring(RemoteRing),
    /// By injected calls; after this time, if there is one, a ring is tried.
    Calls(Option<Instant>),
}

impl Forgetting {
    /// Begins with no ring.
    pub fn new(by: ForgetBy) -> Forgetting {
        let try_ring = match by {
            ForgetBy::Ring => Some(Instant::now()),
            ForgetBy::Call => None,
        };
        Forgetting(RefCell::new(Method::Calls(try_ring)))
    }

    /// Removes ranges of shared memory from the VMM's page table.
    ///
    /// # Errors
    /// Those of [`injector::forget`]. `TimedOut`: the VMM does not do it in time.
    pub fn all(&self, process: &Process, ranges: &[HvaRange]) -> io::Result<()> {
        let bytes: u64 = ranges.iter().map(|range| range.bytes).sum();
        match self.by_ring(process, ranges, ALL_TIMEOUT)? {
            Some(done) if done < bytes => Err(io::ErrorKind::TimedOut.into()),
            Some(_) => Ok(()),
            None => ranges
                .chunks(RANGES_AT_ONCE)
                .try_for_each(|ranges| injector::forget(process, ranges)),
        }
    }

    /// As [`Forgetting::all`], but only for a few milliseconds. Returns how many bytes of the
    /// ranges that got to, from the first one on.
    ///
    /// # Errors
    /// Those of [`injector::forget_once`].
    pub fn once(&self, process: &Process, ranges: &[HvaRange]) -> io::Result<u64> {
        match self.by_ring(process, ranges, ONCE)? {
            Some(done) => Ok(done),
            None => injector::forget_once(process, ranges),
        }
    }

    /// Does it by the ring. `None`: there is none, and none can be made now.
    fn by_ring(
        &self,
        process: &Process,
        ranges: &[HvaRange],
        time: Duration,
    ) -> io::Result<Option<u64>> {
        let mut method = self.0.borrow_mut();
        if let Method::Calls(again) = &mut *method {
            if again.is_none_or(|again| Instant::now() < again) {
                return Ok(None);
            }
            match injector::ring(process) {
                Ok(ring) => *method = Method::Ring(ring),
                Err(error) => {
                    *again = Some(Instant::now() + RING_AGAIN);
                    tracing::info!(
                        "no ring in QEMU ({error}): injected calls empty its page table"
                    );
                    return Ok(None);
                }
            }
        }
        let Method::Ring(ring) = &mut *method else { return Ok(None) };
        let done = ring.forget(process, ranges, Instant::now() + time);
        if let Err(error) = &done {
            tracing::info!("the ring in QEMU is given up: {error}");
            *method = Method::Calls(Some(Instant::now() + RING_AGAIN));
        }
        done.map(Some)
    }
}
