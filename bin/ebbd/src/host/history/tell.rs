//! Tells clients what was written down. What this holds in memory is bounded, whatever they ask for
//! and however often: one history is read at a time, moment by moment.

use std::ops::ControlFlow;
use std::sync::Arc;

use axum::body::Bytes;
use ebb_api::{HistoryQuery, Top};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::HistoryKeeper;
use super::merge::Merging;
use crate::host::events::Asker;
use crate::model::api_error::{Answer, ApiError, failed, not_allowed};

/// Most answers that other machines have not taken yet.
const UNSENT_AFAR_MOST: usize = 3;
/// Longest answer.
const ANSWER_MOST_BYTES: usize = 32 << 20;
/// Most VMs in a moment of an answer. Those of many moments may be others each time.
const VMS_MOST: usize = 10_000;

/// Who may read now.
pub struct Readers {
    reading: Arc<Semaphore>,
    unsent_afar: Arc<Semaphore>,
}

impl Default for Readers {
    fn default() -> Readers {
        let [reading, unsent_afar] =
            [1, UNSENT_AFAR_MOST].map(|permits| Arc::new(Semaphore::new(permits)));
        Readers { reading, unsent_afar }
    }
}

/// Leave to read. It belongs to the reading, not to the client, who may be gone before it ends.
pub struct Leave {
    reading: OwnedSemaphorePermit,
    unsent: Option<OwnedSemaphorePermit>,
}

impl Readers {
    /// Lets a client read.
    ///
    /// # Errors
    /// Another one reads, or too many have not taken their answers yet.
    pub fn admit(&self, asker: Asker) -> Answer<Leave> {
        let permit = |of: &Arc<Semaphore>, why: &str| {
            let refused = |_| ApiError::Unavailable(format!("{why}: try again in a while"));
            Arc::clone(of).try_acquire_owned().map_err(refused)
        };
        let unsent = match asker {
            Asker::Host => None,
            Asker::Afar => {
                let why = "other machines have not taken their answers about history yet";
                Some(permit(&self.unsent_afar, why)?)
            }
        };
        let reading = permit(&self.reading, "history is being read for another request")?;
        Ok(Leave { reading, unsent })
    }
}

/// An answer, and what is given back once the client has it, or is gone.
struct Unsent {
    json: Vec<u8>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Unsent {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

/// Tells what was written down: the JSON of `History`. This may take long.
///
/// # Errors
/// The query makes no sense, the answer would be too long, or there is no history.
pub fn tell(history: &HistoryKeeper, query: &HistoryQuery, leave: Leave) -> Answer<Bytes> {
    query.check()?;
    let Leave { reading: _reading, unsent } = leave;
    let mut points = Points::new(query, ANSWER_MOST_BYTES);
    history.each(query, |top| points.add(top))?;
    Ok(Bytes::from_owner(Unsent { json: points.json()?, _permit: unsent }))
}

/// The moments of an answer, as JSON.
pub struct Points<'q> {
    query: &'q HistoryQuery,
    most_bytes: usize,
    json: Vec<u8>,
    count: u64,
    /// The step of `merging`.
    step: Option<u64>,
    merging: Merging,
    refused: Option<ApiError>,
}

impl Points<'_> {
    /// None yet, and never more than so many bytes and a moment.
    pub fn new(query: &HistoryQuery, most_bytes: usize) -> Points<'_> {
        let json = format!(r#"{{"step_s":{},"points":["#, query.step_s()).into_bytes();
        let merging = Merging::default();
        Points { query, most_bytes, json, count: 0, step: None, merging, refused: None }
    }

    /// Adds a moment, later than those before. Breaks off where no more is of use.
    pub fn add(&mut self, mut top: Top) -> ControlFlow<()> {
        if let Some(wanted) = &self.query.vm {
            top.vms.retain(|vm| vm.name == *wanted);
        }
        let since_s = (top.at_unix_ms / 1000).saturating_sub(self.query.from);
        let step = since_s / self.query.step_s();
        if self.step.replace(step).is_some_and(|before| before != step) {
            self.end_point()?;
        }
        self.merging.add(top);
        match self.merging.vms() > VMS_MOST {
            true => self.refuse_too_long(),
            false => ControlFlow::Continue(()),
        }
    }

    fn end_point(&mut self) -> ControlFlow<()> {
        let Some(top) = std::mem::take(&mut self.merging).end() else {
            return ControlFlow::Continue(());
        };
        if self.count > 0 {
            self.json.push(b',');
        }
        if let Err(error) = serde_json::to_writer(&mut self.json, &top) {
            self.refused = Some(failed("history")(error));
            return ControlFlow::Break(());
        }
        self.count += 1;
        match self.json.len() > self.most_bytes {
            true => self.refuse_too_long(),
            false if self.count >= self.query.points_max() => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    fn refuse_too_long(&mut self) -> ControlFlow<()> {
        self.refused = Some(not_allowed(
            "the answer is too long: ask for one VM (vm), or for fewer moments (a longer step, or \
             a shorter time)",
        ));
        ControlFlow::Break(())
    }

    /// Returns the JSON of them all.
    pub fn json(mut self) -> Answer<Vec<u8>> {
        if self.refused.is_none() && self.count < self.query.points_max() {
            // Whether more would be of use does not matter any more.
            let _ = self.end_point();
        }
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        self.json.extend_from_slice(b"]}");
        Ok(self.json)
    }
}
