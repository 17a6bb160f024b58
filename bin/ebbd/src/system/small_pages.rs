//! A VM of small pages stays one, whatever the host's settings for huge pages are or become; and so
//! does what is broken up of a VM of huge pages.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ebb_api::Backing;
use ebb_pager::Pager;
use ebb_sys::khugepaged;
use ebb_sys::process::{Process, Vma};
use ebb_sys::uffd::HvaRange;
use ebb_units::{HugeFrame, Hva};
use ebb_vm::Ram;

use crate::helpers::injector;
use crate::model::record::Record;
use crate::model::tiers::Tiers;

/// A kernel without this directory has no huge pages to give, and refuses to be told so.
const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// From this kernel on khugepaged makes no large folio where that would fill a hole that a userfaultfd
/// watches. Before, it could fill what was just evicted with zeros.
const HOLES_STAY: (u32, u32) = (6, 4);
/// khugepaged is at work for some milliseconds in ten seconds, by its usual settings.
const ASLEEP_WITHIN: Duration = Duration::from_millis(20);
const ASLEEP_LOOK_EVERY: Duration = Duration::from_millis(1);

/// Has the VMM get no huge pages in its RAM from now on, wherever it has mapped it. What is
/// in large folios already stays in them.
///
/// # Errors
/// As [`injector::no_huge_pages`].
pub fn keep(process: &Process, ram: &Ram) -> io::Result<()> {
    if !Path::new(SETTINGS).exists() {
        return Ok(());
    }
    let mut ranges: Vec<HvaRange> = mapped(process, ram)?
        .into_iter()
        .map(|(vma, _)| HvaRange { start: vma.start, bytes: vma.bytes })
        .collect();
    join(&mut ranges);
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
/// As [`injector::no_huge_pages`] and [`ebb_pager::Folios::break_up`], with those broken up that
/// came before; `WouldBlock`: khugepaged may be making a large folio there.
pub fn break_up(process: &Process, pager: &Pager, huge_frames: &[HugeFrame]) -> io::Result<()> {
    let mut parts: Vec<_> =
        huge_frames.iter().filter_map(|huge| pager.ram().advised(*huge)).collect();
    parts.sort_unstable_by_key(|(file, part)| (*file, part.start));
    parts.dedup();
    let mapped = mapped(process, pager.ram())?;
    let mut ranges: Vec<HvaRange> = mapped
        .iter()
        .flat_map(|(vma, of)| {
            let of_file = parts.iter().filter(move |(file, _)| file == of);
            of_file.filter_map(|(_, part)| overlap(vma, part))
        })
        .collect();
    join(&mut ranges);
    injector::no_huge_pages(process, &ranges)?;
    // One that cannot be broken up by now stays whole.
    let each = || huge_frames.iter().copied().filter(|huge| pager.folios().can_break_up(*huge));
    each().try_for_each(|huge| pager.ram().use_small_pages(huge))?;
    await_khugepaged()?;
    each().try_for_each(|huge| pager.folios().break_up(huge))
}

/// Waits until each collapse that began before has ended. None begins where huge pages are forbidden
/// by now.
///
/// # Errors
/// `WouldBlock`: khugepaged is at work longer than usual; as [`khugepaged::is_asleep`].
pub fn await_khugepaged() -> io::Result<()> {
    let deadline = Instant::now() + ASLEEP_WITHIN;
    while !is_khugepaged_asleep()? {
        if Instant::now() > deadline {
            let why = "khugepaged is at work";
            return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
        }
        thread::sleep(ASLEEP_LOOK_EVERY);
    }
    Ok(())
}

fn is_khugepaged_asleep() -> io::Result<bool> {
    khugepaged::is_asleep().map_err(|error| match error.kind() {
        io::ErrorKind::Unsupported => {
            let why = "khugepaged cannot be seen: run ebbd in the host's PID namespace";
            io::Error::new(io::ErrorKind::Unsupported, why)
        }
        _ => error,
    })
}

/// Where a part of a file is mapped, as far as it is.
fn overlap(vma: &Vma, part: &Range<u64>) -> Option<HvaRange> {
    let start = vma.offset.max(part.start);
    let end = vma.offset.saturating_add(vma.bytes).min(part.end);
    let bytes = end.checked_sub(start).filter(|bytes| *bytes > 0)?;
    Some(HvaRange { start: Hva(vma.start.0 + (start - vma.offset)), bytes })
}

/// Puts ranges in order, and those in a row together.
fn join(ranges: &mut Vec<HvaRange>) {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, range| {
        let is_next = range.start.0.saturating_add(range.bytes) == next.start.0;
        range.bytes += if is_next { next.bytes } else { 0 };
        is_next
    });
}

/// Has the pager look for what is in large folios all the same. Where the host does not tell
/// them, a VM of small pages is evicted only if Ebb started it, and one of huge pages by whole huge
/// frames. So is one of huge pages on NUMA nodes, whose huge frames move whole, and on an old kernel.
pub fn mind(pager: &Pager, process: &Process, record: &Record) {
    let is_on_nodes = record.tiers.as_ref().is_some_and(Tiers::has_nodes);
    match record.backing {
        Backing::Small => {}
        Backing::Thp if !is_on_nodes && keeps_holes() => {}
        _ => return,
    }
    let minded = process.try_clone().and_then(|vmm| pager.folios().mind_large_folios(vmm));
    if let Err(error) = minded {
        tracing::warn!("large folios of {} cannot be told from others: {error}", process.pid());
    }
}

/// Whether the host's kernel leaves holes in huge pages' memory alone. Where it does not, what came back
/// in parts of a huge frame that went as a whole would have the rest filled with zeros.
pub fn keeps_holes() -> bool {
    kernel() >= Some(HOLES_STAY)
}

/// Version and patch level of the host's kernel, `6.12` of `6.12.48+deb13-amd64`.
fn kernel() -> Option<(u32, u32)> {
    version(rustix::system::uname().release().to_str().ok()?)
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_known_by_its_release() {
        for (release, expected) in [
            ("6.12.48+deb13-amd64", Some((6, 12))),
            ("6.4-rc1", Some((6, 4))),
            ("7.0", Some((7, 0))),
            ("6", None),
            ("", None),
            ("linux-6.4", None),
        ] {
            assert_eq!(version(release), expected, "{release}");
        }
        assert!(version("6.1.0-31-amd64") < Some(HOLES_STAY));
        assert!(kernel() > Some((4, 0)), "this one");
    }

    #[test]
    fn ranges_in_a_row_are_one() {
        let range = |start, bytes| HvaRange { start: Hva(start), bytes };
        let mut ranges = vec![range(9, 1), range(4, 2), range(0, 4), range(20, 3), range(6, 3)];
        join(&mut ranges);
        assert_eq!(ranges, [range(0, 10), range(20, 3)]);
    }
}
