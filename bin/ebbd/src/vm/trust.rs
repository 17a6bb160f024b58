//! Whether a VM's guest is trusted and its kernel runs, and who is told when that changes.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use ebb_api::Mode;
use ebb_pager::{Witness, Zeros};
use ebb_units::FrameRange;
use ebb_vm::layout;

use super::context::VmContext;
use super::context::kernel::Kernel;
use crate::support::failpoint;

/// Most pieces of metadata to watch one by one: each costs the VMM a mapping.
const WATCHED_RUNS_MAX: usize = 64;

/// The controller that keeps up to date what the context knows of the guest.
#[derive(Default)]
pub struct Trust {
    /// Metadata ranges that are write-protected, unless all memory is watched.
    watched: Vec<FrameRange>,
    /// Pieces of metadata that were watched one by one. A guest can have other ones again and again.
    pieces: usize,
    /// Whether the guest's next kernel waits for memory that its devices may use.
    owes_next: bool,
    /// Why that memory is not back.
    failed: Option<String>,
}

impl Trust {
    /// The controller of a VM that begins or is recovered. If the last process ended while a kernel
    /// waited for its memory, that kernel still waits.
    pub fn new(cx: &VmContext) -> Trust {
        let waits = cx.record.begin && cx.record.kernel.is_some();
        Trust { owes_next: waits && cx.passed.is_some(), ..Trust::default() }
    }

    /// Returns why the guest's next kernel has not all of its memory.
    pub fn why_stopped(&self) -> Option<String> {
        self.failed.clone()
    }

    /// Whether the guest must not go on yet, because its devices do not reach all of its memory.
    pub fn must_stay_stopped(&self) -> bool {
        self.owes_next
    }

    /// Whether the guest is known and runs. Inspects it anew if need be. [`Trust::settle`] is to
    /// act on the answer.
    pub fn look(&mut self, cx: &mut VmContext) -> bool {
        cx.qmp.reconnect();
        if cx.qmp.take_anew() {
            cx.guest.doubt();
        }
        let moves = cx.has_pluggers() || cx.may_lose_regions();
        let runs = cx.guest.confirm(&cx.pager, cx.qmp.socket(), moves, cx.record.kernel);
        runs && is_in_place(cx)
    }

    /// Whether the kernel on record runs no more. kexec tells nobody; a reset while no process
    /// managed the VM does not either.
    pub fn has_lost_its_kernel(&self, cx: &VmContext) -> bool {
        // A process that has only just recovered the VM knows only what is on record.
        let may_know = cx.guest.trusted_kernel().is_some() || cx.guest.is_answered();
        let runs = cx.guest.kernel().ok().map(Kernel::digest);
        may_know && cx.record.kernel.is_some_and(|before| runs != Some(before))
    }

    /// Whether a guest that was found to run is to be trusted. If so, its metadata is watched and
    /// the pager asks it from now on.
    pub fn settle(&mut self, cx: &mut VmContext, runs: bool) -> bool {
        let mut is_trusted = runs;
        if is_trusted && self.has_lost_its_kernel(cx) {
            cx.guest.forget("memory reclaimed from its earlier kernel is not back yet");
            is_trusted = false;
        }
        if is_trusted
            && !cx.guest.shares_allocator()
            && let Err(error) = self.watch_metadata(cx)
        {
            cx.guest.forget(&format!("its metadata cannot be watched: {error}"));
            is_trusted = false;
        }
        self.tell_pager(cx);
        is_trusted
    }

    /// Drops the guest for the reason `why`: it was reset, or its kernel does not run any more.
    pub fn on_reset(&mut self, cx: &mut VmContext, why: &str) {
        cx.guest.forget(why);
    }

    /// Brings back what devices may reach, because another kernel may run and must find it
    /// resident. All others have forgotten the old kernel by now.
    pub fn bring_back_for_next(&mut self, cx: &mut VmContext) {
        cx.guest.forget_proof();
        if cx.record.mode == Mode::Strict {
            if cx.passed.is_some() {
                // Its drivers may have a device use memory that no processor has touched.
                cx.stop_guest();
                self.owes_next = true;
            }
            let failed = failpoint::fails("lost", cx.name());
            if let Err(error) = failed.and_then(|()| cx.pager.returner().give_back_all(Zeros::Fill))
            {
                let why = format!("its memory does not all come back for its next kernel: {error}");
                if self.failed.as_ref() != Some(&why) {
                    tracing::error!("{why}");
                }
                self.failed = Some(why);
                return;
            }
        }
        (self.owes_next, self.failed) = (false, None);
        // The record changes last: until all is back, the next process must bring it back.
        if cx.record.kernel.is_some() {
            cx.record.note(|record| record.kernel = None);
        }
    }

    /// Tells the pager which guest to believe when a frame is wanted back, if that changed.
    pub fn tell_pager(&mut self, cx: &mut VmContext) {
        if !cx.guest.renew_witness() {
            return;
        }
        // On record before anything is reclaimed from the kernel.
        let kernel = cx.guest.trusted_kernel().map(Kernel::digest);
        if kernel.is_some() && cx.record.kernel.is_none() {
            cx.record.note(|record| record.kernel = kernel);
        }
        cx.guest.bring_back_needed(&cx.pager);
        // If the guest shares its allocator, its metadata does not tell what is free.
        let read_freed = cx.record.settings.read_freed || cx.guest.shares_allocator();
        let asked = cx.guest.witness().filter(|_| !read_freed).map(Arc::clone);
        cx.pager.residency().believe(asked.map(|guest| guest as Arc<dyn Witness>));
    }

    /// Forgets which metadata is watched: nothing is any more.
    pub fn forget_watches(&mut self) {
        (self.watched, self.pieces) = (Vec::new(), 0);
    }

    /// Watches the guest's metadata. In release mode nothing else is watched, so that the guest's
    /// RAM itself stays as it was.
    fn watch_metadata(&mut self, cx: &VmContext) -> std::io::Result<()> {
        let watched = metadata_frames(cx);
        if cx.record.mode == Mode::Strict || watched == self.watched {
            return Ok(());
        }
        self.pieces = self.pieces.saturating_add(watched.len());
        match self.pieces {
            0..=WATCHED_RUNS_MAX => {
                watched.iter().try_for_each(|&frames| cx.pager.frames().watch_writes(frames))?;
            }
            _ => cx.pager.frames().watch_all_writes()?,
        }
        self.watched = watched;
        Ok(())
    }
}

/// Returns the frames that hold the metadata of a trusted guest.
fn metadata_frames(cx: &VmContext) -> Vec<FrameRange> {
    cx.guest.kernel().map(Kernel::metadata_frames).unwrap_or_default()
}

/// Whether the guest means the same memory as Ebb by its addresses. A QEMU that does not tell is
/// asked again later.
fn is_in_place(cx: &mut VmContext) -> bool {
    if !cx.may_lose_regions() {
        return true;
    }
    let Some(qmp) = cx.qmp.socket() else { return false };
    match layout::moved(qmp, cx.pager.ram()) {
        Ok(None) => true,
        Ok(Some(at)) => {
            cx.guest.forget(&format!(
                "a memory device was unplugged, and other memory is at its address {:#x} now: \
                 delete its back end, or detach and attach the VM",
                at.0
            ));
            false
        }
        Err(error) => {
            tracing::debug!("its memory devices: {error}");
            false
        }
    }
}
