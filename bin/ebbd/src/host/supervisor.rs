//! Keeps a VM served: has a process manage it, and starts the next one when that process ends. See
//! `docs/decisions/0044-*`.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::{Method, StatusCode};
use ebb_api::{VmChange, VmName};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::apart::{apart, apart_or_log};
use super::events::News;
use super::lasting::lasting;
use super::link::{self, LinkError};
use super::listing::{Listing, Stage};
use super::registry::Daemon;
use super::vm_process::VmProcess;
use crate::model::figures::VmFigures;
use crate::model::record::Record;
use crate::model::site::api_socket;
use crate::model::task::{TaskResult, Work};
use crate::model::vm_routes::FIGURES;
use crate::system::{cgroup, last_words};

/// First pause. The process after one that ended starts at once. If that ends soon, too, the next
/// one waits this long, and each further one twice as long as the one before.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MOST: Duration = Duration::from_secs(60);
/// A process that has served for this long is followed by the next one without a pause.
const GOOD_TIME: Duration = Duration::from_secs(30);
/// Longest wait for figures. The process answers within 5 s, with new figures or none.
const FIGURES_LIMIT: Duration = Duration::from_secs(15);
/// Time after which the log says again that a VM is still being recovered.
const TELL_EVERY: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Keeps one VM served.
#[derive(Clone)]
pub struct Supervisor {
    name: VmName,
    directory: PathBuf,
    daemon: Daemon,
}

/// How the service of a process ended.
enum Served {
    /// The VM is no longer managed.
    Ended,
    /// The process that managed the VM has ended, and how.
    Died(String),
    /// No process manages the VM, and why.
    Failed(String),
}

impl Supervisor {
    /// The supervisor of a VM of this daemon.
    pub fn of(daemon: &Daemon, name: VmName) -> Supervisor {
        let directory = daemon.site().directory(&name);
        Supervisor { name, directory, daemon: daemon.clone() }
    }

    /// Begins with the process that manages the VM already, if there is one.
    pub fn begin(self, process: Option<VmProcess>) {
        self.list(if process.is_some() { Stage::Managed } else { Stage::Recovering });
        tokio::spawn(self.last(process));
    }

    /// Begins with the next process, once this one has ended, which was killed on purpose.
    pub fn begin_after(self, process: VmProcess) {
        self.list(Stage::Recovering);
        tokio::spawn(async move {
            process.ended(&self.name).await;
            self.last(None).await;
        });
    }

    /// Lists the VM from now on, if it is on record.
    fn list(&self, stage: Stage) {
        if let Ok(Some(record)) = Record::load(&self.directory) {
            self.daemon.listing(&self.name, &record, stage);
        }
    }

    /// Supervises the VM to its end. If this panics, it begins anew, with the process that it finds.
    async fn last(self, mut process: Option<VmProcess>) {
        let what = format!("{}: its supervisor", self.name);
        lasting(what, || self.clone().run(process.take())).await;
    }

    async fn run(self, mut process: Option<VmProcess>) {
        let (mut pause, mut follows) = (Duration::ZERO, false);
        loop {
            let began = Instant::now();
            let why = match self.serve(process.take(), follows).await {
                Ok(Served::Ended) => return self.end().await,
                Ok(Served::Died(why)) => {
                    tracing::warn!("{}: {why}: the next process recovers it", self.name);
                    if let Some(listing) = self.daemon.listed(&self.name) {
                        listing.lose_process(&why);
                    }
                    why
                }
                Ok(Served::Failed(why)) => self.failed(why),
                Err(error) => self.failed(error.to_string()),
            };
            if began.elapsed() >= GOOD_TIME {
                pause = Duration::ZERO;
            }
            self.wait(why, pause).await;
            follows = true;
            pause = (pause * 2).clamp(PAUSE_FIRST, PAUSE_MOST);
        }
    }

    fn failed(&self, why: String) -> String {
        tracing::error!("{}: not recovered: {why}", self.name);
        why
    }

    async fn serve(&self, process: Option<VmProcess>, follows: bool) -> io::Result<Served> {
        let process = match process {
            Some(process) => process,
            None => match self.recover(follows).await? {
                Ok(process) => process,
                Err(served) => return Ok(served),
            },
        };
        // The service does not end because the record cannot be read now.
        let listing = self.listing().ok().flatten();
        // Aborts its task when it is dropped, also by a panic.
        let mut following = JoinSet::new();
        if let Some(listing) = listing {
            let what = format!("{}: whoever reads its figures", self.name);
            let (daemon, directory) = (self.daemon.clone(), self.directory.clone());
            let make = move || follow(daemon.clone(), directory.clone(), Arc::clone(&listing));
            following.spawn(lasting(what, make));
        }
        let how = process.ended(&self.name).await;
        drop(following);
        Ok(match Record::load(&self.directory)? {
            None => Served::Ended,
            Some(_) => Served::Died(last_words::take(&self.directory).unwrap_or(how)),
        })
    }

    /// Has the next process recover the VM, or finds the one that already manages it.
    async fn recover(&self, follows: bool) -> io::Result<Result<VmProcess, Served>> {
        let Some(listing) = self.listing()? else { return Ok(Err(Served::Ended)) };
        listing.set(Stage::Recovering);
        let directory = self.directory.clone();
        let running = apart(move || VmProcess::running(&directory)).await?;
        if let Some(process) = running? {
            return Ok(Ok(process));
        }
        let task = self.daemon.task(&self.name, Work::Recover);
        let (process, result) = self.patiently(VmProcess::start(task, follows)).await?;
        Ok(match result {
            TaskResult::Managed => {
                listing.set(Stage::Managed);
                Ok(process)
            }
            TaskResult::Over => {
                process.ended(&self.name).await;
                Err(Served::Ended)
            }
            TaskResult::Refused(why) => {
                process.ended(&self.name).await;
                Err(Served::Failed(why.to_string()))
            }
        })
    }

    /// Waits for a process that recovers the VM, however long it takes: its guest waits, too.
    async fn patiently<T>(&self, recovering: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let mut recovering = pin!(recovering);
        loop {
            if let Ok(done) = timeout(TELL_EVERY, &mut recovering).await {
                return done;
            }
            tracing::warn!(
                "{}: the next process has been recovering it for {} s, and waits for a disk or for \
                 the lock of an image, or hangs",
                self.name,
                began.elapsed().as_secs()
            );
        }
    }

    /// The listing of the VM, if the VM is on record.
    fn listing(&self) -> io::Result<Option<Arc<Listing>>> {
        let record = Record::load(&self.directory)?;
        let make = |record| self.daemon.listing(&self.name, &record, Stage::Recovering);
        Ok(record.map(make))
    }

    /// Leaves the VM waiting for the length of the pause: better than a wrong byte.
    async fn wait(&self, why: String, pause: Duration) {
        if let Some(listing) = self.daemon.listed(&self.name).filter(|_| !pause.is_zero()) {
            listing.set(Stage::NotRecovered(why, Instant::now() + pause));
        }
        sleep(pause).await;
    }

    async fn end(self) {
        let Supervisor { name, directory, daemon } = self;
        let why = last_words::take(&directory);
        if let Some(why) = &why {
            daemon.note_end(&name, why.clone());
        }
        // The record goes with QEMU, or by a detach.
        let listing = daemon.listed(&name);
        let lives = listing.as_ref().is_some_and(|listing| listing.vmm_lives());
        let left = listing.filter(|_| lives).map(|listing| listing.summary().pid);
        let change = if lives { VmChange::Detached } else { VmChange::Ended };
        let news = Some(News::State(change, why));
        // Blocks for long: this looks through processes.
        let of = name.clone();
        let forget = move || {
            // Before its name is free: the pilot must not attach it again.
            if let Some(Err(error)) = left.map(|pid| daemon.pilot_record().leave(pid)) {
                tracing::warn!("{of}: the pilot may attach it again: its record: {error}");
            }
            daemon.forget(&of, &directory, news);
            // The process was in the group of its VM until it ended.
            cgroup::clear_left(false);
        };
        apart_or_log(&name, forget).await;
    }
}

/// Keeps the listing up to date with what the VM's process publishes.
async fn follow(daemon: Daemon, directory: PathBuf, listing: Arc<Listing>) {
    let (socket, mut after) = (api_socket(&directory), 0);
    loop {
        let watch = daemon.pilot().is_watching();
        let uri = format!("{FIGURES}?after={after}&watch={watch}");
        let asked = link::ask(&socket, Method::GET, &uri, Bytes::new());
        match timeout(FIGURES_LIMIT, asked).await {
            Ok(Ok(reply)) => {
                listing.hear();
                let pause = match (reply.status, reply.read::<VmFigures>()) {
                    (StatusCode::OK, Ok(figures)) => {
                        after = figures.number;
                        daemon.publish(&listing, figures);
                        LOOK_EVERY
                    }
                    (StatusCode::NO_CONTENT, _) => LOOK_EVERY,
                    // A process of another release may send figures that this one cannot parse.
                    _ => FIGURES_LIMIT,
                };
                sleep(pause).await;
            }
            // The process serves the VM all the same.
            Ok(Err(LinkError::TooLong)) => {
                listing.hear();
                sleep(FIGURES_LIMIT).await;
            }
            // The supervisor notices the end of the process.
            _ => sleep(LOOK_EVERY).await,
        }
    }
}
