//! One VM's pager, and the parts that it is made of.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use ebb_digest::DigestKey;
use ebb_ledger::Ledger;
use ebb_store::Store;
use ebb_sys::panics::Panics;
use ebb_sys::uffd::Uffd;
use ebb_vm::{Puncher, Ram};

use crate::device::access::DeviceAccess;
use crate::device::pluggable::Pluggable;
use crate::evict::Evictor;
use crate::fault::installer::Installer;
use crate::fault::refiller::Refiller;
use crate::fault::room::LimitRoom;
use crate::fault::server::{FaultServer, Restored};
use crate::folios::{FolioMap, Grain};
use crate::frames::Frames;
use crate::frames::io_mapping::IoMapping;
use crate::give_back::Returner;
use crate::guest::tables::GuestTables;
use crate::reclaim::claim::Blocks;
use crate::residency::Residency;
use crate::residency::disk_backed::GuestDisk;
use crate::residency::view::View;
use crate::support::counters::Counters;

/// What a pager is made of.
pub struct PagerParts {
    /// The VM's RAM, which only this pager punches.
    pub puncher: Puncher,
    /// Where the content of each frame is.
    pub ledger: Ledger,
    /// The userfaultfd that reports the VM's faults, after the handshake.
    pub uffd: Uffd,
    /// The grain in which the VM gets memory.
    pub grain: Grain,
    /// The devices that reach the memory by themselves.
    pub devices: Box<dyn IoMapping>,
    /// Where the content of evicted frames is saved.
    pub store: Box<dyn Store>,
    /// The guest's disks, whose blocks may equal the content of frames, which then need no write.
    pub disk: Box<dyn GuestDisk>,
    /// The key of content digests, which the disk uses as well.
    pub digest_key: Arc<DigestKey>,
}

/// The pager of one VM. All threads of the VM use it at once.
pub struct Pager {
    frames: Arc<Frames>,
    folios: Arc<FolioMap>,
    residency: Arc<Residency>,
    room: Arc<LimitRoom>,
    installer: Arc<Installer>,
    faults: FaultServer,
    evictor: Evictor,
    blocks: Blocks,
    pluggable: Pluggable,
    devices: DeviceAccess,
    returner: Returner,
    tables: GuestTables,
    panics: Arc<Panics>,
}

impl Pager {
    /// Returns a pager over RAM whose faults come to the userfaultfd, and a receiver of the blocks
    /// that it restores. The receiver is for a check whether the guest then used them.
    ///
    /// # Errors
    /// `InvalidInput`: the ledger names slots that the store does not have.
    pub fn new(parts: PagerParts) -> io::Result<(Pager, Receiver<Restored>)> {
        let PagerParts { puncher, ledger, uffd, grain, devices, store, disk, digest_key } = parts;
        let frames = Arc::new(Frames::new(puncher, ledger, uffd, devices));
        let folios = Arc::new(FolioMap::new(&frames, grain));
        let residency = Arc::new(Residency::new(&frames, store, disk, digest_key)?);
        let room = Arc::new(LimitRoom::new(&frames, &residency));
        let installer = Arc::new(Installer::new(&frames, &folios, &residency, &room));
        let refiller = Refiller::new(&frames, &residency, &installer, &room);
        let (faults, restored) = FaultServer::new(&frames, &installer, refiller, &room);
        let pager = Pager {
            evictor: Evictor::new(&frames, &folios, &residency),
            blocks: Blocks::new(&frames, &residency),
            pluggable: Pluggable::new(&frames, &residency, &installer),
            devices: DeviceAccess::new(&frames, &folios, &residency, &installer),
            returner: Returner::new(&frames, &folios, &residency, &installer),
            tables: GuestTables::new(&frames),
            panics: Arc::default(),
            frames,
            folios,
            residency,
            room,
            installer,
            faults,
        };
        Ok((pager, restored))
    }

    /// The VM's RAM.
    pub fn ram(&self) -> &Arc<Ram> {
        self.frames.ram()
    }

    /// The ledger: where the content of each frame is.
    pub fn ledger(&self) -> &Ledger {
        self.frames.ledger()
    }

    /// The VM's memory, for inspection.
    pub fn view(&self) -> View<'_> {
        self.residency.view()
    }

    /// The pager's counters.
    pub fn counters(&self) -> &Counters {
        self.frames.counters()
    }

    /// The frames, and the userfaultfd that reports their faults.
    pub fn frames(&self) -> &Frames {
        &self.frames
    }

    /// The host's pages that back the frames.
    pub fn folios(&self) -> &FolioMap {
        &self.folios
    }

    /// Where the content of evicted frames is.
    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    /// Room below the VM's limit.
    pub fn room(&self) -> &Arc<LimitRoom> {
        &self.room
    }

    /// The part that gives frames their content.
    pub fn installer(&self) -> &Installer {
        &self.installer
    }

    /// The part that serves faults.
    pub fn faults(&self) -> &FaultServer {
        &self.faults
    }

    /// The part that evicts.
    pub fn evictor(&self) -> &Evictor {
        &self.evictor
    }

    /// The part that claims and reclaims free blocks.
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Memory that can be plugged.
    pub fn pluggable(&self) -> &Pluggable {
        &self.pluggable
    }

    /// The part by which devices pin frames.
    pub fn devices(&self) -> &DeviceAccess {
        &self.devices
    }

    /// The part that brings content back.
    pub fn returner(&self) -> &Returner {
        &self.returner
    }

    /// The guest's page tables.
    pub fn tables(&self) -> &GuestTables {
        &self.tables
    }

    /// Sets the function that is told of a panic in a thread of this VM, with the panic's text.
    pub fn on_panic(&self, tell: impl Fn(String) + Send + Sync + 'static) {
        self.panics.on_panic(tell);
    }

    /// Runs all that a thread does for this VM, and catches its panic (`Panics::catch`).
    pub fn catch<T>(&self, run: impl FnOnce() -> T) -> Option<T> {
        self.panics.catch(run)
    }
}

#[cfg(test)]
mod tests;
