//! What keeps a VM served, in a thread of its own: takes it up, and again where that fails or a
//! thread of its service panics. `docs/decisions/0033-*`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ebb_api::VmName;
use ebb_pager::panic_text;

use super::registry::Daemon;
use crate::helpers::console;
use crate::model::record::Record;
use crate::support::life::Life;
use crate::vm::listing::{Listing, Stage};
use crate::vm::recover::{NotRecovered, recover};
use crate::vm::worker::{Farewell, Outcome, Ready};

/// Between two attempts, at first and at most.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MOST: Duration = Duration::from_secs(60);
/// A service that panics so often, without a long good time in between, will do so again.
const PANICS_MAX: u32 = 6;
const GOOD_TIME: Duration = Duration::from_secs(600);

/// Of one VM.
pub struct Supervisor {
    /// Its name.
    pub name: VmName,
    /// Its directory.
    pub directory: PathBuf,
    /// Whose it is.
    pub daemon: Daemon,
}

/// What came of an attempt to serve it.
enum Served {
    /// It is not held any more; who is to hear of it.
    Ended(Option<Farewell>),
    /// It is to be taken up anew.
    Failed(String),
    /// The same: a thread panicked.
    Panicked(String),
}

impl Supervisor {
    /// Serves it until it is not held any more: at first what is `ready`, else what is on
    /// record.
    pub fn run(self, mut ready: Option<(Ready, Arc<Listing>)>) {
        let (mut pause, mut panics) = (PAUSE_FIRST, 0);
        loop {
            let began = Instant::now();
            let first = ready.take();
            let served = catch_unwind(AssertUnwindSafe(|| self.serve(first)));
            let served = served.unwrap_or_else(|panic| Served::Panicked(panic_text(&*panic)));
            if began.elapsed() >= GOOD_TIME {
                (pause, panics) = (PAUSE_FIRST, 0);
            }
            let why = match served {
                Served::Ended(farewell) => return self.end(farewell),
                Served::Failed(why) => why,
                Served::Panicked(why) => {
                    panics += 1;
                    format!("its service failed: {why}")
                }
            };
            let tries = panics < PANICS_MAX;
            self.wait(why, tries.then_some(pause));
            if !tries {
                return self.mourn();
            }
            pause = (pause * 2).min(PAUSE_MOST);
        }
    }

    fn serve(&self, ready: Option<(Ready, Arc<Listing>)>) -> Served {
        let (ready, listing) = match ready {
            Some(ready) => ready,
            None => match self.take_up() {
                Ok(Some(ready)) => ready,
                Ok(None) => return Served::Ended(None),
                Err(error) => return Served::Failed(error.to_string()),
            },
        };
        match ready.run(Arc::clone(self.daemon.calibrated()), &listing) {
            Outcome::Ended(farewell) => Served::Ended(farewell),
            Outcome::Panicked(why) => Served::Panicked(why),
        }
    }

    /// None: there is nothing to take up any more.
    fn take_up(&self) -> std::io::Result<Option<(Ready, Arc<Listing>)>> {
        let Some(record) = Record::load(&self.directory)? else { return Ok(None) };
        let listing = self.daemon.listing(&self.name, || Listing::new(&record, Stage::TakingUp));
        listing.set(Stage::TakingUp);
        let managed = match recover(&self.directory, self.daemon.settings()) {
            Ok(managed) => managed,
            Err(NotRecovered::Over) => return Ok(None),
            Err(NotRecovered::Failed(error)) => return Err(error),
        };
        let console = managed.0.record.has_console().then(|| managed.0.logs());
        let ready = Ready::new(managed).map_err(|(error, _)| error)?;
        listing.set(Stage::Held(ready.commands()));
        console.into_iter().for_each(|logs| self.keep_console(logs));
        tracing::info!("{}: recovered", self.name);
        Ok(Some((ready, listing)))
    }

    /// QEMU may be slow to answer there, and its faults are not to wait for that.
    fn keep_console(&self, logs: PathBuf) {
        let (name, directory) = (self.name.clone(), self.directory.clone());
        let keep = move || {
            if let Err(error) = console::restart_if_gone(&directory, &logs) {
                tracing::warn!("{name}: its console: {error}");
            }
        };
        if let Err(error) = thread::Builder::new().name("console".into()).spawn(keep) {
            tracing::warn!("{}: its console: {error}", self.name);
        }
    }

    /// The VM waits where it is: better than a wrong byte.
    fn wait(&self, why: String, pause: Option<Duration>) {
        tracing::error!("{}: not recovered: {why}", self.name);
        if let Some(listing) = self.daemon.listed(&self.name) {
            let again = pause.map(|pause| Instant::now() + pause);
            listing.set(Stage::NotTakenUp(why, again));
        }
        thread::sleep(pause.unwrap_or_default());
    }

    /// It is not tried again: waits for its end.
    fn mourn(self) {
        loop {
            match Record::load(&self.directory).map(|record| record.map(|record| record.life())) {
                Ok(None | Some(Life::Dead(_))) => return self.end(None),
                _ => thread::sleep(PAUSE_MOST),
            }
        }
    }

    fn end(self, farewell: Option<Farewell>) {
        self.daemon.forget(&self.name, &self.directory);
        if let Some((to, report)) = farewell {
            drop(to.send(Ok(report)));
        }
    }
}
