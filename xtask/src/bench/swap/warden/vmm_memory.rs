//! Where a VMM's memory is, as the kernel lists it.

use std::fs;
use std::num::ParseIntError;

use anyhow::{Context, ensure};

/// Most attempts to read the mappings, if they change meanwhile.
const LOOKS: usize = 5;

/// A guest of a VMM.
#[derive(Clone, Copy)]
pub struct Guest {
    pub pid: i32,
    /// Memory that the guest believes to have: the size of one mapping of the VMM.
    pub memory_bytes: u64,
}

/// Returns where a VMM's memory is.
///
/// # Errors
/// A file operation fails, or the guest's memory is not found.
pub fn parts(guest: Guest) -> anyhow::Result<Parts> {
    let look = || {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", guest.pid))?;
        Parts::of(&smaps, guest.memory_bytes)
    };
    // The kernel returns the list in pieces: a mapping that is split meanwhile is seen twice, or
    // not at all.
    (1..LOOKS).find_map(|_| look().ok()).map_or_else(look, Ok)
}

/// Bytes of a VMM's memory.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Parts {
    /// Resident memory of the guest, without what is pooled.
    pub guest: u64,
    /// Anonymous and resident memory outside the guest's. Programs and libraries are charged to the
    /// process that read them first.
    pub own: u64,
    /// The locked part of `own`.
    pub own_locked: u64,
    /// Memory outside the guest's that is swapped out.
    pub own_swapped: u64,
    /// Locked memory of the guest.
    pub guest_locked: u64,
}

/// Parses a size like `  12 kB` into bytes.
fn bytes(value: &str) -> Result<u64, ParseIntError> {
    value.trim().trim_end_matches(" kB").parse::<u64>().map(|kib| kib << 10)
}

impl Parts {
    /// Finds the guest's memory: the only file of this size, or else the only anonymous mapping of
    /// this size. A file may have several mappings, one behind the other.
    fn of(smaps: &str, memory_bytes: u64) -> anyhow::Result<Parts> {
        let mappings = mappings(smaps)?;
        let size_of = |inode: u64| -> u64 {
            mappings.iter().filter(|other| other.inode == inode).map(|other| other.size).sum()
        };
        let is_guests = |mapping: &&Mapping| match mapping.inode {
            0 => mapping.size == memory_bytes,
            inode => size_of(inode) == memory_bytes,
        };
        let (guests, others): (Vec<_>, Vec<_>) = mappings.iter().partition(is_guests);
        let sizes: u64 = guests.iter().map(|mapping| mapping.size).sum();
        ensure!(
            sizes == memory_bytes,
            "{} mappings of QEMU look like its guest's memory, and have {} MiB",
            guests.len(),
            sizes >> 20
        );
        let locked = |mapping: &&&Mapping| mapping.is_locked;
        Ok(Parts {
            guest: guests.iter().map(|mapping| mapping.resident).sum(),
            own: others.iter().map(|mapping| mapping.anonymous).sum(),
            own_locked: others.iter().filter(locked).map(|mapping| mapping.anonymous).sum(),
            own_swapped: others.iter().map(|mapping| mapping.swapped).sum(),
            guest_locked: guests.iter().filter(locked).map(|mapping| mapping.resident).sum(),
        })
    }
}

/// A mapping of a process. Sizes are in bytes.
#[derive(Default)]
struct Mapping {
    /// Inode of the mapping's file, or 0 without a file.
    inode: u64,
    size: u64,
    resident: u64,
    anonymous: u64,
    swapped: u64,
    is_locked: bool,
}

/// Parses smaps: each mapping has a line with addresses, and then lines with sizes.
fn mappings(smaps: &str) -> anyhow::Result<Vec<Mapping>> {
    let mut all: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        if words.next().is_some_and(|word| !word.ends_with(':')) {
            let inode = words.nth(3).context("a mapping without a file")?.parse()?;
            all.push(Mapping { inode, ..Mapping::default() });
        }
        let (Some(mapping), Some((name, value))) = (all.last_mut(), line.split_once(':')) else {
            continue;
        };
        match name {
            "Size" => mapping.size = bytes(value)?,
            "Rss" => mapping.resident = bytes(value)?,
            "Anonymous" => mapping.anonymous = bytes(value)?,
            "Swap" => mapping.swapped = bytes(value)?,
            "VmFlags" => mapping.is_locked = value.split_whitespace().any(|flag| flag == "lo"),
            _ => {}
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_memory_is_separated_from_its_vmms() {
        let smaps = "7f00-7f01 r-xp 0 00:01 7    /usr/bin/qemu\n\
            Size:   4 kB\nKernelPageSize:   4 kB\nRss:   4 kB\nAnonymous: 0 kB\n\
            7f10-7f11 rw-p 0 00:00 0\nSize: 2048 kB\nRss: 512 kB\nAnonymous: 512 kB\n\
            7f20-7f21 rw-p 0 00:00 0\nSize: 64 kB\nRss: 16 kB\nAnonymous: 12 kB\nSwap: 8 kB\n\
            VmFlags: rd wr mr mw me lo ac\n";
        let parts = Parts {
            guest: 512 << 10,
            own: 12 << 10,
            own_locked: 12 << 10,
            own_swapped: 8 << 10,
            guest_locked: 0,
        };
        assert_eq!(Parts::of(smaps, 2 << 20).unwrap(), parts);
        assert!(Parts::of(smaps, 4 << 20).is_err());
        // Userfaultfd and madvise(2) split one mapping into several.
        let half = "rw-s 0 00:01 9 /memfd:ram (deleted)\nSize: 4096 kB\nRss: 100 kB\n";
        let file = format!("{smaps}7f30-7f31 {half}7f31-7f32 {half}");
        assert_eq!(Parts::of(&file, 8 << 20).unwrap().guest, 200 << 10);
        let two = smaps.repeat(2);
        assert!(Parts::of(&two, 2 << 20).is_err());
    }
}
