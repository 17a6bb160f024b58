//! Checks that a host has the tiers of a ladder.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use ebb_units::Bytes;

use crate::ladder::{Ladder, TierKind};

/// Where Linux lists its NUMA nodes.
const NODES: &str = "/sys/devices/system/node";

/// A NUMA node with memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeMemory {
    /// Its number.
    pub number: u32,
    /// All its memory.
    pub total_bytes: u64,
    /// Its free memory.
    pub free_bytes: u64,
    /// Whether it has processors.
    pub has_cpus: bool,
}

/// Why this host does not have a tier.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// There is no such node, or it has no memory.
    #[error("node{node}: this host has no such node with memory; it has {there}")]
    NoNode {
        /// The node asked for.
        node: u32,
        /// The names of the nodes with memory.
        there: String,
    },
    /// The tier is larger than the host's memory there.
    #[error("{tier}: {} is more than the {} that this host has there", Bytes(*bytes), Bytes(*has_bytes))]
    TooLarge {
        /// The tier.
        tier: TierKind,
        /// The size asked for.
        bytes: u64,
        /// The size that the host has.
        has_bytes: u64,
    },
    /// The file cannot be used.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: String,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// The list of nodes cannot be read.
    #[error("{NODES}: {0}")]
    Nodes(#[source] io::Error),
}

/// The nodes of this host that have memory, in order. A host without NUMA has node 0.
///
/// # Errors
/// From reading `/sys/devices/system/node`.
pub fn nodes() -> io::Result<Vec<NodeMemory>> {
    match nodes_in(Path::new(NODES)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(vec![only_node()?]),
        nodes => nodes,
    }
}

/// The memory of a host whose kernel knows no nodes.
fn only_node() -> io::Result<NodeMemory> {
    let table = fs::read_to_string("/proc/meminfo")?;
    let (total_bytes, free_bytes) = (meminfo(&table, "MemTotal:"), meminfo(&table, "MemFree:"));
    Ok(NodeMemory { number: 0, total_bytes, free_bytes, has_cpus: true })
}

fn nodes_in(directory: &Path) -> io::Result<Vec<NodeMemory>> {
    let mut nodes = Vec::new();
    for entry in fs::read_dir(directory)? {
        let (name, path) = entry.map(|entry| (entry.file_name(), entry.path()))?;
        let number = name.to_str().and_then(|name| name.strip_prefix("node")?.parse().ok());
        let Some(number) = number else { continue };
        let table = fs::read_to_string(path.join("meminfo"))?;
        let cpus = fs::read_to_string(path.join("cpulist")).unwrap_or_default();
        let total_bytes = meminfo(&table, "MemTotal:");
        let (free_bytes, has_cpus) = (meminfo(&table, "MemFree:"), !cpus.trim().is_empty());
        nodes.push(NodeMemory { number, total_bytes, free_bytes, has_cpus });
    }
    nodes.retain(|node| node.total_bytes > 0);
    nodes.sort_unstable_by_key(|node| node.number);
    Ok(nodes)
}

/// The bytes on a line such as `Node 0 MemFree:         13172 kB`.
fn meminfo(table: &str, key: &str) -> u64 {
    let line = table.lines().find_map(|line| Some(line.split_once(key)?.1));
    let number = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0).saturating_mul(1 << 10)
}

/// Checks that this host has the tiers of a ladder, and that they are large enough.
///
/// # Errors
/// For the first tier that it does not have.
pub fn check(ladder: &Ladder) -> Result<(), HostError> {
    let nodes = nodes().map_err(HostError::Nodes)?;
    ladder.rungs().iter().try_for_each(|rung| match &rung.kind {
        TierKind::Node(number) => has_node(&nodes, *number, rung.bytes),
        TierKind::Dram | TierKind::Compressed => {
            let has_bytes = nodes.iter().map(|node| node.total_bytes).sum();
            enough(rung.kind.clone(), rung.bytes, has_bytes)
        }
        TierKind::File(path) => has_file(path, rung.bytes),
    })
}

fn has_node(nodes: &[NodeMemory], number: u32, bytes: u64) -> Result<(), HostError> {
    let found = nodes.iter().find(|node| node.number == number);
    let found = found.ok_or_else(|| {
        let names: Vec<String> = nodes.iter().map(|node| format!("node{}", node.number)).collect();
        HostError::NoNode { node: number, there: names.join(", ") }
    })?;
    enough(TierKind::Node(number), bytes, found.total_bytes)
}

fn enough(tier: TierKind, bytes: u64, has_bytes: u64) -> Result<(), HostError> {
    match bytes <= has_bytes {
        true => Ok(()),
        false => Err(HostError::TooLarge { tier, bytes, has_bytes }),
    }
}

/// Checks that a new file has a directory with room for it, or that a block device is large enough.
fn has_file(path: &Path, bytes: u64) -> Result<(), HostError> {
    let wrong = |why: String| HostError::File { path: path.display().to_string(), why };
    let directory: PathBuf = path.parent().unwrap_or(path).into();
    match fs::metadata(path) {
        Ok(found) if found.file_type().is_block_device() => {
            let device = File::open(path).map_err(|error| wrong(error.to_string()))?;
            is_large_enough(device, bytes, wrong)
        }
        Ok(found) if !found.is_file() => {
            Err(wrong("this is no file: name a file or a block device".into()))
        }
        Ok(_) => Err(wrong("exists already: name a new file, which is removed with its VM".into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => has_room(&directory, bytes, wrong),
        Err(error) => Err(wrong(error.to_string())),
    }
}

fn is_large_enough(
    mut device: impl Seek,
    bytes: u64,
    wrong: impl Fn(String) -> HostError,
) -> Result<(), HostError> {
    let device_bytes = device.seek(SeekFrom::End(0)).map_err(|error| wrong(error.to_string()))?;
    match bytes <= device_bytes {
        true => Ok(()),
        false => Err(wrong(format!(
            "{} do not fit: this device has {}",
            Bytes(bytes),
            Bytes(device_bytes)
        ))),
    }
}

fn has_room(
    directory: &Path,
    bytes: u64,
    wrong: impl Fn(String) -> HostError,
) -> Result<(), HostError> {
    let found = rustix::fs::statvfs(directory).map_err(|error| {
        wrong(format!("its directory cannot be used ({error}): make {} first", directory.display()))
    })?;
    let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
    match bytes <= free_bytes {
        true => Ok(()),
        false => Err(wrong(format!(
            "{} do not fit: {} has {} free",
            Bytes(bytes),
            directory.display(),
            Bytes(free_bytes)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(ladder: &str) -> String {
        let error = check(&ladder.parse().unwrap()).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        error
    }

    #[test]
    fn nodes_with_memory_are_listed() {
        assert!(only_node().unwrap().total_bytes > 1 << 20);
        let directory = tempfile::tempdir().unwrap();
        for (name, meminfo, cpus) in [
            ("node1", "Node 1 MemTotal: 2048 kB\nNode 1 MemFree: 1024 kB\n", "\n"),
            ("node0", "Node 0 MemTotal:    4096 kB\nNode 0 MemFree: 4 kB\n", "0-1\n"),
            ("node2", "Node 2 MemTotal: 0 kB\n", "2\n"),
        ] {
            let node = directory.path().join(name);
            fs::create_dir(&node).unwrap();
            fs::write(node.join("meminfo"), meminfo).unwrap();
            fs::write(node.join("cpulist"), cpus).unwrap();
        }
        fs::write(directory.path().join("possible"), "0-2\n").unwrap();
        let node = |number, total: u64, free: u64, has_cpus| NodeMemory {
            number,
            total_bytes: total << 10,
            free_bytes: free << 10,
            has_cpus,
        };
        let found = nodes_in(directory.path()).unwrap();
        assert_eq!(found, [node(0, 4096, 4, true), node(1, 2048, 1024, false)]);
    }

    #[test]
    fn a_device_must_be_large_enough() {
        let wrong = |why: String| HostError::File { path: "/dev/vdb".into(), why };
        let device = || io::Cursor::new([0_u8; 8192]);
        is_large_enough(device(), 8192, wrong).unwrap();
        let why = is_large_enough(device(), 8193, wrong).unwrap_err().to_string();
        assert!(why.starts_with("/dev/vdb: ") && why.contains("this device has 8 KiB"), "{why}");
    }

    #[test]
    fn tiers_that_this_host_has_not_are_named() {
        assert!(nodes().unwrap().iter().any(|node| node.has_cpus));
        let why = refused("node0=2M,node4711=8M");
        assert!(
            why.contains("node4711: this host has no such node") && why.contains("node0"),
            "{why}"
        );
        let why = refused("dram=1000T");
        assert!(why.contains("dram: 1000 TiB is more than"), "{why}");
        let why = refused("dram=2M,file=/nowhere/at/all:2M");
        assert!(why.contains("make /nowhere/at first"), "{why}");
        let why = refused("dram=2M,file=/tmp:2M");
        assert!(why.contains("/tmp: this is no file"), "{why}");
        let why = refused("dram=2M,file=/tmp/a:9000000T");
        assert!(why.contains("do not fit: /tmp has"), "{why}");
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("swap");
        check(&format!("dram=2M,file={}:2M", file.display()).parse().unwrap()).unwrap();
        assert!(!file.exists());
        fs::write(&file, "mine").unwrap();
        let why = refused(&format!("dram=2M,file={}:2M", file.display()));
        assert!(why.contains("exists already"), "{why}");
    }
}
