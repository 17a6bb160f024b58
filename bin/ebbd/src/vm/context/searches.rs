//! When a VM's whole memory may be searched for its kernel's note. A search keeps the worker busy
//! for a while, and the guest can make one necessary again and again.

use std::time::{Duration, Instant};

/// First pause between two searches in vain.
const RETRY_FIRST: Duration = Duration::from_millis(500);
/// Longest pause between two searches in vain.
const RETRY_MOST: Duration = Duration::from_secs(30);
/// Time that a VM's searches may take together: enough for a guest that boots a few times.
const BUDGET: Duration = Duration::from_secs(10);
/// The budget refills by one second in this many seconds.
const PART: u32 = 20;

/// The searches of one VM, across resets of its guest.
pub struct Searches {
    tried: Option<Instant>,
    retry_after: Duration,
    /// How much of the budget was spent, and when that was counted.
    spent: (Duration, Instant),
}

impl Searches {
    /// Begins with no search made.
    pub fn new() -> Searches {
        Searches { tried: None, retry_after: RETRY_FIRST, spent: (Duration::ZERO, Instant::now()) }
    }

    /// Starts the pauses over, because another kernel boots: it is looked for as often as the first
    /// one, within the budget.
    pub fn begin_anew(&mut self) {
        (self.tried, self.retry_after) = (None, RETRY_FIRST);
    }

    /// Whether it is time to search again.
    pub fn are_due(&self, now: Instant) -> bool {
        let waited = |tried| now.saturating_duration_since(tried) >= self.retry_after;
        self.tried.is_none_or(waited) && self.wait(now).is_zero()
    }

    /// Returns for how long the budget allows no search.
    fn wait(&self, now: Instant) -> Duration {
        self.spent_by(now).saturating_sub(BUDGET) * PART
    }

    fn spent_by(&self, now: Instant) -> Duration {
        let (spent, then) = self.spent;
        spent.saturating_sub(now.saturating_duration_since(then) / PART)
    }

    /// Searches, if the budget allows it.
    ///
    /// # Errors
    /// The error of the search; or that there was none, and when the next one is.
    pub fn search<T>(
        &mut self,
        clock: impl Fn() -> Instant,
        search: impl FnOnce() -> Result<T, String>,
    ) -> Result<T, String> {
        let began = clock();
        let wait = self.wait(began);
        if !wait.is_zero() {
            return Err(format!(
                "its memory was searched for its kernel too often; the next search is in {} s",
                wait.as_secs() + 1
            ));
        }
        let found = search();
        let ended = clock();
        self.retry_after = (self.retry_after * 2).min(RETRY_MOST);
        self.tried = Some(ended);
        let took = ended.saturating_duration_since(began);
        self.spent = (self.spent_by(ended) + took, ended);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const SEARCH: Duration = Duration::from_millis(300);

    /// Asks for a search every 10 ms for a time that passes only in this test. Returns how many
    /// there were, and the first refusal.
    fn ask(searches: &mut Searches, from: Instant, lasts: Duration) -> (u32, Option<String>) {
        let now = Cell::new(from);
        let (mut count, mut refused) = (0, None);
        while now.get() < from + lasts {
            let found = searches.search(
                || now.get(),
                || {
                    now.set(now.get() + SEARCH);
                    count += 1;
                    Ok(())
                },
            );
            refused = refused.or(found.err());
            searches.begin_anew();
            now.set(now.get() + Duration::from_millis(10));
        }
        (count, refused)
    }

    /// Each search finds a kernel whose note is replaced a moment later, or the guest resets itself
    /// as often.
    #[test]
    fn a_note_that_is_rewritten_does_not_keep_the_worker_searching() {
        let mut searches = Searches::new();
        let (count, refused) = ask(&mut searches, Instant::now(), Duration::from_secs(3600));
        let most = (BUDGET + Duration::from_secs(3600) / PART).as_millis() / SEARCH.as_millis();
        assert!(u128::from(count) <= most + 1, "{count} searches in an hour, {most} are too many");
        let refused = refused.unwrap();
        assert!(refused.contains("too often; the next search is in "), "{refused}");
    }

    #[test]
    fn a_budget_that_is_spent_comes_back() {
        let mut searches = Searches::new();
        let began = Instant::now();
        let (at_first, _) = ask(&mut searches, began, Duration::from_secs(60));
        let later = began + Duration::from_secs(60) + 2 * BUDGET * PART;
        assert!(searches.are_due(later));
        let (again, _) = ask(&mut searches, later, Duration::from_secs(60));
        assert!(at_first > 30 && again >= at_first, "{at_first}, {again}");
    }

    #[test]
    fn searches_in_vain_become_rare() {
        let mut searches = Searches::new();
        let mut now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert_eq!(searches.search(|| now, || Err::<(), _>(String::new())), Err(String::new()));
            let from = now;
            while !searches.are_due(now) {
                now += Duration::from_millis(500);
            }
            pauses.push((now - from).as_secs());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30, 30]);
    }
}
