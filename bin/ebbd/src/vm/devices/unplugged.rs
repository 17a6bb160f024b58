//! Memory that a VMM has unplugged: noticed, put on record, and dropped.
//!
//! The record comes first. Once it says that a region is unplugged, no daemon looks for its memfd
//! by a number that another file may have by then. Each daemon drops all regions that are unplugged
//! by the record, so the next one finishes what this one did not. Without room for the record the
//! region is dropped all the same: that it is unplugged can be proved again.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ebb_pager::Pager;
use ebb_sys::process::Process;
use ebb_units::{Bytes, Gpa};
use ebb_vm::{Ram, unplugged};

use crate::model::record::Record;
use crate::support::open_files::OpenFiles;
use crate::support::retry::Retry;
use crate::vm::context::VmContext;

/// First pause before memory that could not be dropped or brought back is tried again.
const RETRY_FIRST: Duration = Duration::from_millis(200);
/// Longest pause before memory that could not be dropped or brought back is tried again.
const RETRY_MOST: Duration = Duration::from_secs(30);

/// Where a VMM has the files of its RAM open, as far as that is known.
pub struct Unplugged {
    /// For each file, all descriptors of the VMM that were seen to refer to it.
    numbers: Vec<Vec<i32>>,
    /// Files that were unplugged and are not dropped to the end.
    unfinished: Vec<usize>,
    /// Whether some files may be mapped nowhere and have non-resident content.
    is_astray: bool,
    /// Files of which the VMM has closed a descriptor. It may have unmapped them, and may have
    /// mapped them again since.
    doubted: Vec<usize>,
    retry: Retry,
    /// Why the last try failed.
    failed: Option<String>,
}

impl Default for Unplugged {
    fn default() -> Unplugged {
        Unplugged {
            numbers: Vec::new(),
            unfinished: Vec::new(),
            is_astray: false,
            doubted: Vec::new(),
            retry: Retry::new(RETRY_FIRST, RETRY_MOST),
            failed: None,
        }
    }
}

impl Unplugged {
    /// Whether the VMM has all descriptors that it was seen to have. Makes one system call for
    /// each.
    pub fn is_unchanged(&self, process: &Process, ram: &Ram) -> io::Result<bool> {
        for (file, inode) in there(ram)? {
            let Some(known) = self.numbers.get(file).filter(|known| !known.is_empty()) else {
                return Ok(false);
            };
            for &number in known {
                if process.descriptor_inode(number)? != Some(inode) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Returns the files that were unplugged since the last look.
    fn look(
        &mut self,
        process: &Process,
        ram: &Ram,
        open: &mut OpenFiles,
    ) -> io::Result<Vec<usize>> {
        self.numbers.resize(ram.files().len(), Vec::new());
        let files = there(ram)?;
        let now = numbers(process, ram.files().len(), &files, open)?;
        // QEMU unmaps memory before it closes the descriptor that it had for it.
        let is_suspect = |&(file, _): &(usize, u64)| {
            let known = &self.numbers[file];
            known.is_empty() || known.iter().any(|number| !now[file].contains(number))
        };
        let (suspects, there): (Vec<_>, Vec<_>) = files.into_iter().partition(is_suspect);
        let mut absent = Vec::new();
        if !suspects.is_empty() {
            let inodes: Vec<u64> = suspects.iter().map(|(_, inode)| *inode).collect();
            absent = unplugged::absent(process, &inodes)?;
            // A process without any of its RAM is no VM any more: others report its end.
            if there.is_empty() && absent.len() == inodes.len() {
                return Ok(Vec::new());
            }
        }
        let (found, left): (Vec<_>, Vec<_>) =
            suspects.into_iter().partition(|(_, inode)| absent.contains(inode));
        for (file, _) in left {
            match self.numbers[file].is_empty() {
                true => self.is_astray = true,
                false => self.doubt(file),
            }
        }
        self.numbers = now;
        Ok(found.into_iter().map(|(file, _)| file).collect())
    }

    fn doubt(&mut self, file: usize) {
        if !self.doubted.contains(&file) {
            self.doubted.push(file);
        }
        // It may be mapped again at any moment, so the next try is due at once.
        self.retry.worked();
    }

    /// Drops unplugged files, and brings back what may be mapped nowhere, once that is due. Returns
    /// whether it was tried, and the failure, if it is a new one.
    fn finish(
        &mut self,
        release: impl Fn(usize) -> io::Result<()>,
        give_back: impl FnOnce(&[usize]) -> io::Result<()>,
    ) -> (bool, Option<String>) {
        let astray = self.is_astray || !self.doubted.is_empty();
        if (self.unfinished.is_empty() && !astray) || !self.retry.is_due() {
            return (false, None);
        }
        let mut failed = Vec::new();
        self.unfinished.retain(|&file| {
            let done = release(file).map_err(|error| format!("dropping unplugged memory: {error}"));
            done.map_err(|why| failed.push(why)).is_err()
        });
        if astray {
            match give_back(&self.doubted) {
                Ok(()) => (self.is_astray, self.doubted) = (false, Vec::new()),
                Err(error) => {
                    failed.push(format!("memory that QEMU may have mapped nowhere: {error}"));
                }
            }
        }
        let failed = (!failed.is_empty()).then(|| failed.join("; "));
        match failed {
            Some(_) => self.retry.failed(),
            None => self.retry.worked(),
        }
        let news = if failed == self.failed { None } else { failed.clone() };
        self.failed = failed;
        (true, news)
    }
}

/// Returns the files that are not unplugged, with their inode numbers.
fn there(ram: &Ram) -> io::Result<Vec<(usize, u64)>> {
    let all = ram.files().iter().enumerate().filter(|(file, _)| !ram.is_unplugged(*file));
    all.map(|(file, backing)| Ok((file, backing.identity()?.1))).collect()
}

/// Returns, for each of `count` files, the VMM's descriptors of it, if it is among `files`.
fn numbers(
    process: &Process,
    count: usize,
    files: &[(usize, u64)],
    open: &mut OpenFiles,
) -> io::Result<Vec<Vec<i32>>> {
    let mut numbers = vec![Vec::new(); count];
    for &(number, ref link) in open.of(process)? {
        if !link.starts_with("/memfd:") {
            continue;
        }
        let inode = process.descriptor_inode(number)?;
        for &(file, _) in files.iter().filter(|(_, wanted)| Some(*wanted) == inode) {
            numbers[file].push(number);
        }
    }
    Ok(numbers)
}

/// Has the pager watch only the guest's memory, whatever the VMM has mapped at its addresses since.
///
/// # Errors
/// As dup(2).
pub fn mind(pager: &Pager, process: &Process) -> io::Result<()> {
    let (vmm, ram) = (process.try_clone()?, Arc::clone(pager.ram()));
    pager.frames().check_mapped(move |ranges| unplugged::mapped(&vmm, &ram, ranges));
    Ok(())
}

/// Puts on record what a VM that is recovered has unplugged since its record was written.
pub fn note(record: &mut Record, ram: &Ram, directory: &Path) {
    let mut news = false;
    for region in record.regions.iter_mut().filter(|region| !region.unplugged) {
        region.unplugged = ram.place(Gpa(region.gpa)).is_none();
        news |= region.unplugged;
    }
    if news {
        tracing::info!("QEMU has unplugged memory since its record was written");
        if let Err(error) = record.save(directory) {
            tracing::warn!("its record: {error}");
        }
    }
}

/// Drops all memory that was already unplugged when the VM is recovered.
///
/// # Errors
/// As [`ebb_pager::Returner::release_file`].
pub fn release(pager: &Pager) -> io::Result<()> {
    let ram = pager.ram();
    (0..ram.files().len())
        .filter(|file| ram.is_unplugged(*file))
        .try_for_each(|file| pager.returner().release_file(file))
}

impl Unplugged {
    /// Looks whether the VMM still has all of its memory, and drops what it has not.
    pub fn keep(&mut self, cx: &mut VmContext, open: &mut OpenFiles) {
        let pager = Arc::clone(&cx.pager);
        let found = self.look(&cx.process, pager.ram(), open);
        let found = found.unwrap_or_else(|error| {
            tracing::debug!("its memory in QEMU: {error}");
            Vec::new()
        });
        for &file in &found {
            note_unplugged(cx, file);
            self.unfinished.push(file);
            self.retry.worked();
        }
        // Whoever maps it again finds all of it resident.
        let give_back = |doubted: &[usize]| pager.returner().give_back_unmapped(doubted);
        let (tried, news) = self.finish(|file| pager.returner().release_file(file), give_back);
        if tried {
            *open = OpenFiles::default();
        }
        if let Some(why) = news {
            tracing::warn!("{why}");
        }
    }
}

fn note_unplugged(cx: &mut VmContext, file: usize) {
    let ram = Arc::clone(cx.pager.ram());
    let regions = || ram.regions_in(file);
    let bytes: u64 = regions().map(|region| region.bytes).sum();
    let at = regions().next().map_or(0, |region| region.gpa.0);
    // Memory that was not resident is not memory that the guest has returned.
    let resident = ram.files()[file].resident_bytes().unwrap_or(0);
    tracing::info!("QEMU has unplugged {} at {at:#x}: Ebb no longer manages it", Bytes(bytes));
    cx.record.note(|record| {
        for region in regions() {
            let known = record.regions.iter_mut().filter(|known| known.gpa == region.gpa.0);
            known.for_each(|known| known.unplugged = true);
        }
        let absent = &mut record.totals.absent_at_attach_bytes;
        *absent = absent.saturating_sub(bytes.saturating_sub(resident));
    });
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use ebb_sys::mapping::Mapping;
    use ebb_sys::ram_file::RamFile;
    use ebb_units::Hva;
    use ebb_vm::Region;
    use ebb_vm::ram::Backing;

    use super::*;

    const BYTES: u64 = 1 << 20;

    /// Makes RAM of this process's own, and another descriptor of its file.
    fn ram() -> (Ram, OwnedFd) {
        let file = RamFile::create("unplugged", BYTES).unwrap();
        let other = file.as_fd().try_clone_to_owned().unwrap();
        let mapping = Mapping::new(&file, 0, BYTES).unwrap();
        let region = Region { gpa: Gpa(0), bytes: BYTES, hva: Hva(0), file: 0, offset: 0 };
        (Ram::new(vec![region], vec![Backing::new(file, mapping)]).unwrap(), other)
    }

    #[test]
    fn each_descriptor_that_is_closed_is_noticed() {
        let (process, (ram, other)) = (Process::own().unwrap(), ram());
        let again = || other.try_clone().unwrap();
        let (mut first, mut last) = (Some(again()), Some(again()));
        let mut known = Unplugged::default();
        let look = |known: &mut Unplugged| {
            let found = known.look(&process, &ram, &mut OpenFiles::default()).unwrap();
            assert_eq!(found, [0; 0], "it is open");
            assert!(known.is_unchanged(&process, &ram).unwrap());
            std::mem::take(&mut known.doubted)
        };
        assert!(!known.is_unchanged(&process, &ram).unwrap(), "nothing was seen");
        assert_eq!(look(&mut known), [0; 0]);
        assert!(known.is_astray, "what was before is not known");
        for closed in [&mut first, &mut last] {
            drop(closed.take());
            assert!(!known.is_unchanged(&process, &ram).unwrap());
            assert_eq!(look(&mut known), [0]);
            assert_eq!(look(&mut known), [0; 0]);
        }
        // A descriptor that was opened meanwhile.
        let more = again();
        assert_eq!(look(&mut known), [0; 0]);
        drop(more);
        assert_eq!(look(&mut known), [0]);
    }

    #[test]
    fn a_failure_is_reported_once_and_tried_again_after_a_pause() {
        let mut known = Unplugged::default();
        let fails = |why: &'static str| move |_: &[usize]| Err(io::Error::other(why));
        let nothing = |_| Ok(());
        assert_eq!(known.finish(nothing, |_| unreachable!()), (false, None));
        known.doubt(1);
        let (tried, warning) = known.finish(nothing, fails("no room"));
        assert!(tried && warning.is_some_and(|warning| warning.contains("no room")));
        assert_eq!(known.finish(nothing, |_| unreachable!()), (false, None), "it is not due");
        known.doubt(2);
        assert_eq!(known.finish(nothing, fails("no room")), (true, None), "as before");
        known.doubt(2);
        assert!(known.finish(nothing, fails("bad sector")).1.is_some());
        known.retry.worked();
        known.unfinished.push(0);
        let back = |files: &[usize]| {
            assert_eq!(files, [1, 2]);
            Ok(())
        };
        assert!(known.finish(|_| Err(io::Error::other("no room")), back).1.is_some());
        known.retry.worked();
        assert_eq!(known.finish(nothing, |_| unreachable!()), (true, None));
        assert_eq!(known.finish(nothing, |_| unreachable!()), (false, None), "nothing is left");
    }
}
