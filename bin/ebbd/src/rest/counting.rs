//! Statuses with counts, for which the worker looks at every frame of the guest: one count at a time,
//! and so seldom that clients that ask again and again leave the worker its time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_api::{GuestStatus, VmStatus};
use tokio::sync::watch;

/// Counts may take one part in this many of the time, unless none was made for as long as
/// [`OLD_MOST`].
const SHARE: u32 = 10;
/// Counts that are older than this are told to nobody.
const OLD_MOST: Duration = Duration::from_secs(1);

/// The counts of a VM's guest.
#[derive(Default)]
pub struct Counting(Mutex<State>);

#[derive(Default)]
struct State {
    last: Option<Count>,
    /// Its end tells that the count is over.
    under_way: Option<watch::Receiver<()>>,
}

/// The last count.
struct Count {
    status: VmStatus,
    ended: Instant,
    took: Duration,
}

impl Count {
    fn is_recent(&self, now: Instant) -> bool {
        let age = now.saturating_duration_since(self.ended);
        age < (self.took * (SHARE - 1)).min(OLD_MOST)
    }
}

/// What is to be done for a client that wants counts.
enum Step {
    /// Use what was counted last.
    Share(Box<GuestStatus>),
    /// Wait for this count.
    Wait(watch::Receiver<()>),
    /// Count, and drop this after it.
    Count(watch::Sender<()>, watch::Receiver<()>),
}

impl Counting {
    /// A status with counts; none: the worker is slow to answer. `count` asks the worker for one,
    /// and `fresh` for a status without.
    pub async fn status<C, F>(
        self: &Arc<Counting>,
        count: impl FnOnce() -> C,
        fresh: impl FnOnce() -> F,
    ) -> Option<VmStatus>
    where
        C: Future<Output = Option<VmStatus>> + Send + 'static,
        F: Future<Output = Option<VmStatus>>,
    {
        let (mut over, is_own) = match self.step() {
            Step::Share(counted) => return Some(with_counts(fresh().await?, &counted)),
            Step::Wait(over) => (over, false),
            Step::Count(ends, over) => {
                // It goes on if the client closes its connection: the next one has use for it.
                tokio::spawn(Arc::clone(self).count(count(), ends));
                (over, true)
            }
        };
        // Nothing is sent: the sender is dropped.
        let _ = over.changed().await;
        match self.last()? {
            status if is_own => Some(status),
            status => Some(with_counts(fresh().await?, &status.guest)),
        }
    }

    fn step(&self) -> Step {
        let mut state = self.state();
        let now = Instant::now();
        if let Some(last) = state.last.as_ref().filter(|last| last.is_recent(now)) {
            return Step::Share(Box::new(last.status.guest.clone()));
        }
        // The sender of a count that has panicked is gone, too.
        match state.under_way.as_ref().filter(|over| over.has_changed().is_ok()) {
            Some(over) => Step::Wait(over.clone()),
            None => {
                let (ends, over) = watch::channel(());
                state.under_way = Some(over.clone());
                Step::Count(ends, over)
            }
        }
    }

    async fn count(
        self: Arc<Counting>,
        counting: impl Future<Output = Option<VmStatus>>,
        ends: watch::Sender<()>,
    ) {
        let began = Instant::now();
        let status = counting.await;
        let (ended, took) = (Instant::now(), began.elapsed());
        self.state().last = status.map(|status| Count { status, ended, took });
        drop(ends);
    }

    /// What was counted just now; none: the worker did not answer.
    fn last(&self) -> Option<VmStatus> {
        self.state().last.as_ref().map(|last| last.status.clone())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is whole between any two statements that change it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A status with what was counted a moment ago, if the same kernel runs.
fn with_counts(status: VmStatus, counted: &GuestStatus) -> VmStatus {
    let is_same = status.guest.trusted && status.guest.kernel == counted.kernel;
    if !is_same {
        return status;
    }
    let guest = GuestStatus {
        free_blocks: counted.free_blocks,
        anonymous_bytes: counted.anonymous_bytes,
        file_bytes: counted.file_bytes,
        slab_bytes: counted.slab_bytes,
        page_table_bytes: counted.page_table_bytes,
        offline_bytes: counted.offline_bytes,
        ..status.guest
    };
    VmStatus { guest, ..status }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use tokio::sync::Notify;

    use super::*;

    fn status(slab_bytes: Option<u64>, resident_bytes: u64) -> VmStatus {
        let text = include_str!("../../../ebb/tests/cli/status.json");
        let status: VmStatus = serde_json::from_str(text).expect("a status");
        let guest = GuestStatus { slab_bytes, trusted: true, ..status.guest };
        VmStatus { guest, resident_bytes, ..status }
    }

    fn told(status: Option<VmStatus>) -> Option<(u64, Option<u64>)> {
        status.map(|status| (status.resident_bytes, status.guest.slab_bytes))
    }

    #[tokio::test]
    async fn those_who_ask_meanwhile_share_one_count_and_have_other_figures_of_their_own() {
        let (counting, counts) = (Arc::<Counting>::default(), Arc::<AtomicU64>::default());
        let may_end = Arc::<Notify>::default();
        let ask = || {
            let (counts, may_end) = (Arc::clone(&counts), Arc::clone(&may_end));
            let counting = Arc::clone(&counting);
            let count = move || async move {
                counts.fetch_add(1, Relaxed);
                may_end.notified().await;
                Some(status(Some(7), 1))
            };
            tokio::spawn(
                async move { counting.status(count, async || Some(status(None, 2))).await },
            )
        };
        let asked = [ask(), ask(), ask()];
        while counts.load(Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        // All three have come by now: they were spawned before.
        tokio::task::yield_now().await;
        may_end.notify_one();
        let mut all = Vec::new();
        for one in asked {
            all.push(told(one.await.expect("an answer")).expect("a status"));
        }
        all.sort_unstable();
        assert_eq!(all, [(1, Some(7)), (2, Some(7)), (2, Some(7))]);
        assert_eq!(counts.load(Relaxed), 1);
    }

    #[tokio::test]
    async fn a_count_goes_on_without_its_client() {
        let (counting, may_end) = (Arc::<Counting>::default(), Arc::<Notify>::default());
        let ends = Arc::clone(&may_end);
        let count = || async move {
            ends.notified().await;
            Some(status(Some(7), 1))
        };
        let of = Arc::clone(&counting);
        let first = tokio::spawn(async move { of.status(count, async || None).await });
        while counting.state().under_way.is_none() {
            tokio::task::yield_now().await;
        }
        first.abort();
        assert!(first.await.is_err());
        let of = Arc::clone(&counting);
        let second = async || -> Option<VmStatus> { panic!("one is enough") };
        let next = tokio::spawn(async move { of.status(second, fresh).await });
        tokio::task::yield_now().await;
        may_end.notify_one();
        assert_eq!(told(next.await.expect("an answer")), Some((2, Some(7))));
    }

    async fn fresh() -> Option<VmStatus> {
        Some(status(None, 2))
    }

    #[tokio::test]
    async fn a_worker_that_does_not_answer_has_no_counts() {
        let counting = Arc::<Counting>::default();
        assert_eq!(told(counting.status(async || None, fresh).await), None);
        let counted = counting.status(async || Some(status(Some(7), 1)), fresh).await;
        assert_eq!(told(counted), Some((1, Some(7))));
    }

    #[test]
    fn counts_take_a_tenth_of_the_time_or_are_a_second_old() {
        let now = Instant::now();
        let count = |took, ago: Duration| {
            let ended = now.checked_sub(ago).expect("the host runs for longer");
            Count { status: status(None, 0), ended, took }.is_recent(now)
        };
        let ms = Duration::from_millis;
        assert!(count(ms(1_000), ms(10)) && !count(ms(1_000), ms(1_001)));
        assert!(!count(ms(1), ms(10)) && !count(Duration::ZERO, Duration::ZERO));
    }

    #[test]
    fn counts_of_another_kernel_are_not_told() {
        let counted = status(Some(7), 1).guest;
        let slab = |fresh: VmStatus| with_counts(fresh, &counted).guest.slab_bytes;
        assert_eq!(slab(status(None, 1)), Some(7));
        let mut other = status(None, 1);
        other.guest.kernel = Some("another".into());
        assert_eq!(slab(other), None);
        let mut unknown = status(None, 1);
        unknown.guest.trusted = false;
        assert_eq!(slab(unknown), None);
    }
}
