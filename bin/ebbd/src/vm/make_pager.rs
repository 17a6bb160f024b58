//! Makes a VM's pager and what it stands on: ledger, store, digests.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use ebb_api::{Backing, advice};
use ebb_ledger::{Content, Ledger, LedgerError, Tables};
use ebb_pager::{Digests, Grain, IoMapping, Pager, PagerParts, Restored};
use ebb_passthrough::{Held, PassedThrough};
use ebb_served::{SharedDisks, Source};
use ebb_store::{Compressed, MEMORY_SLOTS, Protection, Store, StoreError, SwapFile};
use ebb_sys::uffd::{Uffd, feature};
use ebb_units::{FRAME_BYTES, FrameRange};
use ebb_vm::{Puncher, Ram};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::model::api_error::{Answer, not_allowed};
use crate::model::record::Record;
use crate::serve::growth::Growth;
use crate::serve::swap_room;
use crate::support::failpoint;
use crate::system::remains::{digests_path, ledger_path};

/// A pager, and what belongs to it.
pub struct Made {
    /// The pager.
    pub pager: Pager,
    /// Receives the blocks that it gives back.
    pub restored: Receiver<Restored>,
    /// The VM's passed-through devices.
    pub passed: Option<Arc<PassedThrough>>,
}

/// Agrees with the kernel on the userfaultfd features that Ebb needs. The error names what is
/// missing.
pub fn shake_hands(uffd: &Uffd) -> Answer<()> {
    uffd.handshake(feature::needed()).map(drop).map_err(|error| {
        let has = ebb_sys::uffd::probe().unwrap_or(0);
        let missing = feature::NEEDED.iter().filter(|(bit, _)| has & bit == 0);
        let names: Vec<&str> = missing.map(|(_, name)| *name).collect();
        not_allowed(match names.is_empty() {
            true => format!("the kernel's userfaultfd: {error}"),
            false => {
                format!("the kernel's userfaultfd lacks {}: boot a newer kernel", names.join(", "))
            }
        })
    })
}

/// Gives the digests an owner number, if they have none.
pub fn own_digests(record: &mut Record) -> io::Result<()> {
    if record.digests == 0 {
        let mut number = [0; 8];
        getrandom(&mut number, GetRandomFlags::empty())?;
        record.digests = u64::from_ne_bytes(number).max(1);
    }
    Ok(())
}

/// Opens the digests of a VM with disks. A VM that is recovered without room for them has none.
fn digests(ram: &Ram, record: &Record, directory: &Path) -> io::Result<Option<Digests>> {
    if record.disks.is_empty() {
        return Ok(None);
    }
    let path = digests_path(directory);
    match Digests::open(&path, ram.end(), record.digests) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            tracing::warn!(
                "disk-backed content is not compared as it comes back: {}: {error}",
                path.display()
            );
            // Nobody keeps the file up to date from now on.
            fs::remove_file(&path)?;
            Ok(None)
        }
        opened => opened.map(Some),
    }
}

/// Makes the pager over a ledger. `held`: QEMU's descriptors of
/// passed-through devices.
///
/// # Errors
/// The digests cannot be opened, or the store lacks what the ledger names.
pub fn pager(
    ram: Ram,
    (ledger, store): (Ledger, Box<dyn Store>),
    uffd: Uffd,
    (shared, held): (&Arc<SharedDisks>, Option<Held>),
    record: &Record,
    directory: &Path,
) -> io::Result<Made> {
    let grain = match record.backing {
        Backing::Small => Grain::Frame,
        _ => Grain::Huge,
    };
    let puncher = Puncher::new(ram);
    let passed = held.map(|held| Arc::new(PassedThrough::new(held, puncher.ram())));
    let devices: Box<dyn IoMapping> = match &passed {
        Some(passed) => Box::new(Arc::clone(passed)),
        None => shared.devices(puncher.ram()),
    };
    let devices = failpoint::devices(devices, &record.name);
    let digests = digests(puncher.ram(), record, directory)?;
    let (pager, restored) = Pager::new(PagerParts {
        puncher,
        ledger,
        uffd,
        grain,
        devices,
        store,
        disk: Box::new(Source(Arc::clone(shared))),
        digest_key: shared.digest_key(),
    })?;
    digests.into_iter().for_each(|digests| pager.residency().compare_with(digests));
    Ok(Made { pager, restored, passed })
}

/// Slots to try until one shows that a swap file is the VM's own.
const SLOTS_TO_TRY: usize = 16;

/// Opens the store of a VM: its swap file, with compressed memory in front of it. Compressed memory
/// that an earlier process had is opened even if none is wanted any more. `ledger`: what an earlier
/// process left; nothing is made in the place of a swap file that it needs.
///
/// # Errors
/// The swap file or the run directory cannot be used. The VM is as it was then.
pub fn store(
    ram: &Ram,
    ledger: Option<&Ledger>,
    record: &Record,
    directory: &Path,
) -> io::Result<Box<dyn Store>> {
    if !ebb_store::is_in_memory(directory)? {
        tracing::warn!("{}: not on tmpfs; the swap file's key is on a disk", directory.display());
    }
    let slots = record.tiers.as_ref().map_or(ram.first_bytes() / FRAME_BYTES, |tiers| tiers.slots);
    let held = || ledger.into_iter().flat_map(on_disk);
    let some: Vec<u64> = held().map(|(_, slot)| slot).take(SLOTS_TO_TRY).collect();
    open_store(slots, &some, record, directory).map_err(|error| match error {
        StoreError::Gone(why) => {
            let bytes = held().map(|(frames, _)| frames.count * FRAME_BYTES).sum();
            let advice = advice::swap_is_gone(&why, bytes, record.pid);
            io::Error::new(io::ErrorKind::NotFound, advice)
        }
        error => error.into(),
    })
}

/// Frames whose pages are in the swap file, and their first slots.
fn on_disk(ledger: &Ledger) -> impl Iterator<Item = (FrameRange, u64)> {
    ledger.runs().filter_map(|(frames, content)| match content {
        Content::Saved { slot } if slot < MEMORY_SLOTS => Some((frames, slot)),
        _ => None,
    })
}

fn open_store(
    slots: u64,
    held: &[u64],
    record: &Record,
    directory: &Path,
) -> Result<Box<dyn Store>, StoreError> {
    let swap = &record.swap;
    let disk = || {
        let disk = match held.is_empty() {
            true => SwapFile::open(swap, directory, slots, Protection::Encrypted),
            false => SwapFile::open_again(swap, directory, slots, Protection::Encrypted, held),
        };
        Ok::<_, StoreError>(swap_room::among_others(disk?, swap))
    };
    let (bytes, most_bytes) = (record.compressed_bytes(), record.compressed_most_bytes());
    match ebb_store::has_compressed(directory)? {
        false if most_bytes == 0 || bytes == 0 && !ebb_store::is_in_memory(directory)? => {
            Ok(Box::new(disk()?))
        }
        false if bytes == 0 => Ok(Box::new(Compressed::prepare(directory, most_bytes, disk()?)?)),
        // It is limited to what it may take before anything is saved.
        _ => match Compressed::open(directory, most_bytes, disk()?) {
            // A VM that is recovered does not wait for room that it did not need so far.
            Err(StoreError::RunDirectory(error)) if !ebb_store::has_compressed(directory)? => {
                tracing::warn!("the VM goes on without compressed memory: {error}");
                Ok(Box::new(disk()?))
            }
            store => Ok(Box::new(store?)),
        },
    }
}

/// Has the daemon's own mapping fill memory in pages of the size that the VM's mapping uses.
pub fn prepare(ram: &Ram, backing: Backing) {
    for file in ram.files() {
        let huge = backing == Backing::Thp;
        if backing != Backing::Hugetlb
            && let Err(error) = file.mapping.use_huge_pages(huge)
        {
            tracing::debug!("huge pages for the daemon's view: {error}");
        }
    }
}

/// Creates the ledger. With small pages all its tables are made at once, since each fault may need
/// the table of its huge frame.
pub fn new_ledger(ram: &Ram, record: &Record, directory: &Path) -> Result<Ledger, LedgerError> {
    let tables = match record.backing {
        Backing::Small => Tables::AtOnce,
        _ => Tables::WhenSplit,
    };
    Ledger::create(&ledger_path(directory), ram.end(), tables)
}

/// Has disks and virtio-mem devices remove frames from this process's page table with the pager.
pub fn forget_with(pager: &Pager, disks: Arc<SharedDisks>, growth: &Growth) {
    let devices = growth.forgetting();
    pager.folios().on_forget(move |frames| {
        disks.forget(frames);
        devices(frames);
    });
}
