//! Requests of a VM's process that `ebbd` follows for jobs: how far they are, and cancelling them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ebb_api::JOBS_MAX;

use crate::model::work::WorkQuery;
use crate::vm::context::work::Work;

/// The requests that are followed, by the number of their job.
#[derive(Default)]
pub struct Works(Mutex<BTreeMap<u64, Arc<Work>>>);

/// A request that is followed until this is dropped.
pub struct Followed<'a> {
    works: &'a Works,
    id: Option<u64>,
    work: Arc<Work>,
}

impl Works {
    /// Begins a request, which is followed if it has a number.
    pub fn begin(&self, WorkQuery { work: id }: WorkQuery) -> Followed<'_> {
        let work = Arc::<Work>::default();
        let mut all = self.all();
        // `ebbd` has no more jobs than that. A second request of one number is followed by nobody.
        let id = id.filter(|id| all.len() < JOBS_MAX && !all.contains_key(id));
        if let Some(id) = id {
            all.insert(id, Arc::clone(&work));
        }
        Followed { works: self, id, work }
    }

    /// The request of this number; none: it has ended, or has not come yet.
    pub fn get(&self, id: u64) -> Option<Arc<Work>> {
        self.all().get(&id).cloned()
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Work>>> {
        // The map is whole between any two statements that change it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Followed<'_> {
    /// What the worker and those who follow know of it together.
    pub fn work(&self) -> Arc<Work> {
        Arc::clone(&self.work)
    }
}

impl Drop for Followed<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            // If `ebbd` has gone, or waits no longer, nobody could cancel it any more.
            self.work.cancel();
            self.works.all().remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(works: &Works, id: Option<u64>) -> Followed<'_> {
        works.begin(WorkQuery { work: id })
    }

    #[test]
    fn a_request_is_followed_as_long_as_it_lasts() {
        let works = Works::default();
        let (first, unnumbered) = (begin(&works, Some(7)), begin(&works, None));
        works.get(7).expect("it lasts").cancel();
        assert!(first.work().is_cancelled() && !unnumbered.work().is_cancelled());
        // A second one neither takes the number nor gives it up.
        drop(begin(&works, Some(7)));
        assert!(works.get(7).expect("it lasts").is_cancelled());
        let work = first.work();
        drop(first);
        assert!(works.get(7).is_none() && work.is_cancelled(), "nobody could end it");
    }

    #[test]
    fn no_more_are_followed_than_there_can_be_jobs() {
        let works = Works::default();
        let all: Vec<Followed<'_>> =
            (0..JOBS_MAX as u64 + 5).map(|id| begin(&works, Some(id))).collect();
        assert_eq!(works.all().len(), JOBS_MAX);
        drop(all);
        assert_eq!(works.all().len(), 0);
    }
}
