//! Memory that a VMM has unplugged: noticed, put on record, and let go of.
//!
//! The record comes first. Once it says that a region is gone, no daemon looks for its memfd by a
//! number that another file may have by then; and whatever of it a daemon did not come to, the
//! next one does, since it lets go of all that is on record as gone. Without room for the record
//! the region is let go of all the same: that it is gone can be proved again.

use std::io;
use std::path::Path;
use std::sync::Arc;

use ebb_pager::Pager;
use ebb_sys::process::Process;
use ebb_units::{Bytes, Gpa};
use ebb_vm::{Ram, layout, unplugged};

use crate::open_files::OpenFiles;
use crate::record::Record;
use crate::worker::State;

/// What is known of where a VMM has the files of its RAM open.
#[derive(Default)]
pub struct Unplugged {
    /// For each file a descriptor of the VMM that was seen to be it.
    numbers: Vec<Option<i32>>,
    /// Files that are gone and were not let go of to the end.
    unfinished: Vec<usize>,
    /// Some may be mapped nowhere, and have content elsewhere.
    is_astray: bool,
}

impl Unplugged {
    /// Which files are gone since the last look.
    fn look(
        &mut self,
        process: &Process,
        ram: &Ram,
        open: &mut OpenFiles,
    ) -> io::Result<Vec<usize>> {
        self.numbers.resize(ram.files().len(), None);
        let (mut suspects, mut there) = (Vec::new(), 0);
        for (file, backing) in ram.files().iter().enumerate().filter(|(at, _)| !ram.is_gone(*at)) {
            let inode = backing.file.identity()?.1;
            let number = self.numbers[file];
            match number.map(|number| process.descriptor_inode(number)).transpose()?.flatten() {
                Some(now) if now == inode => there += 1,
                _ => suspects.push((file, inode)),
            }
        }
        if suspects.is_empty() {
            return Ok(Vec::new());
        }
        let inodes: Vec<u64> = suspects.iter().map(|(_, inode)| *inode).collect();
        let gone = unplugged::gone(process, &inodes)?;
        // What has no memory at all is no VM any more: its end is for others to tell.
        if there == 0 && gone.len() == inodes.len() {
            return Ok(Vec::new());
        }
        let (gone, there): (Vec<_>, Vec<_>) =
            suspects.into_iter().partition(|(_, inode)| gone.contains(inode));
        self.is_astray |= !there.is_empty();
        self.find(process, &there, open)?;
        Ok(gone.into_iter().map(|(file, _)| file).collect())
    }

    /// Finds a descriptor of each of these files.
    fn find(
        &mut self,
        process: &Process,
        files: &[(usize, u64)],
        open: &mut OpenFiles,
    ) -> io::Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        for &(number, ref link) in open.of(process)? {
            if !link.starts_with("/memfd:") {
                continue;
            }
            let inode = process.descriptor_inode(number)?;
            for (file, _) in files.iter().filter(|(_, wanted)| Some(*wanted) == inode) {
                self.numbers[*file] = Some(number);
            }
        }
        Ok(())
    }
}

/// Has the pager watch nothing but memory of the guest's, whatever the VMM has mapped there since.
///
/// # Errors
/// As dup(2).
pub fn mind(pager: &Pager, process: &Process) -> io::Result<()> {
    let (vmm, ram) = (process.try_clone()?, Arc::clone(pager.ram()));
    pager.check_mapped(move |ranges| unplugged::mapped(&vmm, &ram, ranges));
    Ok(())
}

/// Puts on record what a VM that is taken up has lost since its record was written.
pub fn note(record: &mut Record, ram: &Ram, directory: &Path) {
    let mut news = false;
    for region in record.regions.iter_mut().filter(|region| !region.gone) {
        region.gone = ram.place(Gpa(region.gpa)).is_none();
        news |= region.gone;
    }
    if news {
        tracing::info!("{}: QEMU has unplugged memory of it meanwhile", record.name);
        if let Err(error) = record.save(directory) {
            tracing::warn!("{}: its record: {error}", record.name);
        }
    }
}

/// Lets go of all that is gone already when a VM is taken up.
///
/// # Errors
/// As [`Pager::let_go`].
pub fn let_go(pager: &Pager) -> io::Result<()> {
    let ram = pager.ram();
    (0..ram.files().len()).filter(|file| ram.is_gone(*file)).try_for_each(|file| pager.let_go(file))
}

impl State {
    /// Looks whether the VMM has all of the memory that it had, and lets go of what it has not.
    pub(crate) fn keep_regions(&mut self, open: &mut OpenFiles) {
        let pager = Arc::clone(&self.held.pager);
        let gone = self.unplugged.look(&self.held.process, pager.ram(), open);
        let gone = gone.unwrap_or_else(|error| {
            tracing::debug!("{}: its memory in QEMU: {error}", self.held.record.name);
            Vec::new()
        });
        for &file in &gone {
            self.note_gone(file);
        }
        let name = &self.held.record.name;
        let mut left = std::mem::take(&mut self.unplugged.unfinished);
        left.extend(gone);
        left.retain(|&file| {
            let done = pager.let_go(file);
            done.inspect_err(|error| tracing::warn!("{name}: letting go of memory: {error}"))
                .is_err()
        });
        self.unplugged.unfinished = left;
        if self.unplugged.is_astray {
            // Who maps it anew finds all of it there.
            let back = pager.give_back_unmapped();
            self.unplugged.is_astray = back.is_err();
            if let Err(error) = back {
                tracing::warn!("{name}: memory that QEMU has mapped nowhere: {error}");
            }
        }
    }

    /// Whether a part of its RAM can leave: one that is alone in its file stays.
    pub(crate) fn may_lose_regions(&self) -> bool {
        self.held.pager.ram().files().len() > 1
    }

    /// Whether the guest speaks of the same memory as we do, by its address.
    /// A QEMU that does not tell is asked again.
    pub(crate) fn is_in_place(&mut self) -> bool {
        if !self.may_lose_regions() {
            return true;
        }
        let Some(qmp) = self.held.qmp.as_mut() else { return false };
        match layout::moved(qmp, self.held.pager.ram()) {
            Ok(None) => true,
            Ok(Some(at)) => {
                self.insight.forget(&format!(
                    "a memory device was unplugged, and other memory is at its address {:#x} now: \
                     delete its back end, or detach and attach the VM",
                    at.0
                ));
                false
            }
            Err(error) => {
                tracing::debug!("{}: its memory devices: {error}", self.held.record.name);
                false
            }
        }
    }

    fn note_gone(&mut self, file: usize) {
        let ram = Arc::clone(self.held.pager.ram());
        let record = &mut self.held.record;
        let (mut bytes, mut at) = (0, None);
        for region in ram.regions_in(file) {
            bytes += region.bytes;
            at = at.or(Some(region.gpa.0));
            for known in record.regions.iter_mut().filter(|known| known.gpa == region.gpa.0) {
                known.gone = true;
            }
        }
        // What was never there, or not any more, is not what the guest has returned.
        let resident = ram.files()[file].file.resident_bytes().unwrap_or(0);
        let absent = &mut record.totals.absent_at_hold_bytes;
        *absent = absent.saturating_sub(bytes.saturating_sub(resident));
        tracing::info!(
            "{}: QEMU has unplugged {} at {:#x}: it is let go of",
            record.name,
            Bytes(bytes),
            at.unwrap_or(0)
        );
        self.save();
    }
}
