//! A VM of small pages stays one, whatever the host's settings for huge pages are or become; and so
//! does what is broken up of a VM of huge pages.

use std::io;
use std::path::Path;

use ebb_api::Backing;
use ebb_pager::Pager;
use ebb_sys::process::{Process, Vma};
use ebb_sys::uffd::HvaRange;
use ebb_units::{FrameRange, HUGE_BYTES, HugeFrame, Hva};
use ebb_vm::Ram;

use crate::injector;
use crate::record::Record;
use crate::tiers::Tiers;
use crate::worker::State;

/// A kernel without this directory has no huge pages to give, and refuses to be told so.
const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// What is broken up is in mappings of its own. Of more the VM gets no huge pages at all from then on:
/// 65,530 is what a kernel gives a process (vm.max_map_count).
const MAPPINGS_MOST: usize = 16 << 10;

/// Has the VMM get no huge pages in its RAM from now on, wherever it has mapped it. What is
/// in large folios already stays in them.
///
/// # Errors
/// As [`injector::small_pages`].
pub fn keep(process: &Process, ram: &Ram) -> io::Result<()> {
    if !Path::new(SETTINGS).exists() {
        return Ok(());
    }
    let ranges: Vec<HvaRange> = mapped(process, ram)?
        .into_iter()
        .map(|(vma, _)| HvaRange { start: vma.start, bytes: vma.bytes })
        .collect();
    injector::no_huge_pages(process, &ranges)
}

/// Where the VMM has the RAM's files mapped, and which of them that is.
fn mapped(process: &Process, ram: &Ram) -> io::Result<Vec<(Vma, usize)>> {
    let files = ram.files().iter();
    let inodes: Vec<u64> =
        files.map(|backing| Ok(backing.file.identity()?.1)).collect::<io::Result<_>>()?;
    let memfds = process.mappings()?.into_iter().filter(|vma| vma.name.starts_with("/memfd:"));
    let file_of = |vma: &Vma| inodes.iter().position(|inode| *inode == vma.inode);
    Ok(memfds
        .filter_map(|vma| Some((file_of(&vma)?, vma)))
        .map(|(file, vma)| (vma, file))
        .collect())
}

/// Has the frames of huge frames go one by one from now on, wherever the VMM has them mapped.
///
/// # Errors
/// As [`injector::no_huge_pages`] and [`Pager::break_up`]: those broken up before stay so.
pub fn break_up(process: &Process, pager: &Pager, huge_frames: &[HugeFrame]) -> io::Result<()> {
    let mapped = mapped(process, pager.ram())?;
    if mapped.len() > MAPPINGS_MOST {
        // Each range may make two mappings more, of which the kernel gives a process so many.
        keep(process, pager.ram())?;
        pager.ram().files().iter().try_for_each(|file| file.mapping.use_huge_pages(false))?;
        return huge_frames.iter().try_for_each(|huge| pager.break_up(*huge));
    }
    let places = huge_frames.iter().filter_map(|huge| pager.ram().range(FrameRange::huge(*huge)));
    let mut ranges: Vec<HvaRange> = places
        .flat_map(|place| {
            let of_file = mapped.iter().filter(move |(_, file)| *file == place.file);
            of_file.filter_map(move |(vma, _)| part(vma, place.offset, HUGE_BYTES))
        })
        .collect();
    ranges.sort_unstable_by_key(|range| range.start);
    injector::no_huge_pages(process, &ranges)?;
    huge_frames.iter().try_for_each(|huge| pager.break_up(*huge))
}

/// Where so many bytes of a file are mapped, as far as they are.
fn part(vma: &Vma, offset: u64, bytes: u64) -> Option<HvaRange> {
    let start = vma.offset.max(offset);
    let end = vma.offset.saturating_add(vma.bytes).min(offset.saturating_add(bytes));
    let bytes = end.checked_sub(start).filter(|bytes| *bytes > 0)?;
    Some(HvaRange { start: Hva(vma.start.0 + (start - vma.offset)), bytes })
}

/// Has the pager look for what is in large folios all the same. Where the host does not tell
/// them, a VM of small pages is evicted only if Ebb started it, and one of huge pages by whole huge
/// frames. So is one on NUMA nodes, whose huge frames move whole.
pub fn mind(pager: &Pager, process: &Process, record: &Record) {
    let is_on_nodes = record.tiers.as_ref().is_some_and(Tiers::has_nodes);
    match record.backing {
        Backing::Small => {}
        Backing::Thp if !is_on_nodes => {}
        _ => return,
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
