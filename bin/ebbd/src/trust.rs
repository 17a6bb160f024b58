//! Whether a VM's guest is trusted and the kernel that runs, and who is told when that changes.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ebb_api::Mode;
use ebb_inspect::Run;
use ebb_pager::Witness;
use ebb_units::{FrameRange, Gfn};
use ebb_vm::Qmp;

use crate::failpoint;
use crate::frame_set::FrameSet;
use crate::insight::bring_back;
use crate::placing::Placing;
use crate::pulse::{End, Pulse};
use crate::worker::State;

/// More pieces of metadata than this are not watched one by one: each costs
/// the VMM a mapping.
const WATCHED_RUNS_MAX: usize = 64;

/// A QEMU that does not greet within this time is busy, or serves another client.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

impl State {
    pub(crate) fn notice_reset(&mut self) {
        if was_reset(&mut self.held.qmp) {
            self.after_reset();
        }
    }

    /// After a reset nothing that was known is true.
    pub(crate) fn after_reset(&mut self) {
        self.insight.forget("it was reset and is booting");
        self.lose_kernel();
        self.size_after_reset();
        self.tell_pager();
    }

    /// Another kernel may run. What this one shared is memory like any other, and what devices
    /// may reach must be there before the next one uses it.
    fn lose_kernel(&mut self) {
        self.unshare();
        self.monitor.lose();
        self.placing.iter_mut().for_each(Placing::lose);
        let name = &self.held.record.name;
        if self.held.record.mode == Mode::Strict
            && let Err(error) =
                failpoint::fails("lost", name).and_then(|()| self.held.pager.give_back_all())
        {
            tracing::error!("{name}: for its next kernel: {error}");
            return;
        }
        // Last: until all is back, a daemon after this one is to bring it back.
        if self.held.record.kernel.take().is_some() {
            self.save();
        }
    }

    /// Whether the guest is trusted and the one that runs; inspects if need be.
    pub(crate) fn confirm(&mut self) -> bool {
        self.reconnect();
        let moves = self.has_pluggers() || self.may_lose_regions();
        let mut trusted = self.insight.confirm(&self.held.pager, self.held.qmp.as_mut(), moves);
        trusted = trusted && self.is_in_place();
        if self.has_lost_its_kernel() {
            self.lose_kernel();
        }
        if trusted && self.has_lost_its_kernel() {
            self.insight.forget("what was taken from its kernel before is not back yet");
            trusted = false;
        }
        if trusted
            && !self.may_share()
            && let Err(error) = self.watch_metadata()
        {
            self.insight.forget(&format!("its metadata cannot be watched: {error}"));
            trusted = false;
        }
        self.tell_pager();
        self.share_again();
        trusted
    }

    /// Whether the kernel on record runs no more: kexec tells nobody, nor does a reset while there
    /// was no daemon.
    fn has_lost_its_kernel(&self) -> bool {
        // A daemon that has only just taken the VM up has nothing but what it is told.
        let may_know = self.witness.is_some() || self.insight.is_answered();
        let runs = self.insight.guest().ok().map(|guest| guest.note().digest());
        may_know && self.held.record.kernel.is_some_and(|before| runs != Some(before))
    }

    /// Whom to believe when a frame is wanted back, wherever that changed.
    fn tell_pager(&mut self) {
        let guest = self.insight.guest().ok();
        if guest != self.witness.as_deref() {
            self.witness = guest.map(|guest| Arc::new(guest.clone()));
            self.put_kernel_on_record();
            self.needed = self.needed_frames();
            // Of one that shares its allocator the metadata does not tell what is free.
            let read_freed = self.held.record.settings.read_freed || self.may_share();
            let asked = self.witness.clone().filter(|_| !read_freed);
            self.held.pager.believe(asked.map(|guest| guest as Arc<dyn Witness>));
        }
    }

    /// Before anything is taken from it.
    fn put_kernel_on_record(&mut self) {
        let kernel = self.witness.as_ref().map(|guest| guest.note().digest());
        if kernel.is_some() && self.held.record.kernel.is_none() {
            self.held.record.kernel = kernel;
            self.save();
        }
    }

    /// The frames that each look at a trusted guest reads, there from now on: from a disk
    /// they would be read again and again.
    fn needed_frames(&self) -> FrameSet {
        let Some(guest) = &self.witness else { return FrameSet::default() };
        let pager = &self.held.pager;
        let needed = FrameSet::new(guest.needed_frames(&pager.view()));
        bring_back(pager, needed.runs());
        needed
    }

    /// Whether a look at the guest reads the frame: such frames stay.
    pub(crate) fn is_needed(&self, gfn: Gfn) -> bool {
        self.needed.contains(gfn)
    }

    pub(crate) fn reconnect(&mut self) {
        if self.held.qmp.is_some() || !self.dial.is_due() {
            return;
        }
        let evictor_waits = self.held.pager.evictor_waits();
        evictor_waits.store(true, Relaxed);
        let connected = Qmp::connect_within(&self.held.record.qmp, GREETING_TIMEOUT);
        evictor_waits.store(false, Relaxed);
        match connected {
            Ok(mut qmp) => {
                qmp.show_silence(evictor_waits);
                self.held.qmp = Some(qmp);
                self.dial.worked();
            }
            Err(error) => {
                tracing::debug!("{}: {error}", self.held.record.name);
                self.dial.failed();
            }
        }
    }

    /// In release mode only the metadata is watched, so that the guest's RAM
    /// itself stays as it was.
    fn watch_metadata(&mut self) -> std::io::Result<()> {
        let watched = self.metadata_frames();
        if self.held.record.mode == Mode::Strict || watched == self.watched {
            return Ok(());
        }
        match watched.len() {
            0..=WATCHED_RUNS_MAX => {
                watched.iter().try_for_each(|&frames| self.held.pager.watch_writes(frames))?;
            }
            _ => self.held.pager.watch_all_writes()?,
        }
        self.watched = watched;
        Ok(())
    }

    /// The frames that hold the metadata of a trusted guest.
    fn metadata_frames(&self) -> Vec<FrameRange> {
        let Ok(guest) = self.insight.guest() else { return Vec::new() };
        guest.memmap().runs().iter().map(Run::metadata_frames).collect()
    }

    /// Whether the trusted guest still runs; takes the QMP socket along.
    pub(crate) fn pulse(&mut self) -> Pulse {
        let (pager, qmp) = (Arc::clone(&self.held.pager), self.held.qmp.take());
        let seen = self.seen_descriptors();
        Pulse::new(&self.insight, self.witness.clone(), pager, qmp, seen)
    }

    /// Takes the socket back.
    pub(crate) fn end_pulse(&mut self, pulse: Pulse) {
        let ended;
        (self.held.qmp, ended) = pulse.end();
        match ended {
            Some(End::Reset) => self.after_reset(),
            Some(End::Unknown) => {
                let why = "its vCPUs do not all run the kernel that is known";
                tracing::info!("{}: {why}", self.held.record.name);
                self.insight.forget(why);
                self.lose_kernel();
                self.tell_pager();
            }
            None => {}
        }
    }
}

/// Whether a reset was announced since the last look. A socket that fails is
/// dropped: it may be made again.
pub(crate) fn was_reset(qmp: &mut Option<Qmp>) -> bool {
    match qmp.as_mut().map(Qmp::events) {
        Some(Ok(events)) => events.iter().any(|event| event == "RESET"),
        Some(Err(_)) => {
            *qmp = None;
            false
        }
        None => false,
    }
}
