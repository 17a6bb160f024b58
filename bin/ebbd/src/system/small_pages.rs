//! Keeps huge pages out of a VM with small pages, and out of the parts of a VM with huge pages that
//! are broken up, whatever the host's settings for huge pages are or become.

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

/// Directory of the settings for huge pages. A kernel without it has no huge pages, and refuses the
/// advice to use none.
const SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// First kernel version whose khugepaged makes no large folio that would fill a hole which a
/// userfaultfd watches. Earlier ones could fill with zeros what was just evicted.
const HOLES_STAY: (u32, u32) = (6, 4);
/// Longest wait for khugepaged to sleep. By its usual settings it works for some milliseconds in
/// ten seconds.
const ASLEEP_WITHIN: Duration = Duration::from_millis(20);
const ASLEEP_LOOK_EVERY: Duration = Duration::from_millis(1);

/// Stops the VMM from getting huge pages in its RAM, wherever it has mapped it. What already is in
/// large folios stays in them.
///
/// # Errors
/// Those of [`injector::no_huge_pages`].
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

/// Mappings of the RAM's files in the VMM, each with the number of its file.
fn mapped(process: &Process, ram: &Ram) -> io::Result<Vec<(Vma, usize)>> {
    let files = ram.files().iter();
    let inodes: Vec<u64> =
        files.map(|backing| Ok(backing.identity()?.1)).collect::<io::Result<_>>()?;
    let memfds = process.mappings()?.into_iter().filter(|vma| vma.name.starts_with("/memfd:"));
    let file_of = |vma: &Vma| inodes.iter().position(|inode| *inode == vma.inode);
    Ok(memfds
        .filter_map(|vma| Some((file_of(&vma)?, vma)))
        .map(|(file, vma)| (vma, file))
        .collect())
}

/// Breaks up huge frames, wherever the VMM has them mapped: from now on their frames are evicted
/// one by one.
///
/// # Errors
/// Those of [`injector::no_huge_pages`] and [`ebb_pager::FolioMap::break_up`]; the huge frames
/// before the failed one are broken up. `WouldBlock`: khugepaged may be making a large folio there.
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
    // A huge frame that can no longer be broken up stays whole.
    let each = || huge_frames.iter().copied().filter(|huge| pager.folios().can_break_up(*huge));
    each().try_for_each(|huge| pager.ram().use_small_pages(huge))?;
    await_khugepaged()?;
    each().try_for_each(|huge| pager.folios().break_up(huge))
}

/// Waits until each collapse that began before has ended. No collapse begins where huge pages are
/// forbidden by now.
///
/// # Errors
/// `WouldBlock`: khugepaged works longer than usual. Also those of [`khugepaged::is_asleep`].
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

/// Where the mapping has this part of the file, as far as it does.
fn overlap(vma: &Vma, part: &Range<u64>) -> Option<HvaRange> {
    let start = vma.offset.max(part.start);
    let end = vma.offset.saturating_add(vma.bytes).min(part.end);
    let bytes = end.checked_sub(start).filter(|bytes| *bytes > 0)?;
    Some(HvaRange { start: Hva(vma.start.0 + (start - vma.offset)), bytes })
}

/// Sorts ranges, and joins adjacent ones.
fn join(ranges: &mut Vec<HvaRange>) {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, range| {
        let is_next = range.start.0.saturating_add(range.bytes) == next.start.0;
        range.bytes += if is_next { next.bytes } else { 0 };
        is_next
    });
}

/// Has the pager look for large folios even so. If the host does not show them, a VM with small
/// pages is evicted only if Ebb started it, and one with huge pages by whole huge frames. The
/// latter also holds for a VM with huge pages on NUMA nodes, whose huge frames move whole, and on
/// an old kernel.
pub fn mind(pager: &Pager, process: &Process, record: &Record) {
    let is_on_nodes = record.tiers.as_ref().is_some_and(Tiers::has_nodes);
    match record.backing {
        Backing::Small => {}
        Backing::Thp if !is_on_nodes && keeps_holes() => {}
        _ => return,
    }
    let minded = process.try_clone().and_then(|vmm| pager.folios().mind_large_folios(vmm));
    if let Err(error) = minded {
        tracing::warn!("large folios of {} cannot be recognised: {error}", process.pid());
    }
}

/// Whether the host's kernel leaves holes in memory of huge pages alone. If it does not, it fills
/// the rest of a huge frame with zeros when parts come back after it was evicted as a whole.
pub fn keeps_holes() -> bool {
    kernel() >= Some(HOLES_STAY)
}

/// Version and patch level of the host's kernel: `6.12` of `6.12.48+deb13-amd64`.
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
