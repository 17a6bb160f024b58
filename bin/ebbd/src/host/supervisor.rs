//! What keeps a VM served: has a process manage it, and the next one where that ends.
//! `docs/decisions/0044-*`.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{Method, StatusCode};
use ebb_api::VmName;
use tokio::time::{sleep, timeout};

use super::link;
use super::listing::{Listing, Stage};
use super::registry::Daemon;
use super::vm_process::VmProcess;
use crate::model::figures::Figures;
use crate::model::record::Record;
use crate::model::site::api_socket;
use crate::model::task::{Told, Work};
use crate::rest::vm_server::FIGURES;
use crate::system::last_words;

/// A process that ends is followed by the next one at once; where that ends soon, too, after so long, and
/// twice as long each time.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MOST: Duration = Duration::from_secs(60);
/// The end of a process that has served for so long is followed at once again.
const GOOD_TIME: Duration = Duration::from_secs(30);
/// A process that is asked for figures answers within 5 s, new ones or none.
const FIGURES_LIMIT: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Of one VM.
pub struct Supervisor {
    name: VmName,
    directory: PathBuf,
    daemon: Daemon,
}

/// What came of a process.
enum Served {
    /// The VM is not managed any more.
    Ended,
    /// It is to be recovered: why.
    Failed(String),
}

impl Supervisor {
    /// Of a VM of this daemon.
    pub fn of(daemon: &Daemon, name: VmName) -> Supervisor {
        let directory = daemon.site().directory(&name);
        Supervisor { name, directory, daemon: daemon.clone() }
    }

    /// Begins, with the process that manages the VM already, if there is one.
    pub fn begin(self, process: Option<VmProcess>) {
        // A VM on record is listed from now on.
        if let Ok(Some(record)) = Record::load(&self.directory) {
            let stage = if process.is_some() { Stage::Held } else { Stage::TakingUp };
            self.daemon.listing(&self.name, || Listing::new(&record, stage));
        }
        tokio::spawn(self.run(process));
    }

    async fn run(self, mut process: Option<VmProcess>) {
        let (mut pause, mut follows) = (Duration::ZERO, false);
        loop {
            let began = Instant::now();
            let why = match self.serve(process.take(), follows).await {
                Ok(Served::Ended) => return self.end().await,
                Ok(Served::Failed(why)) => why,
                Err(error) => error.to_string(),
            };
            if began.elapsed() >= GOOD_TIME {
                pause = Duration::ZERO;
            }
            tracing::error!("{}: not recovered: {why}", self.name);
            self.wait(why, pause).await;
            follows = true;
            pause = (pause * 2).clamp(PAUSE_FIRST, PAUSE_MOST);
        }
    }

    async fn serve(&self, process: Option<VmProcess>, follows: bool) -> io::Result<Served> {
        let process = match process {
            Some(process) => process,
            None => match self.recover(follows).await? {
                Ok(process) => process,
                Err(served) => return Ok(served),
            },
        };
        // A record that cannot be read now does not end what runs.
        let listing = self.listing().ok().flatten();
        let following =
            listing.map(|listing| tokio::spawn(follow(self.directory.clone(), listing)));
        let how = process.ended().await;
        following.into_iter().for_each(|task| task.abort());
        Ok(match Record::load(&self.directory)? {
            None => Served::Ended,
            Some(_) => Served::Failed(last_words::take(&self.directory).unwrap_or(how)),
        })
    }

    /// Has the next process recover the VM, or finds the one that does already.
    async fn recover(&self, follows: bool) -> io::Result<Result<VmProcess, Served>> {
        let Some(listing) = self.listing()? else { return Ok(Err(Served::Ended)) };
        listing.set(Stage::TakingUp);
        let directory = self.directory.clone();
        let running = tokio::task::spawn_blocking(move || VmProcess::running(&directory)).await;
        if let Some(process) = running.map_err(io::Error::other)?? {
            return Ok(Ok(process));
        }
        let task = self.daemon.task(&self.name, Work::Recover);
        let (process, told) = VmProcess::start(task, follows).await?;
        Ok(match told {
            Told::Managed => {
                listing.set(Stage::Held);
                Ok(process)
            }
            Told::Over => {
                process.ended().await;
                Err(Served::Ended)
            }
            Told::Refused(why) => {
                process.ended().await;
                Err(Served::Failed(why.to_string()))
            }
        })
    }

    /// What is known of it, if it is on record.
    fn listing(&self) -> io::Result<Option<Arc<Listing>>> {
        let record = Record::load(&self.directory)?;
        let make = |record: Record| {
            self.daemon.listing(&self.name, || Listing::new(&record, Stage::TakingUp))
        };
        Ok(record.map(make))
    }

    /// The VM waits where it is: better than a wrong byte.
    async fn wait(&self, why: String, pause: Duration) {
        if let Some(listing) = self.daemon.listed(&self.name).filter(|_| !pause.is_zero()) {
            listing.set(Stage::NotTakenUp(why, Instant::now() + pause));
        }
        sleep(pause).await;
    }

    async fn end(self) {
        let Supervisor { name, directory, daemon } = self;
        if let Some(why) = last_words::take(&directory) {
            daemon.note_end(&name, why);
        }
        // It may take long: processes are looked through.
        let forgotten = tokio::task::spawn_blocking(move || daemon.forget(&name, &directory)).await;
        forgotten.unwrap_or_else(|error| tracing::error!("{error}"));
    }
}

/// Has the listing show what the VM's process publishes.
async fn follow(directory: PathBuf, listing: Arc<Listing>) {
    let (socket, mut after) = (api_socket(&directory), 0);
    loop {
        let uri = format!("{FIGURES}?after={after}");
        let asked = link::ask(&socket, Method::GET, &uri, Bytes::new());
        match timeout(FIGURES_LIMIT, asked).await {
            Ok(Ok(reply)) => {
                listing.hear();
                let pause = match (reply.status, reply.read::<Figures>()) {
                    (StatusCode::OK, Ok(figures)) => {
                        after = figures.number;
                        listing.publish(figures);
                        LOOK_EVERY
                    }
                    (StatusCode::NO_CONTENT, _) => LOOK_EVERY,
                    // A process of another release may say what this one does not understand.
                    _ => FIGURES_LIMIT,
                };
                sleep(pause).await;
            }
            // Its end is somebody else's to notice.
            _ => sleep(LOOK_EVERY).await,
        }
    }
}
