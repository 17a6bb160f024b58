//! Moving pages between NUMA nodes, by several threads (vTMM, section 3.4).

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::thread;
use std::time::Duration;

use ebb_sys::numa;
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, Hva};
use rustix::io::Errno;

use crate::ladder::TierKind;
use crate::rate_limiter::RateLimiter;
use crate::tier::{Outcome, TierError};

/// Most threads that move pages: the paper's number.
const WORKERS_MAX: usize = 4;
/// Pages that one call moves. The kernel drains every processor's page lists at each call, which
/// would not pay for a few pages.
pub const BATCH_PAGES: usize = 2048;
/// Attempts to move pages in use.
const ATTEMPTS: u32 = 4;
/// Pause before the second attempt. It doubles before each later one.
const PAUSE: Duration = Duration::from_millis(1);
/// Status of a page of which the kernel does not say what happened.
const UNSET: i32 = i32::MIN;

/// Moves pages in batches.
#[derive(Debug)]
pub struct Mover {
    workers: usize,
    batch_pages: usize,
    limiter: RateLimiter,
}

/// Whose pages move, and where to.
#[derive(Clone, Copy)]
struct To<'a> {
    process: &'a Process,
    node: u32,
    page_bytes: u64,
}

/// The number of threads to move pages with: the paper's, but no more than there are processors.
pub fn workers() -> usize {
    thread::available_parallelism().map_or(1, |count| count.get().min(WORKERS_MAX))
}

impl Default for Mover {
    fn default() -> Mover {
        Mover::new(workers(), BATCH_PAGES, RateLimiter::unlimited())
    }
}

impl Mover {
    /// A mover with `workers` threads, each of which moves `batch_pages` at a time. All threads
    /// together keep to `limiter`.
    pub fn new(workers: usize, batch_pages: usize, limiter: RateLimiter) -> Mover {
        Mover { workers: workers.max(1), batch_pages: batch_pages.max(1), limiter }
    }

    /// Moves pages of a process, `page_bytes` each, to a node, even if other processes map them
    /// too. Returns what happened to each. For a huge page, any one address in it is enough. The
    /// kernel maps every page again where it was mapped: afterwards nobody faults on a page without
    /// having touched it during the move.
    ///
    /// # Errors
    /// Why nothing can be moved. Some pages may have been moved.
    pub fn run(
        &self,
        process: &Process,
        pages: &[Hva],
        page_bytes: u64,
        node: u32,
    ) -> Result<Vec<Outcome>, TierError> {
        let frames = usize::try_from(page_bytes / FRAME_BYTES).unwrap_or(usize::MAX).max(1);
        let batches: Vec<&[Hva]> = pages.chunks((self.batch_pages / frames).max(1)).collect();
        let to = To { process, node, page_bytes };
        let (next, is_full) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Relaxed);
                let Some(batch) = batches.get(at) else { return Ok(done) };
                match self.batch(to, batch, &is_full) {
                    Ok(outcomes) => done.push((at, outcomes)),
                    Err(error) => {
                        // The other threads stop too.
                        next.store(batches.len(), Relaxed);
                        return Err(error);
                    }
                }
            }
        };
        let mut done = if self.workers.min(batches.len()) <= 1 { work()? } else { self.all(work)? };
        done.sort_unstable_by_key(|(at, _)| *at);
        Ok(done.into_iter().flat_map(|(_, outcomes)| outcomes).collect())
    }

    fn all<T: Send>(
        &self,
        work: impl Fn() -> Result<Vec<T>, TierError> + Sync,
    ) -> Result<Vec<T>, TierError> {
        thread::scope(|scope| {
            // The caller is one of the threads. Others are started as far as possible.
            let other = |_| thread::Builder::new().spawn_scoped(scope, &work).ok();
            let others: Vec<_> = (1..self.workers).map_while(other).collect();
            let own = work();
            let ended = others.into_iter().map(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            let parts: Result<Vec<_>, TierError> = std::iter::once(own).chain(ended).collect();
            Ok(parts?.into_iter().flatten().collect())
        })
    }

    fn batch(
        &self,
        to: To<'_>,
        pages: &[Hva],
        is_full: &AtomicBool,
    ) -> Result<Vec<Outcome>, TierError> {
        let To { process, node, .. } = to;
        let failed = |error| explain(error, node);
        let statuses = locate(process, pages).map_err(failed)?;
        let mut outcomes: Vec<Outcome> =
            statuses.iter().map(|&status| outcome(status, node, Outcome::There)).collect();
        for attempt in 0..ATTEMPTS {
            let open: Vec<usize> =
                (0..pages.len()).filter(|&at| outcomes.get(at) == Some(&Outcome::InUse)).collect();
            // On a full node, the kernel searches for memory for a long time at each call.
            if open.is_empty() || is_full.load(Relaxed) {
                break;
            }
            if attempt > 0 {
                thread::sleep(PAUSE * 2u32.pow(attempt - 1));
            }
            let now: Vec<Hva> = open.iter().filter_map(|&at| pages.get(at).copied()).collect();
            let moved = self.attempt(to, &now).map_err(failed)?;
            for (at, result) in open.into_iter().zip(moved) {
                is_full.fetch_or(result == Outcome::NoRoom, Relaxed);
                outcomes.get_mut(at).into_iter().for_each(|outcome| *outcome = result);
            }
        }
        if is_full.load(Relaxed) {
            let waiting = outcomes.iter_mut().filter(|outcome| **outcome == Outcome::InUse);
            waiting.for_each(|outcome| *outcome = Outcome::NoRoom);
        }
        Ok(outcomes)
    }

    /// Tries to move pages of other nodes. A page that is still there afterwards is in use.
    fn attempt(&self, to: To<'_>, pages: &[Hva]) -> io::Result<Vec<Outcome>> {
        let To { process, node, page_bytes } = to;
        self.limiter.wait(pages.len() as u64 * page_bytes);
        let mut statuses = vec![UNSET; pages.len()];
        let is_full = match numa::move_to(process, pages, node, &mut statuses) {
            Err(error) if is(&error, Errno::NOMEM) => true,
            result => result.map(|()| false)?,
        };
        // If one page fails, the kernel says nothing about those that it took together with it.
        let is_unknown = |status: i32| status == UNSET || status == -Errno::BUSY.raw_os_error();
        if statuses.iter().any(|&status| is_unknown(status)) {
            let now = locate(process, pages)?;
            for (status, now) in statuses.iter_mut().zip(now) {
                *status = if is_unknown(*status) { now } else { *status };
            }
        }
        let of = |&status: &i32| match outcome(status, node, Outcome::Moved) {
            Outcome::InUse if is_full => Outcome::NoRoom,
            outcome => outcome,
        };
        Ok(statuses.iter().map(of).collect())
    }
}

/// Returns a status for each page: its node, or an error as in [`numa::locate`].
///
/// # Errors
/// From move_pages(2).
pub(crate) fn locate(process: &Process, pages: &[Hva]) -> io::Result<Vec<i32>> {
    let mut statuses = vec![UNSET; pages.len()];
    numa::locate(process, pages, &mut statuses)?;
    Ok(statuses)
}

/// The outcome that a status means. `here` is the outcome for a page on the node.
fn outcome(status: i32, node: u32, here: Outcome) -> Outcome {
    match u32::try_from(status) {
        Ok(at) if at == node => here,
        Ok(_) => Outcome::InUse,
        Err(_) => match status.checked_neg().map(Errno::from_raw_os_error) {
            // `FAULT`: no mapping, or the zero page.
            Some(Errno::NOENT | Errno::FAULT) => Outcome::Nothing,
            Some(Errno::NOMEM) => Outcome::NoRoom,
            Some(Errno::BUSY) | None => Outcome::InUse,
            Some(error) => Outcome::Refused(error.raw_os_error()),
        },
    }
}

fn explain(error: io::Error, node: u32) -> TierError {
    match Errno::from_io_error(&error) {
        Some(Errno::SRCH) => TierError::VmEnded,
        Some(Errno::PERM) => TierError::NotAllowed(error),
        Some(Errno::NODEV | Errno::ACCESS | Errno::NOSYS) => TierError::NoNode { node, error },
        _ => TierError::Failed { tier: TierKind::Node(node), error },
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    Errno::from_io_error(error) == Some(errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_its_meaning() {
        let of = |status| outcome(status, 1, Outcome::Moved);
        assert_eq!(of(1), Outcome::Moved);
        assert_eq!(of(0), Outcome::InUse);
        for (errno, meaning) in [
            (Errno::NOENT, Outcome::Nothing),
            (Errno::FAULT, Outcome::Nothing),
            (Errno::BUSY, Outcome::InUse),
            (Errno::NOMEM, Outcome::NoRoom),
            (Errno::ACCESS, Outcome::Refused(Errno::ACCESS.raw_os_error())),
        ] {
            assert_eq!(of(-errno.raw_os_error()), meaning, "{errno}");
        }
        assert_eq!(of(UNSET), Outcome::InUse);
    }
}
