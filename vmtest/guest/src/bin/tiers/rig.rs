//! A file of memory in two processes, and the nodes as tiers.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, ensure};
use ebb_sys::mapping::Mapping;
use ebb_sys::numa;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_tier::{Mover, Node, Pages};
use ebb_units::{FRAME_BYTES, Gfn, Gpa, Hva};
use ebb_vm::ram::Backing;
use ebb_vm::{Ram, Region};

use crate::peer::{self, Peer};

/// Setting by which the kernel moves pages by itself, with faults in the processes that touch them.
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
/// The node with the processors.
pub const FAST: u32 = 0;
/// The node without processors.
pub const SLOW: u32 = 1;

/// Pages of a process, and their file.
pub struct Target {
    pub ram: Arc<Ram>,
    process: Arc<Process>,
}

impl Target {
    /// For a process that has the file mapped at `address`. This process maps it, too.
    pub fn new(
        process: Process,
        address: Hva,
        file: OwnedFd,
        bytes: u64,
    ) -> anyhow::Result<Target> {
        let file = RamFile::from(file);
        let mapping = Mapping::new(&file, 0, bytes)?;
        let region = Region { gpa: Gpa(0), bytes, hva: address, file: 0, offset: 0 };
        let ram = Arc::new(Ram::new(vec![region], vec![Backing::new(file, mapping)])?);
        Ok(Target { ram, process: Arc::new(process) })
    }

    pub fn frames(&self) -> Vec<Gfn> {
        self.ram.regions().flat_map(|region| region.frames().frames()).collect()
    }

    pub fn node(&self, number: u32, mover: Mover) -> Node {
        let (process, ram) = (Arc::clone(&self.process), Arc::clone(&self.ram));
        Node::new(number, Arc::new(Pages::of_vmm(process, ram, mover)))
    }

    /// The node of each page, by the process's page table.
    pub fn nodes(&self) -> anyhow::Result<Vec<i32>> {
        let start = self.ram.regions().next().context("its memory")?.hva;
        locate(&self.process, start, &self.frames())
    }
}

pub struct Rig {
    pub file: RamFile,
    pub peer: Peer,
    pub frames: Vec<Gfn>,
    pub target: Target,
}

impl Rig {
    /// Fills every page, and maps it in both processes.
    pub fn new(bytes: u64) -> anyhow::Result<Rig> {
        if fs::exists(BALANCING)? {
            fs::write(BALANCING, "0").context(BALANCING)?;
        }
        let nodes = ebb_tier::host::nodes()?;
        let found: Vec<_> = nodes.iter().map(|node| (node.number, node.has_cpus)).collect();
        ensure!(found == [(FAST, true), (SLOW, false)], "the nodes are {nodes:?}");
        let file = RamFile::create("tiers", bytes)?;
        peer::fill(&Mapping::new(&file, 0, bytes)?, bytes / FRAME_BYTES);
        let mut peer = Peer::start(&file, bytes)?;
        peer.ask("read")?;
        let process = Process::open(peer.pid())?;
        let target = Target::new(process, peer.address, file.as_fd().try_clone_to_owned()?, bytes)?;
        let rig = Rig { file, peer, frames: target.frames(), target };
        // This also puts all pages into this process's page table.
        ensure!(peer::check(rig.mapping()?, &vec![0; rig.frames.len()]) == 0, "wrong bytes");
        Ok(rig)
    }

    pub fn node(&self, number: u32, mover: Mover) -> Node {
        self.target.node(number, mover)
    }

    pub fn ram(&self) -> &Ram {
        &self.target.ram
    }

    pub fn mapping(&self) -> anyhow::Result<&Mapping> {
        Ok(&self.ram().files().first().context("its file")?.mapping)
    }

    /// The node of each page, by this process's page table.
    pub fn nodes(&self) -> anyhow::Result<Vec<i32>> {
        let own = Process::open(std::process::id() as i32)?;
        locate(&own, self.mapping()?.address(), &self.frames)
    }

    /// The node of each page, by the other process's page table.
    pub fn nodes_of_peer(&self) -> anyhow::Result<Vec<i32>> {
        self.target.nodes()
    }
}

fn locate(process: &Process, start: Hva, frames: &[Gfn]) -> anyhow::Result<Vec<i32>> {
    let pages: Vec<Hva> = frames.iter().map(|gfn| Hva(start.0 + gfn.gpa().0)).collect();
    let mut nodes = vec![i32::MIN; pages.len()];
    numa::locate(process, &pages, &mut nodes)?;
    Ok(nodes)
}
