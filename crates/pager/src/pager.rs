//! One VM's frames, and what may be done to them.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use ebb_ledger::{Busy, Content, Ledger};
use ebb_store::Store;
use ebb_sys::uffd::{HvaRange, Uffd, Watch};
use ebb_units::{FrameRange, Gfn, HugeFrame};
use ebb_vm::Ram;

use crate::counters::{Counters, add};
use crate::io_mapping::IoMapping;
use crate::view::View;

/// The pieces in which missing memory is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grain {
    /// A frame at a time: the backing has small pages.
    Frame,
    /// A huge frame at a time.
    Huge,
}

/// What a pager is made of.
pub struct Parts {
    /// The VM's RAM.
    pub ram: Arc<Ram>,
    /// Where its content is.
    pub ledger: Ledger,
    /// Its faults, after the handshake.
    pub uffd: Uffd,
    /// How its memory is given.
    pub grain: Grain,
    /// Devices that reach it by themselves.
    pub devices: Box<dyn IoMapping>,
    /// Where content goes that is not in memory.
    pub store: Box<dyn Store>,
}

/// A block that was given back because its metadata was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Restored {
    /// Its first frame.
    pub head: Gfn,
    /// It has `1 << order` frames.
    pub order: u8,
}

/// Restored blocks waiting to be looked at; beyond that they are not judged.
const RESTORED_CAPACITY: usize = 1024;

/// The pager of one VM. Used by its fault thread and its worker at once.
pub struct Pager {
    pub(crate) ram: Arc<Ram>,
    pub(crate) ledger: Ledger,
    pub(crate) uffd: Uffd,
    pub(crate) grain: Grain,
    pub(crate) devices: Box<dyn IoMapping>,
    pub(crate) store: Box<dyn Store>,
    pub(crate) restored: SyncSender<Restored>,
    /// What it counts.
    pub counters: Counters,
}

impl Pager {
    /// A pager over `ram`, whose faults come to `uffd`, and the blocks that it
    /// restores, for whoever wants to know whether the guest then used them.
    ///
    /// # Errors
    /// `InvalidInput`: the ledger names slots that the store does not have.
    pub fn new(parts: Parts) -> io::Result<(Pager, Receiver<Restored>)> {
        let Parts { ram, ledger, uffd, grain, devices, store } = parts;
        let (restored, receiver) = sync_channel(RESTORED_CAPACITY);
        let counters = Counters::default();
        for (frames, content) in ledger.runs() {
            match content {
                Content::Empty { .. } => add(&counters.emptied_frames, frames.count),
                Content::Saved { slot } => {
                    // Neighbours in one slot: each of them claims it.
                    frames.frames().try_for_each(|_| store.claim(slot))?;
                    add(&counters.saved_frames, frames.count);
                }
                _ => {}
            }
        }
        Ok((Pager { ram, ledger, uffd, grain, devices, store, restored, counters }, receiver))
    }

    /// The VM's RAM.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// The pieces in which its memory is given.
    pub fn grain(&self) -> Grain {
        self.grain
    }

    /// Its memory, for inspection.
    pub fn view(&self) -> View<'_> {
        View { ram: &self.ram, ledger: &self.ledger, store: &*self.store }
    }

    /// Its ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// From now on all first touches and all writes to protected frames come
    /// here. Without this, missing memory is given by the kernel.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd has a part of it; as ioctl_userfaultfd(2).
    pub fn watch_all(&self) -> io::Result<()> {
        self.ram
            .regions()
            .iter()
            .try_for_each(|region| self.uffd.register(region.hva_range(), Watch::MissingAndWrite))
    }

    /// Writes to protected frames of this range come here.
    ///
    /// # Errors
    /// As [`Pager::watch_all`]; `InvalidInput`: the range is not in one region.
    pub fn watch_writes(&self, frames: FrameRange) -> io::Result<()> {
        self.uffd.register(self.hva(frames)?, Watch::Write)
    }

    /// Writes to protected frames come here, wherever they are in RAM.
    ///
    /// # Errors
    /// As [`Pager::watch_all`].
    pub fn watch_all_writes(&self) -> io::Result<()> {
        self.ram
            .regions()
            .iter()
            .try_for_each(|region| self.uffd.register(region.hva_range(), Watch::Write))
    }

    /// Wakes everybody: events that a dead daemon had read are asked again.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn wake_all(&self) -> io::Result<()> {
        self.ram.regions().iter().try_for_each(|region| self.uffd.wake(region.hva_range()))
    }

    /// Ends every protection and gives all faults back to the kernel. Content
    /// that is not in the RAM file must have been brought back before.
    ///
    /// # Errors
    /// As ioctl_userfaultfd(2).
    pub fn unwatch_all(&self) -> io::Result<()> {
        self.ram.regions().iter().try_for_each(|region| self.uffd.unregister(region.hva_range()))
    }

    /// Lets writes to these frames through, and wakes whoever waits to write.
    ///
    /// # Errors
    /// `InvalidInput`: the range is not in one region; as ioctl_userfaultfd(2).
    pub fn unprotect(&self, frames: FrameRange) -> io::Result<()> {
        self.uffd.unprotect(self.hva(frames)?)
    }

    pub(crate) fn protect(&self, frames: FrameRange) -> io::Result<()> {
        self.uffd.protect(self.hva(frames)?)
    }

    pub(crate) fn wake(&self, frames: FrameRange) -> io::Result<()> {
        self.uffd.wake(self.hva(frames)?)
    }

    pub(crate) fn hva(&self, frames: FrameRange) -> io::Result<HvaRange> {
        self.ram.hva_range(frames).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Gives each frame of a huge frame its own ledger word.
    pub(crate) fn split(&self, huge: HugeFrame) -> Result<(), Busy> {
        self.ledger.split(huge).map(|wanted| self.after(wanted, FrameRange::huge(huge)))
    }

    /// After words were held for a moment: whoever asked in that moment is
    /// woken, and asks again.
    pub(crate) fn after(&self, wanted: bool, frames: FrameRange) {
        let frames = self.ram.clip(frames);
        if let (true, Some(frames)) = (wanted, frames) {
            self.report("wake", self.wake(frames));
        }
    }

    /// An error on a path that cannot hand it on. The VMM's end is no error.
    pub(crate) fn report(&self, what: &str, result: io::Result<()>) {
        match result {
            Err(error) if !is_gone(&error) => tracing::error!("{what}: {error}"),
            _ => {}
        }
    }
}

/// The VMM is gone: ESRCH from the userfaultfd.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}
