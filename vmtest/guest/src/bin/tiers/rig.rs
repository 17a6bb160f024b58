//! A file of memory in two processes, and the nodes as tiers.

use std::fs;
use std::sync::Arc;

use anyhow::{Context, ensure};
use ebb_sys::mapping::Mapping;
use ebb_sys::numa;
use ebb_sys::process::Process;
use ebb_sys::ram_file::RamFile;
use ebb_tier::{Mover, Node};
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa, Hva};
use ebb_vm::ram::Backing;
use ebb_vm::{Ram, Region};

use crate::peer::{self, Peer};

/// By this the kernel moves pages on its own, and lets who touches them fault for it.
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
/// The node with the processors.
pub const FAST: u32 = 0;
/// The one without.
pub const SLOW: u32 = 1;

pub struct Rig {
    pub peer: Peer,
    pub frames: Vec<Gfn>,
    ram: Arc<Ram>,
    process: Arc<Process>,
}

impl Rig {
    /// Every page is filled, and mapped by both processes.
    pub fn new(bytes: u64) -> anyhow::Result<Rig> {
        if fs::exists(BALANCING)? {
            fs::write(BALANCING, "0").context(BALANCING)?;
        }
        let nodes = ebb_tier::host::nodes()?;
        let found: Vec<_> = nodes.iter().map(|node| (node.number, node.has_cpus)).collect();
        ensure!(found == [(FAST, true), (SLOW, false)], "the nodes are {nodes:?}");
        let file = RamFile::create("tiers", bytes)?;
        let mapping = Mapping::new(&file, 0, bytes)?;
        let frames: Vec<Gfn> = FrameRange::new(Gfn(0), bytes / FRAME_BYTES).frames().collect();
        peer::fill(&mapping, frames.len() as u64);
        let mut peer = Peer::start(&file, bytes)?;
        peer.ask("read")?;
        let region = Region { gpa: Gpa(0), bytes, hva: peer.address, file: 0, offset: 0 };
        let ram = Arc::new(Ram::new(vec![region], vec![Backing { file, mapping }])?);
        let process = Arc::new(Process::open(peer.pid())?);
        Ok(Rig { peer, frames, ram, process })
    }

    pub fn node(&self, number: u32, mover: Mover) -> Node {
        let (process, ram) = (Arc::clone(&self.process), Arc::clone(&self.ram));
        Node::new(number, process, ram, Arc::new(mover))
    }

    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    pub fn mapping(&self) -> anyhow::Result<&Mapping> {
        Ok(&self.ram.files().first().context("its file")?.mapping)
    }

    /// On which node each page is, by this process's own page table.
    pub fn nodes(&self) -> anyhow::Result<Vec<i32>> {
        self.nodes_for(std::process::id() as i32, self.mapping()?.address())
    }

    /// The same by the other process's.
    pub fn nodes_of_peer(&self) -> anyhow::Result<Vec<i32>> {
        self.nodes_for(self.peer.pid(), self.peer.address)
    }

    fn nodes_for(&self, pid: i32, start: Hva) -> anyhow::Result<Vec<i32>> {
        let pages: Vec<Hva> = self.frames.iter().map(|gfn| Hva(start.0 + gfn.gpa().0)).collect();
        let mut nodes = vec![i32::MIN; pages.len()];
        numa::locate(&Process::open(pid)?, &pages, &mut nodes)?;
        Ok(nodes)
    }
}
