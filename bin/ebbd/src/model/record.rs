//! What a daemon must know to recover a VM that another daemon managed: `vm.json`. Format:
//! `docs/run-directory.md`.

use std::path::{Path, PathBuf};
use std::{fs, io};

use ebb_api::{
    Accelerator, Backing, Confinement, DiskRequest, Mode, OnViolation, SizeMechanism, VmName,
};
use ebb_policy::pilot::COMPRESSED_PART;
use ebb_units::{Gpa, Hva};
use ebb_vm::layout::KnownRegion;
use ebb_vm::libvirt::Domain;
use ebb_vm::{Monitor, Region};
use serde::{Deserialize, Serialize};

use super::BYTES_MAX;
use super::auto::Auto;
use super::monitoring::MonitoringSettings;
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
    /// The VM's name.
    pub name: VmName,
    /// The VMM's process number. With the start time and the boot, it identifies the VMM.
    pub pid: i32,
    /// When the VMM started, in clock ticks since boot.
    pub start_ticks: u64,
    /// The boot in which the VMM started; empty: an earlier daemon did not record it.
    #[serde(default)]
    pub boot: String,
    /// The userfaultfd's descriptor number in the VMM; none: it is being made.
    pub userfaultfd: Option<i32>,
    /// Number of a userfaultfd in the VMM that was made for the VM, which is not managed yet.
    #[serde(default)]
    pub making: Option<i32>,
    /// Number of a userfaultfd in the VMM that may be closed there at any moment: the VM is about
    /// to be detached. All of its memory is back then, and none of it is watched.
    #[serde(default)]
    pub leaving: Option<i32>,
    /// Whether Ebb started the VMM.
    pub started: bool,
    /// Whether Ebb started the VMM, detached it and attached it again: its console is Ebb's.
    #[serde(default)]
    pub console: bool,
    /// Where its logs are; none: in its directory.
    #[serde(default)]
    pub logs: Option<PathBuf>,
    /// What the VMM is and may do, if Ebb started it.
    #[serde(default)]
    pub confinement: Option<Confinement>,
    /// The VMM's QMP socket, or that of libvirt.
    pub qmp: PathBuf,
    /// The UUID of libvirt's domain, if libvirt is asked; none: the VMM itself is.
    #[serde(default)]
    pub domain: Option<String>,
    /// What runs the guest.
    pub accelerator: Accelerator,
    /// Why this accelerator.
    pub accelerator_reason: String,
    /// What the VM's RAM is made of.
    pub backing: Backing,
    /// Why this backing.
    pub backing_reason: String,
    /// The mode, release or strict.
    pub mode: Mode,
    /// Why this mode.
    pub mode_reason: String,
    /// Order of the smallest blocks to reclaim.
    pub min_order: u8,
    /// Whether the guest has yet to go on: QEMU waits before its first instruction, or until memory
    /// is back for a device that was plugged in.
    pub begin: bool,
    /// Whether the VMM was told to have no huge pages in its RAM.
    #[serde(default)]
    pub small_pages: bool,
    /// Whether frames in use were evicted: first touches must come to Ebb.
    pub evicts: bool,
    /// Whether the guest's allocator is shared: first touches must come to Ebb.
    #[serde(default)]
    pub shares: bool,
    /// The target; none: the size stays as it is.
    #[serde(default)]
    pub size: Option<SizeRecord>,
    /// How much memory the guest may have by the allocator that it shares; none: all of it.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// What happens at a violation.
    #[serde(default)]
    pub on_violation: OnViolation,
    /// Automatic reclaim.
    pub auto: Auto,
    /// The limit of its resident memory; none: no limit.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// Whether the pilot has set the limit.
    #[serde(default)]
    pub is_piloted: bool,
    /// Most memory of its compressed pages, as the pilot has set it; none: the pilot has set none.
    #[serde(default)]
    pub piloted_compressed_bytes: Option<u64>,
    /// The virtio-mem devices of which the pilot has had the guest unplug memory.
    #[serde(default)]
    pub piloted_devices: Vec<UnpluggedRecord>,
    /// The limit's low mark, if one was asked for.
    #[serde(default)]
    pub low_bytes: Option<u64>,
    /// The limit's high mark, if one was asked for.
    #[serde(default)]
    pub high_bytes: Option<u64>,
    /// Its share of the pool, which then determines the limit.
    #[serde(default)]
    pub share: Option<Share>,
    /// The disks that Ebb serves it.
    #[serde(default)]
    pub disks: Vec<DiskRequest>,
    /// The image of each disk. A record of an older daemon has none.
    #[serde(default)]
    pub images: Vec<ImageRecord>,
    /// The virtio-mem devices that Ebb serves it, by NUMA node.
    #[serde(default)]
    pub growth: Vec<GrowthRecord>,
    /// Number of its processors, if Ebb started it.
    #[serde(default)]
    pub cpus: u32,
    /// Its swap file.
    pub swap: PathBuf,
    /// Its tiers, if it was started with any.
    #[serde(default)]
    pub tiers: Option<Tiers>,
    /// The options that the daemon got at its start.
    #[serde(flatten)]
    pub settings: Settings,
    /// The regions of its RAM.
    pub regions: Vec<RegionRecord>,
    /// Totals that outlive a daemon.
    pub totals: Totals,
    /// Its passed-through devices, if it was started with any.
    #[serde(default)]
    pub passed_through: Option<PassedRecord>,
    /// Digest of the note of the kernel that memory was reclaimed or evicted from; none: there is
    /// no such memory.
    #[serde(default)]
    pub kernel: Option<u64>,
    /// Whose digests are in the file beside it; 0: of a daemon that made none.
    #[serde(default)]
    pub digests: u64,
}

/// Passed-through devices on record.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PassedRecord {
    /// Whether the memory is mapped in pieces, each as the ledger says. If not, it is mapped as QEMU
    /// has mapped it, or partly in pieces: the guest has not begun.
    pub in_pieces: bool,
    /// Number of the container in QEMU.
    pub container: i32,
    /// Numbers of the devices in QEMU.
    pub devices: Vec<i32>,
}

/// A target on record.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SizeRecord {
    /// Size of the VM, or of the node.
    pub bytes: u64,
    /// The NUMA node; none: the whole VM.
    pub node: Option<u32>,
    /// The only mechanism to use; none: any.
    pub by: Option<SizeMechanism>,
}

/// A virtio-mem device of which the pilot has had the guest unplug memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UnpluggedRecord {
    /// Guest-physical address at which its memory begins.
    pub gpa: u64,
    /// What was to be plugged before.
    pub full_bytes: u64,
    /// What is to be plugged.
    pub asked_bytes: u64,
    /// What was to be plugged before the last change. A process may end before it asks for that.
    pub before_bytes: u64,
}

/// What holds for all VMs of a daemon, until the next daemon starts.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// Most memory of a VM's compressed pages, in bytes; 0: there are none.
    #[serde(default)]
    pub compressed_bytes: u64,
    /// Whether to read back also what the guest has freed since it was evicted.
    #[serde(default)]
    pub read_freed: bool,
    /// Settings of monitorings.
    #[serde(default, rename = "looking")]
    pub monitoring: MonitoringSettings,
    /// Most bytes a second that move between nodes; 0: no limit.
    #[serde(default)]
    pub move_rate: u64,
    /// What a VM at its limit does once its swap file is full.
    #[serde(default)]
    pub when_swap_is_full: WhenFull,
    /// What swap files may take.
    #[serde(default)]
    pub swap_quota: SwapQuota,
    /// How QEMU's page table is emptied.
    #[serde(default)]
    pub forget_by: ForgetBy,
    /// How a guest's page metadata may become known.
    #[serde(default)]
    pub metadata_by: MetadataBy,
}

/// How a guest's page metadata may become known.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum MetadataBy {
    /// By the kernel's note, and without one by its registration.
    #[default]
    Either,
    /// By the note that Linux keeps in its memory.
    Note,
    /// By what the kernel has registered.
    Registration,
}

/// How QEMU's page table is emptied, so that the next use of each page shows.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ForgetBy {
    /// Injected calls do it, for which a thread of QEMU's is stopped.
    #[default]
    Call,
    /// A kernel thread of QEMU's does it (io_uring), and no thread of QEMU's is stopped. If QEMU
    /// cannot have such a ring, injected calls do it.
    Ring,
}

/// Totals over all daemons that managed the VM.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Totals {
    /// Memory that was non-resident when the VM was first managed.
    #[serde(rename = "absent_at_hold_bytes")]
    pub absent_at_attach_bytes: u64,
    /// Memory that was reclaimed.
    pub reclaimed_bytes: u64,
    /// Not counted, always 0: earlier versions of the daemon read no record without it.
    #[serde(default)]
    pub returned_bytes: u64,
}

/// A region of RAM. The inode number identifies its file.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RegionRecord {
    /// Guest-physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Address in the VMM.
    pub hva: u64,
    /// The memfd's inode number.
    pub inode: u64,
    /// Offset in the memfd.
    pub offset: u64,
    /// Whether the VMM has unplugged the region, and no longer has that memfd.
    #[serde(default, rename = "gone")]
    pub unplugged: bool,
}

impl RegionRecord {
    /// The record of a region.
    pub fn new(region: &Region, inode: u64) -> RegionRecord {
        RegionRecord {
            gpa: region.gpa.0,
            bytes: region.bytes,
            hva: region.hva.0,
            inode,
            offset: region.offset,
            unplugged: false,
        }
    }

    /// The region as it is needed to open its file again.
    pub fn known(&self) -> KnownRegion {
        let (gpa, hva) = (Gpa(self.gpa), Hva(self.hva));
        let region = Region { gpa, bytes: self.bytes, hva, file: 0, offset: self.offset };
        KnownRegion { region, inode: self.inode, is_unplugged: self.unplugged }
    }
}

impl Record {
    /// The way to the VMM's monitor.
    pub fn monitor(&self) -> Monitor {
        let (socket, domain) = (self.qmp.clone(), self.domain.clone());
        match domain {
            Some(uuid) => Monitor::Libvirt(Domain { socket, uuid }),
            None => Monitor::Socket(socket),
        }
    }

    /// Writes the record into the VM's directory, whole or not at all.
    ///
    /// # Errors
    /// Those of `state_file::save`.
    pub fn save(&self, directory: &Path) -> io::Result<()> {
        state_file::save(&directory.join(FILE), self)
    }

    /// Changes the record and writes it into the VM's directory. If writing fails, nothing has
    /// changed.
    ///
    /// # Errors
    /// Those of `state_file::save`.
    pub fn change(&mut self, directory: &Path, change: impl FnOnce(&mut Record)) -> io::Result<()> {
        let mut next = self.clone();
        change(&mut next);
        next.save(directory)?;
        *self = next;
        Ok(())
    }

    /// Whether the VMM runs: the same process, not another one with its number.
    pub fn life(&self) -> Life {
        let (pid, start_ticks) = (self.pid, self.start_ticks);
        Life::of(Identity { pid, start_ticks, boot: &self.boot })
    }

    /// Whether the console is Ebb's.
    pub fn has_console(&self) -> bool {
        self.started || self.console
    }

    /// Size of all regions that the VMM has not unplugged, pluggable memory included.
    pub fn memory_bytes(&self) -> u64 {
        self.regions.iter().filter(|region| !region.unplugged).map(|region| region.bytes).sum()
    }

    /// Size of the regions that the VMM has unplugged.
    pub fn unplugged_bytes(&self) -> u64 {
        self.regions.iter().filter(|region| region.unplugged).map(|region| region.bytes).sum()
    }

    /// Most memory of its compressed pages: by its tiers, else by the pilot, else by the daemon's
    /// settings.
    pub fn compressed_bytes(&self) -> u64 {
        let own = self.tiers.as_ref().map(|tiers| tiers.compressed_bytes);
        own.or(self.piloted_compressed_bytes).unwrap_or(self.settings.compressed_bytes)
    }

    /// The most that this can ever be: what the store is made for.
    pub fn compressed_most_bytes(&self) -> u64 {
        match self.tiers {
            Some(_) => self.compressed_bytes(),
            // The pilot may have made it smaller for a time.
            None => { self.compressed_bytes() }
                .max(self.settings.compressed_bytes)
                .max(self.memory_bytes() / COMPRESSED_PART),
        }
    }

    /// Reads the record; none: the VM was never managed, or is detached.
    ///
    /// # Errors
    /// Those of read(2). `InvalidData`: not a record, or one whose numbers no VM can have.
    pub fn load(directory: &Path) -> io::Result<Option<Record>> {
        let found = state_file::load::<Record>(&directory.join(FILE))?;
        match found.as_ref().is_none_or(Record::adds_up) {
            true => Ok(found),
            false => Err(io::Error::new(io::ErrorKind::InvalidData, "no VM has such sizes")),
        }
    }

    /// Name of another VM beside this VM's directory that has the same VMM on record. Records that
    /// cannot be read are passed over.
    pub fn twin(&self, directory: &Path) -> Option<VmName> {
        let vms = directory.parent().and_then(|vms| fs::read_dir(vms).ok());
        let others = vms.into_iter().flatten().flatten().map(|entry| entry.path());
        let mut records = others
            .filter(|other| other != directory)
            .filter_map(|other| Record::load(&other).ok().flatten());
        let vmm = (self.pid, self.start_ticks, &self.boot);
        records.find(|other| (other.pid, other.start_ticks, &other.boot) == vmm).map(|it| it.name)
    }

    /// Whether any VM is on record in this run directory, even one whose record cannot be read.
    pub fn is_any_in(run_dir: &Path) -> bool {
        let vms = fs::read_dir(run_dir.join("vms")).into_iter().flatten().flatten();
        vms.into_iter().any(|entry| entry.path().join(FILE).exists())
    }

    /// Whether no computation with its numbers overflows.
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
            && self.piloted_devices.iter().all(|device| device.full_bytes <= BYTES_MAX)
    }

    /// Removes the record from the VM's directory, if there is one.
    ///
    /// # Errors
    /// Those of unlink(2).
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
    fn a_vmm_that_is_on_record_twice_is_noticed() {
        let text = include_str!("../../../../fuzz/corpus/vm_json/whole");
        let record: Record = serde_json::from_str(text).expect("a record");
        let vms = tempfile::tempdir().expect("a directory");
        let directory = |name: &str| {
            let directory = vms.path().join(name);
            fs::create_dir(&directory).expect("a directory");
            directory
        };
        let (own, other, broken) = (directory("a"), directory("b"), directory("c"));
        record.save(&own).expect("room for it");
        fs::write(broken.join(FILE), "{").expect("room for it");
        let name: VmName = "b".parse().expect("a name");
        let mut twin = Record { name: name.clone(), ..record.clone() };
        twin.start_ticks += 1;
        twin.save(&other).expect("room for it");
        assert_eq!(record.twin(&own), None);
        twin.start_ticks -= 1;
        twin.save(&other).expect("room for it");
        assert_eq!(record.twin(&own), Some(name));
    }

    #[test]
    fn a_total_that_nobody_counts_need_not_be_there() {
        let text = r#"{"absent_at_hold_bytes": 1, "reclaimed_bytes": 2}"#;
        let totals: Totals = serde_json::from_str(text).expect("totals");
        assert_eq!((totals.reclaimed_bytes, totals.returned_bytes), (2, 0));
        // Earlier daemons require this field.
        let text = serde_json::to_string(&totals).expect("text");
        assert!(text.contains("\"returned_bytes\":0"), "{text}");
    }

    /// A record of a daemon that knew of no regions that can be unplugged.
    #[test]
    fn a_region_of_an_older_record_is_there() {
        let text = r#"{"gpa":4294967296,"bytes":4096,"hva":8192,"inode":7,"offset":0}"#;
        let region: RegionRecord = serde_json::from_str(text).expect("a region");
        let known = region.known();
        assert!(!region.unplugged && !known.is_unplugged);
        assert_eq!((known.region.gpa, known.region.hva, known.inode), (Gpa(1 << 32), Hva(8192), 7));
        let unplugged = RegionRecord { unplugged: true, ..region };
        let text = serde_json::to_string(&unplugged).expect("text");
        let again: RegionRecord = serde_json::from_str(&text).expect("a region");
        assert!(again.known().is_unplugged);
    }
}
