//! The state of one VM that all its controllers work with. The worker lends it to one at a time.

pub mod capabilities;
pub mod forgetting;
pub mod insight;
pub mod kernel;
pub mod liveness;
#[cfg(test)]
pub mod machine;
pub mod mailbox;
pub mod on_record;
pub mod qmp_link;
pub mod reaching;
mod registration;
mod searches;
pub mod service;
pub mod shared_size;
mod vcpus;
pub mod work;

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use ebb_api::VmName;
use ebb_pager::{Pager, Restored};
use ebb_passthrough::PassedThrough;
use ebb_reclaim::limit::marks::Marks;
use ebb_sys::process::Process;
use ebb_units::HUGE_BYTES;
use ebb_vm::Qmp;
use serde_json::json;

use self::capabilities::Capabilities;
use self::forgetting::Forgetting;
use self::insight::KnownGuest;
use self::mailbox::{Command, Mailbox};
use self::on_record::OnRecord;
use self::qmp_link::QmpLink;
use self::reaching::{Reaching, may_evict_beside};
use self::service::FaultService;
use crate::model::api_error::{Answer, failed, not_allowed};
use crate::model::record::Record;
use crate::model::swap_rule::WhenFull;
use crate::serve::disks::Disks;
use crate::serve::growth::Growth;

/// Why nothing is done with a VM whose userfaultfd may be closed at any moment.
pub const LEAVING: &str = "its content is all back, but its userfaultfd in QEMU could not be closed yet: \
                           it is detached once that is closed";

/// One managed VM.
pub struct VmContext {
    /// The VMM.
    pub process: Process,
    /// The pager.
    pub pager: Arc<Pager>,
    /// Blocks that the pager has given back. The reclaim controller counts those that were not
    /// needed.
    pub restored: Receiver<Restored>,
    /// How the VMM's page table is emptied.
    pub forgetting: Forgetting,
    /// The VMM's control socket.
    pub qmp: QmpLink,
    /// The VM's record, in memory and in its directory.
    pub record: OnRecord,
    /// The disks that Ebb serves.
    pub disks: Disks,
    /// The virtio-mem devices that Ebb serves.
    pub growth: Growth,
    /// The way to the worker.
    pub mailbox: Mailbox,
    /// The threads that serve the VM's faults. `None` while they are replaced, and once the VM is
    /// detached.
    pub service: Option<FaultService>,
    /// The guest, as far as it is known.
    pub guest: KnownGuest,
    /// The devices that reach the VM's memory by themselves.
    pub reaching: Reaching,
    /// Its passed-through devices, if it was started with any.
    pub passed: Option<Arc<PassedThrough>>,
    /// The mechanisms that can change the VM's size, as QEMU last reported them.
    pub capabilities: Option<Capabilities>,
    /// While the store has no room: what is full, and what to do about it.
    pub no_room: Option<String>,
}

/// What a context is made of.
pub struct ContextParts<'a> {
    /// See [`VmContext::process`].
    pub process: Process,
    /// See [`VmContext::pager`].
    pub pager: Arc<Pager>,
    /// See [`VmContext::restored`].
    pub restored: Receiver<Restored>,
    /// The control socket, if it is connected already.
    pub qmp: Option<Qmp>,
    /// See [`VmContext::record`].
    pub record: Record,
    /// The VM's directory.
    pub directory: &'a Path,
    /// See [`VmContext::disks`].
    pub disks: Disks,
    /// See [`VmContext::growth`].
    pub growth: Growth,
    /// See [`VmContext::passed`].
    pub passed: Option<Arc<PassedThrough>>,
}

impl VmContext {
    /// Returns a context that knows nothing of its guest and devices and serves no faults yet, and
    /// the receiver of the worker's commands.
    pub fn new(parts: ContextParts<'_>) -> (VmContext, Receiver<Command>) {
        let ContextParts {
            process,
            pager,
            restored,
            qmp,
            record,
            directory,
            disks,
            growth,
            passed,
        } = parts;
        let (mailbox, commands) = Mailbox::new();
        let guest = KnownGuest::new(record.start_ticks, record.settings.metadata_by);
        let is_silent = pager.room().evictor_waits();
        let context = VmContext {
            qmp: QmpLink::new(process.pid(), record.monitor(), qmp, is_silent),
            process,
            forgetting: Forgetting::new(record.settings.forget_by),
            restored,
            pager,
            record: OnRecord::new(record, directory),
            disks,
            growth,
            mailbox,
            service: None,
            guest,
            reaching: Reaching::default(),
            passed,
            capabilities: None,
            no_room: None,
        };
        (context, commands)
    }

    /// The VM's name.
    pub fn name(&self) -> &VmName {
        &self.record.name
    }

    /// Returns the directory of the VM's logs.
    pub fn logs(&self) -> PathBuf {
        self.record.logs.clone().unwrap_or_else(|| self.record.directory().to_owned())
    }

    /// Returns the limit on record, with its marks.
    pub fn marks(&self) -> Option<Marks> {
        let limit_bytes = self.record.limit_bytes?;
        Some(Marks::new(limit_bytes, self.record.low_bytes, self.record.high_bytes))
    }

    /// Returns the memory that the VM began with, in bytes. Until QEMU has reported what can be
    /// plugged, that is all of its RAM.
    pub fn initial_bytes(&self) -> u64 {
        let all = self.pager.ram().bytes();
        self.capabilities.as_ref().map_or(all, |capabilities| {
            let devices = capabilities.devices();
            all.saturating_sub(devices.iter().map(|device| device.max_bytes).sum())
        })
    }

    /// Returns the guest's memory as QEMU gives it, in bytes: what it began with, and what is
    /// plugged.
    pub fn memory_bytes(&self) -> u64 {
        let unplugged = self.capabilities.as_ref().map_or(0, Capabilities::unplugged_bytes);
        self.pager.ram().bytes().saturating_sub(unplugged)
    }

    /// Returns how many huge frames the guest must do without, by the size on record.
    pub fn wanted_hard(&self) -> u64 {
        let initial_bytes = self.initial_bytes();
        let size = self.record.size_bytes.unwrap_or(initial_bytes);
        initial_bytes.saturating_sub(size).div_ceil(HUGE_BYTES)
    }

    /// Whether the VM has devices that plug and unplug memory.
    pub fn has_pluggers(&self) -> bool {
        self.capabilities.as_ref().is_some_and(|capabilities| !capabilities.pluggers.is_empty())
    }

    /// Whether a part of the VM's RAM can be removed. RAM that is one file stays.
    pub fn may_lose_regions(&self) -> bool {
        self.pager.ram().files().len() > 1
    }

    /// Succeeds if memory of the VM may be evicted or reclaimed. While the VM is being detached,
    /// its userfaultfd may be closed late, and content that is not in RAM would be lost with it.
    ///
    /// # Errors
    /// The VM is being detached.
    pub fn is_to_stay(&self) -> Answer<()> {
        match self.record.leaving {
            Some(_) => Err(not_allowed(LEAVING)),
            None => Ok(()),
        }
    }

    /// Succeeds if free memory may be reclaimed.
    ///
    /// # Errors
    /// Why it may not.
    pub fn may_take(&self) -> Answer<()> {
        self.is_to_stay()?;
        self.reaching.may_take()
    }

    /// Succeeds if memory in use may be evicted beside the VM's devices.
    ///
    /// # Errors
    /// Why it may not.
    pub fn may_evict_beside_devices(&self) -> Answer<()> {
        self.is_to_stay()?;
        may_evict_beside(&self.reaching.all())
    }

    /// Whether the guest's first touches are to wait while the store has no room.
    pub fn may_wait(&self) -> bool {
        self.record.settings.when_swap_is_full == WhenFull::Wait
            && self.record.limit_bytes.is_some()
    }

    /// Whether the guest's first touches wait for room now. QEMU itself may be the next to wait.
    pub fn waits(&self) -> bool {
        self.may_wait() && self.no_room.is_some()
    }

    /// Whether QEMU itself may wait for room, and so answers nobody.
    pub fn is_halted(&self) -> bool {
        self.waits() && self.pager.room().waiting_touches() > 0
    }

    /// Allows this process and the next to evict memory in use.
    ///
    /// # Errors
    /// The record cannot be written, or the VM's memory cannot be watched.
    pub fn begin_to_evict(&mut self) -> Answer<()> {
        self.record.change(|record| record.evicts = true)?;
        self.watch_all()
    }

    /// Watches all of the VM's memory.
    ///
    /// # Errors
    /// As [`ebb_pager::Frames::watch_all`].
    pub fn watch_all(&self) -> Answer<()> {
        let watched = self.pager.frames().watch_all();
        watched.map_err(failed("watching the VM's memory"))
    }

    /// Adds reclaimed bytes to the total on record.
    pub fn note_reclaimed(&mut self, bytes: u64) {
        if bytes > 0 {
            self.record.note(|record| record.totals.reclaimed_bytes += bytes);
        }
    }

    /// Starts the refill threads, because frames are about to be evicted.
    ///
    /// # Errors
    /// The threads cannot be made.
    pub fn expect_refills(&mut self) -> io::Result<()> {
        let VmContext { service, pager, .. } = self;
        service.as_mut().map_or(Ok(()), |service| service.expect_refills(pager))
    }

    /// Starts the fault service again: a guest whose faults nobody serves would wait for ever.
    pub fn serve_again(&mut self) {
        // The old threads end before new ones recover what they wait for.
        self.service = None;
        let vmm = self.process.as_fd().try_clone_to_owned();
        let started = vmm.and_then(|vmm| FaultService::start(&self.pager, vmm, &self.mailbox));
        match started {
            Ok(service) => self.service = Some(service),
            Err(error) => tracing::error!("the fault thread: {error}"),
        }
    }

    /// Stops a guest that runs. It goes on once the worker finds nothing against it, even if only
    /// the next process brings that about.
    pub fn stop_guest(&mut self) {
        if self.guest_state().as_deref() != Some("running") {
            return;
        }
        self.record.note(|record| record.begin = true);
        if let Err(error) = self.command_guest("stop") {
            tracing::error!("it was not stopped: {error}");
        }
    }

    /// The guest's state in QEMU's words (`RunState`); none: QEMU does not tell.
    pub fn guest_state(&mut self) -> Option<String> {
        let state = self.qmp.socket()?.execute("query-status", json!({})).ok()?;
        state.get("status")?.as_str().map(str::to_owned)
    }

    /// Has QEMU execute `command`, which stops the guest or lets it go on.
    ///
    /// # Errors
    /// QEMU does not obey, or is not connected.
    pub fn command_guest(&mut self, command: &str) -> Result<(), String> {
        let qmp = self.qmp.socket().ok_or("QEMU's QMP socket does not answer")?;
        qmp.execute(command, json!({})).map(drop).map_err(|error| error.to_string())
    }
}
