//! What passed-through devices reach, piece by piece.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use ebb_pager::IoMapping;
use ebb_sys::process::Process;
use ebb_units::{FrameRange, Gfn};
use ebb_vm::Ram;

use crate::held::{Has, Held, HeldNumbers, Refused};
use crate::pieces::Pieces;

/// Mappings that are left to the VMM. It ends if it gets none.
const LEFT_TO_VMM: u64 = 1024;

/// What the descriptors of a VMM say of its passed-through devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Covers {
    /// All of them are in the container whose pieces are mapped from here.
    All,
    /// Some may not be.
    Some,
    /// The container has no device any more. Nothing is mapped from here from now on.
    None,
}

/// The passed-through devices of one VM. All threads of the VM use it at once.
pub struct PassedThrough {
    ram: Arc<Ram>,
    pieces: Pieces,
    /// `None`: the devices have left. A call of the kernel's is made under the read lock.
    held: RwLock<Option<Held>>,
    /// Whether the log says that something that Ebb does not know of has punched memory.
    told_lost: AtomicBool,
    told_stuck: AtomicBool,
}

impl PassedThrough {
    /// Of a VM with this RAM.
    pub fn new(held: Held, ram: &Arc<Ram>) -> PassedThrough {
        PassedThrough {
            ram: Arc::clone(ram),
            pieces: Pieces::of(ram),
            held: RwLock::new(Some(held)),
            told_lost: AtomicBool::new(false),
            told_stuck: AtomicBool::new(false),
        }
    }

    /// Maps the VM's regions anew in pieces. Until this has returned, devices do not reach all of
    /// them. `again`: an earlier process had begun with it.
    ///
    /// # Errors
    /// In words. Then devices may not reach all memory: the guest must not run.
    pub fn convert(&self, again: bool) -> Result<(), String> {
        let held = self.held();
        let Some(held) = held.as_ref() else { return Ok(()) };
        let said = |error: io::Error| format!("the devices that are passed through: {error}");
        if held.may_access_memory().map_err(said)? {
            return Err("a device that is passed through may access memory already (its bus \
                        master bit is set): reset the guest"
                .into());
        }
        let (wanted, left) = (self.pieces.count(), held.container().mappings_left().map_err(said)?);
        if !again && left.is_some_and(|left| u64::from(left) < wanted + LEFT_TO_VMM) {
            return Err(format!(
                "its memory would take {wanted} mappings in the host's IOMMU, and its container has \
                 {} left: load vfio_iommu_type1 with a greater dma_entry_limit",
                left.unwrap_or(0)
            ));
        }
        for region in self.pieces.regions() {
            let unmapped =
                held.container().unmap(region.start.gpa(), region.bytes()).map_err(said)?;
            if !again && unmapped != region.bytes() {
                let (at, bytes) = (region.start.gpa().0, region.bytes());
                return Err(format!(
                    "the host's kernel unmapped {unmapped} of the {bytes} bytes that QEMU's devices \
                     reach from {at:#x}: Ebb needs Linux 6.0 or later"
                ));
            }
            region.by_huge().try_for_each(|piece| self.map_new(held, piece)).map_err(said)?;
        }
        Ok(())
    }

    /// Follows the VMM's devices by its descriptors.
    ///
    /// # Errors
    /// [`Refused`]: it cannot be told. All is as it was.
    pub fn keep(&self, process: &Process, links: &[(i32, String)]) -> Result<Covers, Refused> {
        // A fault may need the lock, so nothing is looked at under it.
        let Some(mut next) = self.held().clone() else { return Ok(Covers::None) };
        let (next, covers) = match next.follow(process, links)? {
            Has::Held => (Some(next), Covers::All),
            Has::More => (Some(next), Covers::Some),
            Has::Nothing => (None, Covers::None),
        };
        // Waits for the calls that are under way. The last device is let go of before the next
        // call, so no call finds a container that has none.
        *self.held.write().unwrap_or_else(PoisonError::into_inner) = next;
        Ok(covers)
    }

    /// The numbers of the descriptors that are held. `None`: there are none any more.
    pub fn numbers(&self) -> Option<HeldNumbers> {
        self.held().as_ref().map(Held::numbers)
    }

    fn is_any(&self) -> bool {
        self.held().is_some()
    }

    fn held(&self) -> RwLockReadGuard<'_, Option<Held>> {
        self.held.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps a piece, unless it is mapped: it was never unmapped, or is mapped again. A piece is
    /// unmapped before its memory goes, so what is mapped is what is there.
    fn map_piece(&self, held: &Held, piece: FrameRange) -> io::Result<()> {
        match self.map_new(held, piece) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            mapped => mapped,
        }
    }

    /// Maps a piece that is not mapped.
    fn map_new(&self, held: &Held, piece: FrameRange) -> io::Result<()> {
        let place = self.ram.range(piece).ok_or(io::ErrorKind::InvalidInput)?;
        let file = self.ram.files().get(place.file).ok_or(io::ErrorKind::InvalidInput)?;
        let (iova, bytes) = (piece.start.gpa(), piece.bytes());
        held.container().map(iova, &file.mapping, place.offset, bytes)?;
        // An entry in this process's page table would only make the next punch slower.
        self.ram.forget(piece)
    }

    fn unmap_pieces(&self, held: &Held, frames: FrameRange) -> bool {
        match held.container().unmap(frames.start.gpa(), frames.bytes()) {
            Ok(_) => true,
            Err(error) => {
                if !self.told_stuck.swap(true, Relaxed) {
                    tracing::error!(
                        "memory is not reclaimed, because it stays mapped for devices: {error}"
                    );
                }
                false
            }
        }
    }
}

impl IoMapping for PassedThrough {
    fn map(&self, frames: FrameRange) -> io::Result<()> {
        let held = self.held();
        let Some(held) = held.as_ref() else { return Ok(()) };
        self.pieces.over(frames).try_for_each(|piece| self.map_piece(held, piece))
    }

    fn unmap(&self, frames: FrameRange) -> bool {
        let held = self.held();
        let Some(held) = held.as_ref() else { return true };
        self.pieces.has_whole(frames) && self.unmap_pieces(held, frames)
    }

    fn lost(&self, frames: FrameRange) {
        if self.is_any() && !self.told_lost.swap(true, Relaxed) {
            tracing::error!(
                "another program has returned memory at {:#x} to the host: the devices that are \
                 passed through still use the old memory",
                frames.start.gpa().0
            );
        }
    }

    fn was_taken(&self, frames: FrameRange) -> bool {
        let held = self.held();
        let Some(held) = held.as_ref() else { return true };
        // Of a huge frame only a part of which is on record, nothing was unmapped or punched yet.
        !self.pieces.has_whole(frames) || self.unmap_pieces(held, frames)
    }

    fn allows(&self, block: FrameRange, metadata: Gfn) -> bool {
        let has_metadata = || self.pieces.has(FrameRange::new(metadata, 1));
        !self.is_any() || (self.pieces.has_whole(block) && has_metadata())
    }

    fn is_whole(&self) -> bool {
        self.is_any()
    }

    fn any(&self) -> bool {
        self.is_any()
    }
}
