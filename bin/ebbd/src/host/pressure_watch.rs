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
use tokio::time::timeout;

use super::asking::ask;
use super::registry::Daemon;
use crate::model::api_error::{Answer, failed};
use crate::model::host_pressure::{PressureNotice, Watched};
use crate::rest::vm_server::HOST_PRESSURE;
use crate::system::host_memory::HostReader;

/// Interval between two looks at the host's memory, if the kernel tells nothing meanwhile.
const EVERY: Duration = Duration::from_secs(1);
/// Longest time in which a VM hears nothing. After three times that, its own intervals count.
const SILENCE_MOST: Duration = Duration::from_secs(10);
/// Longest wait for the answer of one VM, before the next one is asked.
const PATIENCE: Duration = Duration::from_secs(1);

/// Watches the host for all VMs that ask for it. `stall_percent`: see [`HostReader::open`].
pub async fn watch(daemon: Daemon, stall_percent: Option<u32>) {
    let mut interval = tokio::time::interval(EVERY);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut watcher = Watcher::new(daemon, stall_percent);
    loop {
        let stalled = tokio::select! {
            _ = interval.tick() => false,
            () = watcher.stall() => true,
        };
        if let Err(error) = watcher.look(stalled).await {
            tracing::warn!("the host's memory: {error}");
        }
    }
}

struct Watcher {
    daemon: Daemon,
    stall_percent: Option<u32>,
    /// Opened once a VM asks for it.
    reader: Option<HostReader>,
    vms: BTreeMap<VmName, Vm>,
    /// What VMs have given back in the shortage under way, in bytes; none: there is none.
    shortage: Option<u64>,
    began: Instant,
}

/// What is to be remembered of a VM. Times count from the beginning of the watch.
#[derive(Default)]
struct Vm {
    pressure: HostPressure,
    /// When it heard of the host last.
    told: Option<Duration>,
}

impl Watcher {
    fn new(daemon: Daemon, stall_percent: Option<u32>) -> Watcher {
        let (reader, vms, shortage) = (None, BTreeMap::new(), None);
        Watcher { daemon, stall_percent, reader, vms, shortage, began: Instant::now() }
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
        let asking = asking(&self.daemon);
        self.vms.retain(|name, _| asking.iter().any(|(asks, _)| asks == name));
        if asking.is_empty() && self.shortage.is_none() {
            return Ok(());
        }
        let mut memory = self.read(stalled)?;
        self.note(&memory, &asking);
        for (name, watched) in &asking {
            let why = self.judge(name, watched, &memory);
            if self.tell(name, watched, why).await > 0 {
                memory = self.read(false)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, stalled: bool) -> io::Result<HostMemory> {
        let percent = self.stall_percent;
        self.reader.get_or_insert_with(|| HostReader::open(percent)).read(stalled)
    }

    /// Returns why this VM is to reclaim; none: it is not.
    fn judge(&mut self, name: &VmName, vm: &Watched, memory: &HostMemory) -> Option<String> {
        let stall_permille = self.stall_percent.map(|percent| percent * 10);
        let thresholds = Thresholds { below: vm.below, stall_permille };
        self.vms.entry(name.clone()).or_default().pressure.look(memory, thresholds)
    }

    /// Logs the beginning and the end of a shortage.
    fn note(&mut self, memory: &HostMemory, asking: &[(VmName, Watched)]) {
        let whys = asking.iter().filter_map(|(name, vm)| self.judge(name, vm, memory));
        let whys: Vec<String> = whys.collect();
        match (whys.first(), self.shortage) {
            (Some(why), None) => {
                let several = if whys.len() == 1 { "" } else { "s" };
                tracing::info!("{why}: reclaiming from {} VM{several}", whys.len());
                self.shortage = Some(0);
            }
            (None, Some(bytes)) => {
                tracing::info!("{memory}: no VM is asked any more, {} reclaimed", Bytes(bytes));
                self.shortage = None;
            }
            _ => {}
        }
    }

    /// Tells a VM what is due: that its host is short of memory, or at times that its host is
    /// watched. Returns what the VM reclaimed, in bytes.
    async fn tell(&mut self, name: &VmName, watched: &Watched, why: Option<String>) -> u64 {
        let now = self.began.elapsed();
        let vm = self.vms.entry(name.clone()).or_default();
        let why = why.filter(|_| vm.pressure.is_due(now));
        let is_told =
            watched.is_told && vm.told.is_some_and(|told| now.saturating_sub(told) < SILENCE_MOST);
        let seen_by = match &self.reader {
            Some(reader) if why.is_some() || !is_told => reader.seen_by().to_owned(),
            _ => return 0,
        };
        vm.told = Some(now);
        let notice = PressureNotice { seen_by, why };
        let bytes = match timeout(PATIENCE, send(&self.daemon, name, &notice)).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(error)) => {
                tracing::debug!("{name}: {error}");
                0
            }
            // It goes on with what it has begun.
            Err(_) => 0,
        };
        if notice.why.is_some() {
            vm.pressure.asked(self.began.elapsed(), bytes);
            self.shortage = self.shortage.map(|before| before.saturating_add(bytes));
        }
        bytes
    }
}

/// The VMs that ask for the watch. Those that may have the most to give come first.
fn asking(daemon: &Daemon) -> Vec<(VmName, Watched)> {
    let listings = daemon.listings().into_iter();
    let asking = listings.filter_map(|(name, listing)| Some((name, listing.watched()?)));
    let mut asking: Vec<(VmName, Watched)> = asking.collect();
    asking.sort_by_key(|(_, watched)| Reverse(watched.spare_bytes));
    asking
}

async fn send(daemon: &Daemon, name: &VmName, notice: &PressureNotice) -> Answer<u64> {
    let body = serde_json::to_vec(notice).map_err(failed("the host's pressure"))?;
    let reply = ask(daemon, name, Method::PUT, HOST_PRESSURE, body.into()).await?;
    reply.read().map_err(failed("its answer about the host's pressure"))
}
