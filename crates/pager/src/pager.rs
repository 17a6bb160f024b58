//! One VM's pager: its parts, each of which sees to one thing.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use ebb_digest::DigestKey;
use ebb_ledger::Ledger;
use ebb_store::Store;
use ebb_sys::uffd::Uffd;
use ebb_vm::Ram;

use crate::device::access::DeviceAccess;
use crate::device::pluggable::Pluggable;
use crate::evict::Evictor;
use crate::fault::installer::Installer;
use crate::fault::refiller::Refiller;
use crate::fault::room::Room;
use crate::fault::server::{FaultServer, Restored};
use crate::folios::{Folios, Grain};
use crate::frames::Frames;
use crate::frames::io_mapping::IoMapping;
use crate::give_back::Returner;
use crate::guest::tables::Tables;
use crate::reclaim::claim::Blocks;
use crate::residency::Residency;
use crate::residency::resting::Disk;
use crate::residency::view::View;
use crate::support::counters::Counters;
use crate::support::panics::Panics;

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
    /// Where some of it is without being written.
    pub disk: Box<dyn Disk>,
    /// By which content is known; the disk's, too.
    pub digest_key: Arc<DigestKey>,
}

/// The pager of one VM. Used by all of its threads at once.
pub struct Pager {
    frames: Arc<Frames>,
    folios: Arc<Folios>,
    residency: Arc<Residency>,
    room: Arc<Room>,
    installer: Arc<Installer>,
    faults: FaultServer,
    evictor: Evictor,
    blocks: Blocks,
    pluggable: Pluggable,
    devices: DeviceAccess,
    returner: Returner,
    tables: Tables,
    panics: Arc<Panics>,
}

impl Pager {
    /// A pager over RAM, whose faults come to the userfaultfd, and the blocks that it
    /// restores, for whoever wants to know whether the guest then used them.
    ///
    /// # Errors
    /// `InvalidInput`: the ledger names slots that the store does not have.
    pub fn new(parts: Parts) -> io::Result<(Pager, Receiver<Restored>)> {
        let Parts { ram, ledger, uffd, grain, devices, store, disk, digest_key } = parts;
        let frames = Arc::new(Frames::new(ram, ledger, uffd, devices));
        let folios = Arc::new(Folios::new(&frames, grain));
        let residency = Arc::new(Residency::new(&frames, store, disk, digest_key)?);
        let room = Arc::new(Room::new(&frames, &residency));
        let installer = Arc::new(Installer::new(&frames, &folios, &residency, &room));
        let refiller = Refiller::new(&frames, &residency, &installer, &room);
        let (faults, restored) = FaultServer::new(&frames, &installer, refiller, &room);
        let pager = Pager {
            evictor: Evictor::new(&frames, &folios, &residency),
            blocks: Blocks::new(&frames, &residency),
            pluggable: Pluggable::new(&frames, &residency, &installer),
            devices: DeviceAccess::new(&frames, &folios, &residency, &installer),
            returner: Returner::new(&frames, &folios, &residency, &installer),
            tables: Tables::new(&frames),
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

    /// Where the content of its frames is.
    pub fn ledger(&self) -> &Ledger {
        self.frames.ledger()
    }

    /// Its memory, for inspection.
    pub fn view(&self) -> View<'_> {
        self.residency.view()
    }

    /// What is counted.
    pub fn counters(&self) -> &Counters {
        self.frames.counters()
    }

    /// The frames, and who is told of their faults.
    pub fn frames(&self) -> &Frames {
        &self.frames
    }

    /// The pages that they are in.
    pub fn folios(&self) -> &Folios {
        &self.folios
    }

    /// Where content is that is not in memory.
    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    /// Room under a limit.
    pub fn room(&self) -> &Room {
        &self.room
    }

    /// Who gives frames their content.
    pub fn installer(&self) -> &Installer {
        &self.installer
    }

    /// Who serves faults.
    pub fn faults(&self) -> &FaultServer {
        &self.faults
    }

    /// Who evicts.
    pub fn evictor(&self) -> &Evictor {
        &self.evictor
    }

    /// Free blocks that are to be emptied.
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// Memory that can be plugged.
    pub fn pluggable(&self) -> &Pluggable {
        &self.pluggable
    }

    /// The way of devices to the memory.
    pub fn devices(&self) -> &DeviceAccess {
        &self.devices
    }

    /// Who brings content back.
    pub fn returner(&self) -> &Returner {
        &self.returner
    }

    /// The guest's page tables.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Who is told that a thread of this VM has panicked, and what it said.
    pub fn on_panic(&self, tell: impl Fn(String) + Send + Sync + 'static) {
        self.panics.on_panic(tell);
    }

    /// Runs all that a thread does for this VM (`Panics::catch`).
    pub fn catch<T>(&self, run: impl FnOnce() -> T) -> Option<T> {
        self.panics.catch(run)
    }
}

#[cfg(test)]
mod tests;
