//! A VM of small pages stays one, whatever the host's settings for huge pages are or become.

use std::io;
use std::path::Path;

use ebb_api::Backing;
use ebb_pager::Pager;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_vm::Ram;

use crate::injector;
use crate::worker::State;

/// A kernel without this directory has no huge pages to give, and refuses to be told so.
const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// Has the VMM get no huge pages in its RAM from now on, wherever it has mapped it. What is
/// in large folios already stays in them.
///
/// # Errors
/// As [`injector::small_pages`].
pub fn keep(process: &Process, ram: &Ram) -> io::Result<()> {
    if !Path::new(SETTINGS).exists() {
        return Ok(());
    }
    let files = ram.files().iter();
    let inodes: Vec<u64> =
        files.map(|backing| Ok(backing.file.identity()?.1)).collect::<io::Result<_>>()?;
    let mappings = process.mappings()?.into_iter();
    let of_ram =
        mappings.filter(|vma| vma.name.starts_with("/memfd:") && inodes.contains(&vma.inode));
    let ranges: Vec<HvaRange> =
        of_ram.map(|vma| HvaRange { start: vma.start, bytes: vma.bytes }).collect();
    injector::no_huge_pages(process, &ranges)
}

/// Has the pager look for what is in large folios all the same. Where the host does not tell
/// them, a VM is evicted only if Ebb started it.
pub fn mind(pager: &Pager, process: &Process, backing: Backing) {
    if backing != Backing::Small {
        return;
    }
    let minded = process.try_clone().and_then(|vmm| pager.mind_large_folios(vmm));
    if let Err(error) = minded {
        tracing::warn!("large folios of {} cannot be told from others: {error}", process.pid());
    }
}

impl State {
    /// A VM that was taken up has this still to come, where the daemon before did not do it. Not
    /// before its faults are served: the thread that is to do it may wait in one.
    pub(crate) fn keep_small_pages(&mut self) {
        let record = &self.held.record;
        if record.small_pages || record.backing != Backing::Small || !self.small_pages.is_due() {
            return;
        }
        match keep(&self.held.process, self.held.pager.ram()) {
            Ok(()) => {
                self.held.record.small_pages = true;
                self.save();
            }
            Err(error) => {
                tracing::warn!("{}: small pages: {error}", record.name);
                self.small_pages.failed();
            }
        }
    }
}
