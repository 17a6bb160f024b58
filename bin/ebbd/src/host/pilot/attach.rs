//! Attaches VMs that somebody else started, if the pilot is told to.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_api::{AttachRequest, VmName};
use ebb_observe::Found;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::record::Left;
use crate::host::apart::apart;
use crate::host::registry::Daemon;
use crate::host::start_vm;
use crate::model::api_error::ApiError;
use crate::model::task::Work;

/// Interval between two looks at the host's processes.
const EVERY: Duration = Duration::from_secs(10);
/// A look at the host's processes that takes longer is said in the log. There is no second one
/// beside it.
const LOOK_MOST: Duration = Duration::from_secs(60);
/// After a failure, a VM is not tried again for this time: the reason is most likely the same.
const AGAIN: Duration = Duration::from_secs(600);
/// The same after a refusal that will not last, as that of a QEMU that waits for its guest.
const SOON: Duration = Duration::from_secs(30);

/// Attaches VMs, one at a time.
#[derive(Default)]
pub(super) struct Attacher {
    looked: Option<Instant>,
    /// VMs that could not be attached, and when each is tried again.
    failed: BTreeMap<Left, Instant>,
    under_way: Option<JoinHandle<Option<Tried>>>,
}

/// A VM that could not be attached.
struct Tried {
    process: Left,
    name: VmName,
    why: String,
    /// Until it is tried again.
    pause: Duration,
}

impl Attacher {
    /// Begins to attach the next VM, unless one is being attached.
    pub async fn look(&mut self, daemon: &Daemon) {
        if let Some(task) = self.under_way.take_if(|task| task.is_finished())
            && let Ok(Some(tried)) = task.await
        {
            tracing::warn!("the pilot: {} is not attached: {}", tried.name, tried.why);
            self.failed.insert(tried.process, Instant::now() + tried.pause);
            // Others may be waiting.
            self.looked = None;
        }
        let is_due = self.looked.is_none_or(|looked| looked.elapsed() >= EVERY);
        if self.under_way.is_none() && is_due {
            let now = Instant::now();
            self.looked = Some(now);
            self.failed.retain(|_, again| *again > now);
            let failed = self.failed.keys().copied().collect();
            self.under_way = Some(tokio::spawn(attach_next(daemon.clone(), failed)));
        }
    }
}

/// Attaches the first VM that can be managed, is not managed, was not detached and is not among
/// `failed`. Returns it if that failed.
async fn attach_next(daemon: Daemon, failed: Vec<Left>) -> Option<Tried> {
    let mut looking = pin!(apart(ebb_observe::discover_of_managers));
    let looked = match timeout(LOOK_MOST, &mut looking).await {
        Ok(looked) => looked,
        Err(_) => {
            tracing::warn!(
                "the pilot: no VM is attached, since looking for them takes more than {} s: a QEMU of \
                 root's or of libvirt's does not let its command line be read",
                LOOK_MOST.as_secs()
            );
            looking.await
        }
    };
    let found = match looked {
        Ok(Ok(found)) => found,
        Ok(Err(error)) | Err(error) => {
            tracing::warn!("the pilot: the host's VMs: {error}");
            return None;
        }
    };
    // As it is now: looking took a while.
    let settings = daemon.pilot_record().settings();
    if !settings.attach {
        return None;
    }
    let managed: Vec<i32> =
        daemon.listings().iter().map(|(_, listing)| listing.summary().pid).collect();
    let is_new = |vm: &Found| vm.obstacle.is_none() && !managed.contains(&vm.pid);
    let (process, vm) = found.into_iter().filter(is_new).find_map(|vm| {
        let process = Left::of(vm.pid)?;
        let is_left = settings.left.contains(&process) || failed.contains(&process);
        (!is_left).then_some((process, vm))
    })?;
    // A VM that was detached keeps its directory, and with it its name.
    let is_taken = |name: &VmName| daemon.is_known(name) || daemon.site().directory(name).exists();
    let name = VmName::of_vm(vm.name.as_deref(), vm.pid, is_taken)?;
    let request =
        AttachRequest { name: name.clone(), pid: vm.pid, qmp: None, mode: None, min_order: None };
    tracing::info!("the pilot: attaches process {} as {name}", vm.pid);
    let started = start_vm::start(&Arc::new(daemon), name.clone(), Work::Attach(request)).await;
    let refused = started.err()?;
    let pause = match refused {
        ApiError::Unavailable(_) => SOON,
        _ => AGAIN,
    };
    Some(Tried { process, name, why: refused.to_string(), pause })
}
