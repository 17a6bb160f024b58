//! What a daemon must know to take up a VM that another one held: `vm.json`.
//! Format: `docs/run-directory.md`.

use std::path::{Path, PathBuf};
use std::{fs, io};

use ebb_api::{
    Accelerator, Backing, Confinement, DiskRequest, Mode, OnViolation, SizeMechanism, VmName,
};
use ebb_units::{Gpa, Hva};
use ebb_vm::Region;
use ebb_vm::layout::KnownRegion;
use serde::{Deserialize, Serialize};

use super::BYTES_MAX;
use super::looking::Looking;
use super::served::{GrowthRecord, ImageRecord};
use super::share::Share;
use super::swap_rule::{SwapQuota, WhenFull};
use super::tiers::Tiers;
use crate::support::life::{Identity, Life};
use crate::support::state_file;

const FILE: &str = "vm.json";

/// One VM on record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Its name.
    pub name: VmName,
    /// The VMM's process number, and when it started: together its identity.
    pub pid: i32,
    /// Clock ticks since boot.
    pub start_ticks: u64,
    /// The boot that it started in; empty: a daemon before this one did not write it down.
    #[serde(default)]
    pub boot: String,
    /// The userfaultfd's number in the VMM; none while it is being made.
    pub userfaultfd: Option<i32>,
    /// The number of one in the VMM that may be closed there at any moment: the VM is all but let
    /// go of. All of its memory is back then, and none of it is watched.
    #[serde(default)]
    pub leaving: Option<i32>,
    /// Whether Ebb started the VMM.
    pub started: bool,
    /// Ebb started the VMM, let it go and holds it again: its console is Ebb's.
    #[serde(default)]
    pub console: bool,
    /// Where its logs are, if not in its directory.
    #[serde(default)]
    pub logs: Option<PathBuf>,
    /// What the VMM is and may do, where Ebb started it.
    #[serde(default)]
    pub confinement: Option<Confinement>,
    /// Its QMP socket.
    pub qmp: PathBuf,
    /// What runs it.
    pub accelerator: Accelerator,
    /// Why.
    pub accelerator_reason: String,
    /// What its RAM is made of.
    pub backing: Backing,
    /// Why.
    pub backing_reason: String,
    /// The mode.
    pub mode: Mode,
    /// Why.
    pub mode_reason: String,
    /// The smallest blocks to take.
    pub min_order: u8,
    /// The guest is yet to go on: QEMU waits before its first instruction, or until memory is back
    /// for a device that was plugged in.
    pub begin: bool,
    /// The VMM was told to have no huge pages in its RAM.
    #[serde(default)]
    pub small_pages: bool,
    /// Frames in use were evicted: first touches must come to Ebb.
    pub evicts: bool,
    /// The guest's allocator is shared: first touches must come to Ebb.
    #[serde(default)]
    pub shares: bool,
    /// The size that it is to have, by whatever; none: no other than it has.
    #[serde(default)]
    pub size: Option<SizeRecord>,
    /// What the guest is to have of its memory, by the allocator that it shares; none: all of
    /// it.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// What happens when it touches more.
    #[serde(default)]
    pub on_violation: OnViolation,
    /// Automatic reclaim.
    pub auto: Auto,
    /// What its resident memory is held at; none: no limit.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// The limit's low mark, where one was asked for.
    #[serde(default)]
    pub low_bytes: Option<u64>,
    /// Its high mark, where one was asked for.
    #[serde(default)]
    pub high_bytes: Option<u64>,
    /// Its share of the pool, which then says what the limit is.
    #[serde(default)]
    pub share: Option<Share>,
    /// Its disks that Ebb serves.
    #[serde(default)]
    pub disks: Vec<DiskRequest>,
    /// Which images these are. A record of an older daemon has none.
    #[serde(default)]
    pub images: Vec<ImageRecord>,
    /// Its virtio-mem devices that Ebb serves, by NUMA node.
    #[serde(default)]
    pub growth: Vec<GrowthRecord>,
    /// Its processors, where Ebb started it.
    #[serde(default)]
    pub cpus: u32,
    /// Those disks were used by the guest: their rings are in its memory.
    #[serde(default)]
    pub disks_used: bool,
    /// Its swap file.
    pub swap: PathBuf,
    /// Its tiers, where it was started with some.
    #[serde(default)]
    pub tiers: Option<Tiers>,
    /// What the daemon was told when it started.
    #[serde(flatten)]
    pub settings: Settings,
    /// Its RAM.
    pub regions: Vec<RegionRecord>,
    /// Totals that outlive a daemon.
    pub totals: Totals,
    /// The digest of the note of the kernel that what is taken was taken from; none: nothing is.
    #[serde(default)]
    pub kernel: Option<u64>,
    /// Whose the digests beside it are; 0: of a daemon that made none.
    #[serde(default)]
    pub digests: u64,
}

/// A size asked for.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SizeRecord {
    /// The VM's size, or the node's.
    pub bytes: u64,
    /// The NUMA node.
    pub node: Option<u32>,
    /// By this alone.
    pub by: Option<SizeMechanism>,
}

/// What holds for all VMs of a daemon, until the next one starts.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// What a VM's compressed pages may take in memory at most; 0: there are none.
    #[serde(default)]
    pub compressed_bytes: u64,
    /// What the guest has freed since it was evicted is read back for all that.
    #[serde(default)]
    pub read_freed: bool,
    /// How it is looked at for what it uses.
    #[serde(default)]
    pub looking: Looking,
    /// Bytes a second that move between nodes at most; 0: any number.
    #[serde(default)]
    pub move_rate: u64,
    /// What becomes of it at its limit once its swap file can take no more.
    #[serde(default)]
    pub when_swap_is_full: WhenFull,
    /// What swap files may take.
    #[serde(default)]
    pub swap_quota: SwapQuota,
}

/// Automatic reclaim.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Auto {
    /// Whether it runs.
    pub on: bool,
    /// How often.
    pub interval_ms: u64,
    /// Free memory to leave beside the reserve.
    pub keep_bytes: u64,
}

impl Default for Auto {
    fn default() -> Auto {
        Auto { on: false, interval_ms: 5000, keep_bytes: 0 }
    }
}

/// Counted over all daemons that held the VM.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Totals {
    /// Memory that was not resident when the VM was first held.
    pub absent_at_hold_bytes: u64,
    /// Emptied.
    pub reclaimed_bytes: u64,
    /// Not counted, and always 0: earlier versions of the daemon read no record without it.
    #[serde(default)]
    pub returned_bytes: u64,
}

/// A region of RAM, its file named by inode.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RegionRecord {
    /// Guest-physical address.
    pub gpa: u64,
    /// Length.
    pub bytes: u64,
    /// Address in the VMM.
    pub hva: u64,
    /// The memfd's inode number.
    pub inode: u64,
    /// Offset in it.
    pub offset: u64,
    /// The VMM has unplugged it, and has that memfd no more.
    #[serde(default)]
    pub gone: bool,
}

impl RegionRecord {
    /// A region for the record.
    pub fn new(region: &Region, inode: u64) -> RegionRecord {
        RegionRecord {
            gpa: region.gpa.0,
            bytes: region.bytes,
            hva: region.hva.0,
            inode,
            offset: region.offset,
            gone: false,
        }
    }

    /// The region, as it is reopened.
    pub fn known(&self) -> KnownRegion {
        let (gpa, hva) = (Gpa(self.gpa), Hva(self.hva));
        let region = Region { gpa, bytes: self.bytes, hva, file: 0, offset: self.offset };
        KnownRegion { region, inode: self.inode, is_gone: self.gone }
    }
}

impl Record {
    /// Writes it into the VM's directory, whole or not at all.
    ///
    /// # Errors
    /// As `state_file::save`.
    pub fn save(&self, directory: &Path) -> io::Result<()> {
        state_file::save(&directory.join(FILE), self)
    }

    /// Changes it, and writes it into the VM's directory; where that fails nothing has changed.
    ///
    /// # Errors
    /// As `state_file::save`.
    pub fn change(&mut self, directory: &Path, change: impl FnOnce(&mut Record)) -> io::Result<()> {
        let mut next = self.clone();
        change(&mut next);
        next.save(directory)?;
        *self = next;
        Ok(())
    }

    /// Whether its VMM runs: the same process, not one that got its number.
    pub fn life(&self) -> Life {
        let (pid, start_ticks) = (self.pid, self.start_ticks);
        Life::of(Identity { pid, start_ticks, boot: &self.boot })
    }

    /// Whether its console is Ebb's.
    pub fn has_console(&self) -> bool {
        self.started || self.console
    }

    /// All of its RAM, what can be plugged included, without what is gone.
    pub fn memory_bytes(&self) -> u64 {
        self.regions.iter().filter(|region| !region.gone).map(|region| region.bytes).sum()
    }

    /// What of its RAM the VMM has unplugged.
    pub fn unplugged_bytes(&self) -> u64 {
        self.regions.iter().filter(|region| region.gone).map(|region| region.bytes).sum()
    }

    /// What its compressed pages may take in memory: by its tiers, else by the daemon's
    /// settings.
    pub fn compressed_bytes(&self) -> u64 {
        let own = self.tiers.as_ref().map(|tiers| tiers.compressed_bytes);
        own.unwrap_or(self.settings.compressed_bytes)
    }

    /// Reads it; none: the VM was never held, or was let go.
    ///
    /// # Errors
    /// As read(2); `InvalidData`: not a record, or one of no VM that can be.
    pub fn load(directory: &Path) -> io::Result<Option<Record>> {
        let found = state_file::load::<Record>(&directory.join(FILE))?;
        match found.as_ref().is_none_or(Record::adds_up) {
            true => Ok(found),
            false => Err(io::Error::new(io::ErrorKind::InvalidData, "its sizes make no sense")),
        }
    }

    /// Whether any VM is on record in this run directory, be it one that cannot be read.
    pub fn is_any_in(run_dir: &Path) -> bool {
        let vms = fs::read_dir(run_dir.join("vms")).into_iter().flatten().flatten();
        vms.into_iter().any(|entry| entry.path().join(FILE).exists())
    }

    /// Whether what is computed from it is never more than a number holds.
    fn adds_up(&self) -> bool {
        let ends = |region: &RegionRecord| {
            let starts = [region.gpa, region.hva, region.offset];
            starts.iter().all(|start| start.checked_add(region.bytes).is_some())
        };
        let total =
            { self.regions.iter() }.try_fold(0u64, |total, region| total.checked_add(region.bytes));
        total.is_some_and(|bytes| bytes <= BYTES_MAX)
            && self.regions.iter().all(ends)
            && self.share.is_none_or(Share::adds_up)
    }

    /// Removes it from the VM's directory, where there is one.
    ///
    /// # Errors
    /// As unlink(2).
    pub fn remove(directory: &Path) -> io::Result<()> {
        state_file::remove(&directory.join(FILE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_written_has_not_changed() {
        let text = include_str!("../../../../fuzz/corpus/vm_json/whole");
        let mut record: Record = serde_json::from_str(text).expect("a record");
        let home = tempfile::tempdir().expect("a directory");
        let before = record.auto.on;
        let change = |record: &mut Record| record.auto.on = !before;
        assert!(record.change(&home.path().join("nowhere"), change).is_err());
        assert_eq!(record.auto.on, before);
        record.change(home.path(), change).expect("room for it");
        let kept = Record::load(home.path()).expect("a record").expect("it is there");
        assert_eq!((record.auto.on, kept.auto.on), (!before, !before));
    }

    #[test]
    fn a_total_that_nobody_counts_need_not_be_there() {
        let text = r#"{"absent_at_hold_bytes": 1, "reclaimed_bytes": 2}"#;
        let totals: Totals = serde_json::from_str(text).expect("totals");
        assert_eq!((totals.reclaimed_bytes, totals.returned_bytes), (2, 0));
        // What an earlier daemon asks for is written.
        let text = serde_json::to_string(&totals).expect("text");
        assert!(text.contains("\"returned_bytes\":0"), "{text}");
    }

    /// As a daemon wrote it that knew of no regions that leave.
    #[test]
    fn a_region_of_an_older_record_is_there() {
        let text = r#"{"gpa":4294967296,"bytes":4096,"hva":8192,"inode":7,"offset":0}"#;
        let region: RegionRecord = serde_json::from_str(text).expect("a region");
        let known = region.known();
        assert!(!region.gone && !known.is_gone);
        assert_eq!((known.region.gpa, known.region.hva, known.inode), (Gpa(1 << 32), Hva(8192), 7));
        let gone = RegionRecord { gone: true, ..region };
        let text = serde_json::to_string(&gone).expect("text");
        let again: RegionRecord = serde_json::from_str(&text).expect("a region");
        assert!(again.known().is_gone);
    }
}
