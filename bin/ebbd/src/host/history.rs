//! History: what the host and its VMs were like, written down every 15 s. A history that cannot be
//! written is a warning, and nothing else: no VM notices.

mod merge;
mod store;
mod tell;

use std::fs::DirBuilder;
use std::ops::ControlFlow;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ebb_api::{HISTORY_STEP_S, HistoryQuery, Top};
use ebb_units::Bytes;
use rustix::fs::statvfs;

use self::merge::merge;
use self::store::{Store, StoreError};
use self::tell::Readers;
use super::apart::apart;
use super::fault_window::WINDOW;
use super::registry::Daemon;
use super::top;
use crate::model::api_error::{Answer, not_allowed};

pub use self::tell::tell;

/// The file in the logs' directory.
const FILE: &str = "history.redb";
/// Time from one look to the next. What is written down is what all of them saw.
const EVERY: Duration = Duration::from_secs(5);
// Each look has the times of all faults since the look before.
const _: () = assert!(EVERY.as_secs() < WINDOW.as_secs());

/// History leaves so much of its file system to others: records of VMs may be there, too.
const LEAST_FREE_BYTES: u64 = 64 << 20;

/// The history of a daemon.
pub struct HistoryKeeper {
    path: PathBuf,
    least_free_bytes: u64,
    /// None: it is to be opened.
    store: Mutex<Option<Box<Store>>>,
    readers: Readers,
}

impl HistoryKeeper {
    /// A history in this directory, which is made when it is needed.
    pub fn new(directory: &Path) -> Arc<HistoryKeeper> {
        Arc::new(HistoryKeeper {
            path: directory.join(FILE),
            least_free_bytes: LEAST_FREE_BYTES,
            store: Mutex::default(),
            readers: Readers::default(),
        })
    }

    /// Works with the file. After a failure it is opened anew the next time.
    fn with<T>(&self, work: impl FnOnce(&mut Store) -> Result<T, StoreError>) -> Result<T, String> {
        // Whoever panicked has left none.
        let mut kept = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = kept.take().map_or_else(|| self.open(), Ok);
        let done = opened.and_then(|mut store| work(&mut store).map(|done| (store, done)));
        match done {
            Ok((store, done)) => {
                *kept = Some(store);
                Ok(done)
            }
            Err(error) => Err(format!("{}: {error}", self.path.display())),
        }
    }

    fn open(&self) -> Result<Box<Store>, StoreError> {
        if let Some(directory) = self.path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        Store::open(&self.path).map(Box::new)
    }

    /// Writes down what was seen.
    fn add(&self, top: &Top) -> Result<(), String> {
        let directory = self.path.parent().unwrap_or(&self.path);
        // One that does not exist yet is made below.
        if let Ok(found) = statvfs(directory) {
            let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
            if free_bytes < self.least_free_bytes {
                let [free, least] = [free_bytes, self.least_free_bytes].map(Bytes);
                return Err(format!(
                    "{} has {free} left, and must keep {least}",
                    directory.display()
                ));
            }
        }
        self.with(|store| store.add(top))
    }

    /// Who may read now.
    pub fn readers(&self) -> &Readers {
        &self.readers
    }

    /// Calls `each` with the moments on record that are asked for, until it breaks off. What is
    /// written down meanwhile does not wait.
    fn each(&self, query: &HistoryQuery, each: impl FnMut(Top) -> ControlFlow<()>) -> Answer<()> {
        let refused = |why: String| not_allowed(format!("there is no history: {why}"));
        if !self.path.exists() {
            return Ok(());
        }
        let reading = self.with(|store| store.read()).map_err(refused)?;
        let read = reading.each(query.from, query.to, each);
        read.map_err(|error| refused(format!("{}: {error}", self.path.display())))
    }
}

/// Writes down what the host and its VMs are like.
pub async fn keep(daemon: Daemon) {
    let mut interval = tokio::time::interval(EVERY);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut seen, mut before) = (Vec::new(), None);
    loop {
        interval.tick().await;
        let looked = daemon.clone();
        if let Ok(Ok(top)) = apart(move || top::now(&looked)).await {
            seen.push(top);
        }
        if seen.len() < (HISTORY_STEP_S / EVERY.as_secs()) as usize {
            continue;
        }
        let (history, all) = (Arc::clone(daemon.history()), std::mem::take(&mut seen));
        let written = apart(move || merge(all).map_or(Ok(()), |top| history.add(&top))).await;
        let error = written.unwrap_or_else(|error| Err(error.to_string())).err();
        if let Some(error) = error.as_ref().filter(|error| before.as_ref() != Some(*error)) {
            tracing::warn!("history is not written down, and Ebb tries again: {error}");
        }
        before = error;
    }
}

#[cfg(test)]
mod tests;
