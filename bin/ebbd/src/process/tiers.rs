//! A VM's tiers, as `ebb run --tier` asks for them: the host's memory up to a limit with a file
//! behind it, NUMA nodes, or both.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use ebb_api::{Backing, RunRequest};
use ebb_reclaim::limit::marks::{Marks, floor_bytes};
use ebb_tier::{Ladder, host};
use ebb_units::{Bytes, FRAME_BYTES};
use ebb_vm::reach::MemoryUser;

use crate::model::api_error::{Answer, not_allowed};
use crate::model::tiers::{Tiers, has_nodes};
use crate::vm::context::reaching::may_evict_beside;

/// Resolves the tiers of a request, and sets the VM's memory to their sum if it has no size.
///
/// # Errors
/// They make no sense, this host does not have them, or the VM cannot use them.
pub fn resolve(request: &mut RunRequest) -> Answer<Option<Tiers>> {
    let Some(text) = &request.tier else { return Ok(None) };
    let ladder: Ladder = text.parse().map_err(not_allowed)?;
    let memory_bytes = match request.memory_bytes {
        0 => ladder.bytes(),
        bytes => bytes,
    };
    let ladder = ladder.fit(memory_bytes).map_err(not_allowed)?;
    host::check(&ladder).map_err(not_allowed)?;
    request.memory_bytes = memory_bytes;
    request.check()?;
    let tiers = of(&ladder, memory_bytes)?;
    if has_nodes(&ladder) {
        // Hot memory is found more precisely with small pages.
        request.backing = match request.backing {
            Backing::Auto => Backing::Small,
            backing => backing,
        };
    }
    if let (Some(disk), Some(_)) = (request.strict_disk(), &tiers.file) {
        return Err(not_allowed(format!(
            "its disk {} has dma=strict: such a device cannot wait for memory to come back from \
             another tier",
            disk.path.display()
        )));
    }
    Ok(Some(tiers))
}

fn of(ladder: &Ladder, memory_bytes: u64) -> Answer<Tiers> {
    if ladder.rungs().len() < 2 {
        let more = if has_nodes(ladder) { " or another node" } else { "" };
        return Err(not_allowed(format!("one tier is none: add file=PATH:SIZE{more}")));
    }
    let file = ladder.file().map(|(path, _)| path.to_owned());
    let resident_bytes = ladder.addressable_bytes();
    let floor = floor_bytes(memory_bytes);
    if resident_bytes < floor {
        return Err(not_allowed(format!(
            "{} in memory is below what keeps this guest alive: give {} or more",
            Bytes(resident_bytes),
            Bytes(floor)
        )));
    }
    let limit_bytes = file.is_some().then_some(resident_bytes);
    // Room for all memory that is not resident at the limit's low mark.
    let low_bytes = limit_bytes.map_or(0, |limit| Marks::new(limit, None, None).low_bytes);
    Ok(Tiers {
        ladder: ladder.to_string(),
        fast_bytes: ladder.rungs().first().map_or(0, |rung| rung.bytes),
        limit_bytes,
        compressed_bytes: ladder.compressed_bytes(),
        file,
        slots: memory_bytes.saturating_sub(low_bytes).div_ceil(FRAME_BYTES),
    })
}

/// A file that was made for a VM that is being started; removed unless kept.
pub struct Claimed(Option<PathBuf>);

impl Claimed {
    /// Makes the file of these tiers. Makes none for a block device, which exists.
    ///
    /// # Errors
    /// The file cannot be made, or somebody else has made it meanwhile.
    pub fn file_of(tiers: Option<&Tiers>) -> Answer<Claimed> {
        use std::os::unix::fs::OpenOptionsExt;
        let Some(path) = tiers.and_then(|tiers| tiers.file.as_ref()) else {
            return Ok(Claimed(None));
        };
        // Making the file fails if it exists by now: then it is somebody else's.
        if path.metadata().is_ok_and(|found| !found.is_file()) {
            return Ok(Claimed(None));
        }
        let made = File::options().write(true).create_new(true).mode(0o600).open(path);
        made.map_err(|error| not_allowed(format!("{}: {error}", path.display())))?;
        Ok(Claimed(Some(path.clone())))
    }

    /// Path of the file, if one was made.
    pub fn path(&self) -> Option<&Path> {
        self.0.as_deref()
    }

    /// Keeps the file: it belongs to the VM from now on.
    pub fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if let Some(path) = self.0.take()
            && let Err(error) = fs::remove_file(&path)
        {
            tracing::error!("{}: {error}", path.display());
        }
    }
}

/// Checks whether a VM that is about to be attached can use its tiers.
///
/// # Errors
/// It cannot, and why.
pub fn check(tiers: &Tiers, backing: Backing, devices: &[MemoryUser]) -> Answer<()> {
    if backing == Backing::Hugetlb {
        return Err(not_allowed(
            "hugetlb pages stay where they are: give --backing thp or small with --tier",
        ));
    }
    if tiers.file.is_none() {
        return Ok(());
    }
    may_evict_beside(devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(tier: &str, memory_bytes: u64) -> Result<(u64, Tiers), String> {
        resolved_in(Backing::Auto, tier, memory_bytes)
    }

    fn resolved_in(
        backing: Backing,
        tier: &str,
        memory_bytes: u64,
    ) -> Result<(u64, Tiers), String> {
        let json = serde_json::json!({
            "name": "a", "kernel": "/k", "memory_bytes": memory_bytes, "tier": tier
        });
        let mut request: RunRequest = serde_json::from_value(json).unwrap();
        request.backing = backing;
        let tiers = resolve(&mut request).map_err(|error| error.to_string())?;
        let is_node = tier.starts_with("node");
        let chosen = if is_node && backing == Backing::Auto { Backing::Small } else { backing };
        assert_eq!(request.backing, chosen);
        Ok((request.memory_bytes, tiers.unwrap()))
    }

    #[test]
    fn a_vm_has_what_its_tiers_hold() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("swap");
        let (memory_bytes, tiers) =
            resolved(&format!("dram=128M,file={}:384M", file.display()), 0).unwrap();
        assert_eq!((memory_bytes, tiers.fast_bytes), (512 << 20, 128 << 20));
        assert_eq!((tiers.limit_bytes, tiers.file), (Some(128 << 20), Some(file.clone())));
        assert!(tiers.slots * FRAME_BYTES >= 384 << 20);
        let node = host::nodes().unwrap().remove(0).number;
        let (_, tiers) =
            resolved(&format!("node{node}=128M,file={}:384M", file.display()), 0).unwrap();
        assert_eq!((tiers.fast_bytes, tiers.limit_bytes), (128 << 20, Some(128 << 20)));
        let nodes = format!("node{node}=128M,file={}:384M", file.display());
        assert!(resolved_in(Backing::Thp, &nodes, 0).is_ok());
        let compressed = format!("compressed=32M,file={}:384M", file.display());
        let (_, tiers) = resolved(&compressed, 512 << 20).unwrap();
        assert_eq!((tiers.fast_bytes, tiers.compressed_bytes), (128 << 20, 32 << 20));
    }

    #[test]
    fn tiers_that_cannot_be_are_refused() {
        for (tier, memory_bytes, why) in [
            ("dram=128M,file=/tmp/none:384M", 1 << 30, "must be the same"),
            ("dram=32M,file=/tmp/none:480M", 0, "keeps this guest alive"),
            ("dram=512M", 0, "add file=PATH:SIZE"),
            ("node0=512M", 0, "or another node"),
            ("node0=256M,node77=256M", 0, "no such node"),
            ("dram=128M,file=/no/such/none:384M", 0, "make /no/such first"),
            ("dram=16M,file=/tmp/none:16M", 0, "out of range"),
            ("tape=16M", 0, "is no tier"),
        ] {
            let said = resolved(tier, memory_bytes).unwrap_err();
            assert!(said.contains(why) && !said.contains('\n'), "{tier}: {said}");
        }
    }
}
