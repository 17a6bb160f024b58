//! Watches the host's memory for the VMs that reclaim under host pressure (`ebb auto --when
//! pressure`), and asks them to reclaim while the host is short of it. See `docs/decisions/0048-*`.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::time::{Duration, Instant};

use axum::http::Method;
use ebb_api::VmName;
use ebb_policy::pressure::{HostMemory, HostPressure, Thresholds};
use ebb_units::Bytes;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::apart::apart;
use super::asking::ask;
use super::registry::Daemon;
use crate::model::api_error::{Answer, failed};
use crate::model::host_pressure::{PressureNotice, Watched};
use crate::model::vm_routes::HOST_PRESSURE;
use crate::system::host_memory::HostReader;

/// Interval between two looks at the host's memory, if the kernel tells nothing meanwhile.
const EVERY: Duration = Duration::from_secs(1);
/// Longest time in which a VM hears nothing. After three times that, its own intervals count.
const SILENCE_MOST: Duration = Duration::from_secs(10);
/// Longest wait for the answer of one VM, before the next one is asked.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest time in which one look asks VMs. The next look asks the others.
const LOOK_MOST: Duration = Duration::from_secs(5);
/// Longest wait for an answer while others are asked. Then the VM has given nothing.
const ANSWER_MOST: Duration = Duration::from_secs(120);
/// A shortage ends after this long without pressure. So a threshold that is changed to and fro does
/// not fill the log, and late answers still count.
const CALM_LEAST: Duration = Duration::from_secs(10);

/// Watches the host for all VMs that ask for it. `stall_percent`: see [`HostReader::open`].
pub async fn watch(daemon: Daemon, stall_percent: Option<u32>) {
    let mut interval = tokio::time::interval(EVERY);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut watcher = Watcher::new(daemon, stall_percent);
    let mut before: Option<String> = None;
    loop {
        let stalled = tokio::select! {
            _ = interval.tick() => false,
            () = watcher.stall() => true,
        };
        let error = watcher.look(stalled).await.err().map(|error| error.to_string());
        if let Some(error) = error.as_ref().filter(|error| before.as_ref() != Some(*error)) {
            tracing::warn!("the host's memory: {error}");
        }
        before = error;
    }
}

struct Watcher {
    daemon: Daemon,
    stall_percent: Option<u32>,
    /// Opened once a VM asks for it.
    reader: Option<HostReader>,
    vms: BTreeMap<VmName, Vm>,
    /// The shortage under way; none: there is none.
    shortage: Option<Shortage>,
    began: Instant,
}

/// What is to be remembered of a VM. Times count from the beginning of the watch.
#[derive(Default)]
struct Vm {
    pressure: HostPressure,
    /// When it heard of the host last.
    heard: Option<Duration>,
    /// The notice that it has not answered yet.
    open: Option<Open>,
    /// Whether its last round took longer than others were to wait. It is asked last then.
    is_late: bool,
}

/// A notice that waits for its answer.
struct Open {
    is_request: bool,
    /// The bytes that were reclaimed.
    answer: JoinHandle<u64>,
}

/// A shortage of the host's memory, as the log tells it.
#[derive(Default)]
struct Shortage {
    /// What VMs have given back in it, in bytes.
    bytes: u64,
    /// When there was pressure last.
    last: Duration,
}

impl Vm {
    /// Returns whether it is to get a notice now: `why` it is to reclaim, or only that its host is
    /// watched. The latter ends the pressure for it, so it is never said in place of the former.
    fn is_due(&self, watched: &Watched, why: Option<&str>, now: Duration) -> bool {
        let is_silent = |heard| now.saturating_sub(heard) >= SILENCE_MOST;
        let is_time = match why {
            Some(_) => self.pressure.is_due(now),
            None => !watched.is_aware || self.heard.is_none_or(is_silent),
        };
        is_time && watched.answers && self.open.is_none()
    }
}

impl Watcher {
    fn new(daemon: Daemon, stall_percent: Option<u32>) -> Watcher {
        let (reader, vms, shortage) = (None, BTreeMap::new(), None);
        Watcher { daemon, stall_percent, reader, vms, shortage, began: Instant::now() }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Waits until the kernel tells that tasks wait for memory.
    async fn stall(&self) {
        match &self.reader {
            Some(reader) => reader.stall().await,
            None => pending().await,
        }
    }

    /// Looks at the host's memory, and asks one VM after the other as long as it is short.
    async fn look(&mut self, stalled: bool) -> io::Result<()> {
        self.collect().await;
        let asking = self.asking();
        self.vms.retain(|name, _| asking.iter().any(|(asks, _)| asks == name));
        if asking.is_empty() && self.shortage.is_none() {
            return Ok(());
        }
        let memory = self.read(stalled).await?;
        let judge = |(name, watched): &(VmName, Watched)| self.judge(name, watched, &memory);
        let judged: Vec<Option<String>> = asking.iter().map(judge).collect();
        self.note(&memory, &judged);
        let (end, mut may_have_given) = (self.now() + LOOK_MOST, false);
        let mut newer: Option<HostMemory> = None;
        for ((name, watched), why) in asking.iter().zip(judged) {
            let why = match &newer {
                Some(memory) => self.judge(name, watched, memory),
                None => why,
            };
            let vm = self.vms.entry(name.clone()).or_default();
            // What was given may have ended the stalls. The next look tells.
            let why = why.filter(|_| !may_have_given || !vm.pressure.is_by_stalls());
            let now = self.began.elapsed();
            let has_time = why.is_none() || now < end;
            if !has_time || !vm.is_due(watched, why.as_deref(), now) {
                continue;
            }
            if why.is_none() {
                self.tell(name, None);
                continue;
            }
            may_have_given |= self.request(name, why).await;
            newer = Some(self.read(false).await?);
        }
        Ok(())
    }

    /// Takes the answers for which nobody waited.
    async fn collect(&mut self) {
        let come = |vm: &mut Vm| vm.open.take_if(|open| open.answer.is_finished());
        let vms = self.vms.iter_mut();
        let answered = vms.filter_map(|(name, vm)| Some((name.clone(), come(vm)?)));
        let answered: Vec<(VmName, Open)> = answered.collect();
        for (name, Open { is_request, answer }) in answered {
            let bytes = answer.await.unwrap_or(0);
            if is_request {
                self.note_given(&name, bytes);
            }
        }
    }

    /// The VMs that ask for the watch, in the order in which they are asked: those that surely have
    /// the most to give come first.
    fn asking(&self) -> Vec<(VmName, Watched)> {
        let listings = self.daemon.listings().into_iter();
        let asking = listings.filter_map(|(name, listing)| Some((name, listing.watched()?)));
        let mut asking: Vec<(VmName, Watched)> = asking.collect();
        let is_late = |name: &VmName| self.vms.get(name).is_some_and(|vm| vm.is_late);
        asking.sort_by_key(|(name, watched)| {
            (is_late(name), watched.is_stuck, Reverse(watched.spare_bytes))
        });
        asking
    }

    /// Reads the host's memory away from the threads that answer requests.
    async fn read(&mut self, stalled: bool) -> io::Result<HostMemory> {
        let (reader, percent) = (self.reader.take(), self.stall_percent);
        let (reader, memory) = apart(move || {
            let mut reader = reader.unwrap_or_else(|| HostReader::open(percent));
            let memory = reader.read(stalled);
            (reader, memory)
        })
        .await?;
        self.reader = Some(reader);
        memory
    }

    /// Returns why this VM is to reclaim; none: it is not.
    fn judge(&mut self, name: &VmName, vm: &Watched, memory: &HostMemory) -> Option<String> {
        let stall_permille = self.stall_percent.map(|percent| percent * 10);
        let thresholds = Thresholds { below: vm.below, stall_permille };
        self.vms.entry(name.clone()).or_default().pressure.look(memory, thresholds)
    }

    /// Logs the beginning and the end of a shortage. `judged`: why each VM is to reclaim.
    fn note(&mut self, memory: &HostMemory, judged: &[Option<String>]) {
        let now = self.now();
        let whys: Vec<&String> = judged.iter().flatten().collect();
        if let Some(why) = whys.first() {
            if self.shortage.is_none() {
                let several = if whys.len() == 1 { "" } else { "s" };
                tracing::info!("{why}: reclaiming from {} VM{several}", whys.len());
            }
            self.shortage.get_or_insert_default().last = now;
            return;
        }
        let is_over = |shortage: &Shortage| now.saturating_sub(shortage.last) >= CALM_LEAST;
        if let Some(Shortage { bytes, .. }) = self.shortage.take_if(|shortage| is_over(shortage)) {
            tracing::info!("{memory}: no VM is asked any more, {} reclaimed", Bytes(bytes));
        }
    }

    /// Asks a VM to reclaim, and waits a while. A VM that takes longer goes on, and its answer is
    /// collected later. Returns whether it has given something or goes on.
    async fn request(&mut self, name: &VmName, why: Option<String>) -> bool {
        self.tell(name, why);
        let Some(vm) = self.vms.get_mut(name) else { return false };
        let Some(open) = &mut vm.open else { return false };
        let answer = timeout(PATIENCE, &mut open.answer).await;
        vm.is_late = answer.is_err();
        let Ok(answer) = answer else { return true };
        vm.open = None;
        let bytes = answer.unwrap_or(0);
        self.note_given(name, bytes);
        bytes > 0
    }

    /// Begins to tell a VM why it is to reclaim, or only that its host is watched.
    fn tell(&mut self, name: &VmName, why: Option<String>) {
        let Some(reader) = &self.reader else { return };
        let notice = PressureNotice { seen_by: reader.seen_by(), why };
        let now = self.now();
        let vm = self.vms.entry(name.clone()).or_default();
        let is_request = notice.why.is_some();
        let answer = tokio::spawn(answer(self.daemon.clone(), name.clone(), notice));
        (vm.heard, vm.open) = (Some(now), Some(Open { is_request, answer }));
    }

    /// Notes what a VM has given on request.
    fn note_given(&mut self, name: &VmName, bytes: u64) {
        let now = self.now();
        if let Some(vm) = self.vms.get_mut(name) {
            vm.pressure.asked(now, bytes);
        }
        if let Some(shortage) = &mut self.shortage {
            shortage.bytes = shortage.bytes.saturating_add(bytes);
        }
    }
}

/// Sends a notice to a VM. Returns the bytes that it reclaimed; 0: also if it does not answer.
async fn answer(daemon: Daemon, name: VmName, notice: PressureNotice) -> u64 {
    match timeout(ANSWER_MOST, send(&daemon, &name, &notice)).await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(error)) => {
            tracing::debug!("{name}: {error}");
            0
        }
        Err(_) => 0,
    }
}

async fn send(daemon: &Daemon, name: &VmName, notice: &PressureNotice) -> Answer<u64> {
    let body = serde_json::to_vec(notice).map_err(failed("the host's pressure"))?;
    let reply = ask(daemon, name, Method::PUT, HOST_PRESSURE, body.into()).await?;
    reply.read().map_err(failed("its answer about the host's pressure"))
}
