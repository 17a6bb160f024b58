//! Tracking by the VMM's page table, for guests that are not known.
//!
//! What the VMM has mapped since its page table was last emptied was used in between, so uses by
//! devices count too. Each page in use costs the guest a minor fault a round, except pages at rest.
//! Writes cannot be distinguished from reads.

use std::io;

use ebb_sys::pagemap::Pagemap;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn};
use ebb_vm::Ram;

use crate::{Access, Observer, Round, TrackError, Tracker, Verdict, Walk};

/// A VMM's page table.
pub trait HostPages {
    /// Takes ranges of the RAM out of the page table. The memory stays.
    ///
    /// # Errors
    /// From the host.
    fn forget(&self, ranges: &[HvaRange]) -> io::Result<()>;
}

/// Tracks uses by one VMM's page table.
pub struct HostTracker<'a> {
    ram: &'a Ram,
    pagemap: &'a Pagemap,
    pages: &'a dyn HostPages,
}

impl<'a> HostTracker<'a> {
    /// A tracker of the VMM that `pagemap` belongs to.
    pub fn new(ram: &'a Ram, pagemap: &'a Pagemap, pages: &'a dyn HostPages) -> HostTracker<'a> {
        HostTracker { ram, pagemap, pages }
    }
}

impl Tracker for HostTracker<'_> {
    fn round(&mut self, walk: Walk, observer: &mut dyn Observer) -> Result<Round, TrackError> {
        let (mut round, mut forgotten) = (Round::default(), Vec::new());
        for region in self.ram.regions() {
            let range = region.hva_range();
            if walk == Walk::Full {
                // The whole region at once, instead of piece by piece.
                forgotten.push(range);
            }
            let mut pieces = Pieces { observer, round: &mut round, last: None, ranges: Vec::new() };
            let base = region.gpa.gfn().0;
            self.pagemap.mapped(range, |part| {
                let first = base + (part.start.0 - range.start.0) / FRAME_BYTES;
                pieces.mapped(FrameRange::new(Gfn(first), part.bytes / FRAME_BYTES));
            })?;
            if walk == Walk::Pruned {
                let host =
                    |huge: FrameRange| self.ram.clip(huge).and_then(|f| self.ram.hva_range(f));
                join(pieces.ranges.into_iter().filter_map(host), &mut forgotten);
            }
        }
        if !forgotten.is_empty() {
            self.pages.forget(&forgotten)?;
        }
        Ok(round)
    }
}

/// What is mapped, huge frame by huge frame. A huge frame with any page that is not at rest is
/// forgotten as a whole: a call for each page would cost more than the faults that it saves.
struct Pieces<'a> {
    observer: &'a mut dyn Observer,
    round: &'a mut Round,
    last: Option<FrameRange>,
    ranges: Vec<FrameRange>,
}

impl Pieces<'_> {
    fn mapped(&mut self, frames: FrameRange) {
        for gfn in frames.frames() {
            self.round.used_entries += 1;
            let huge = FrameRange::huge(gfn.huge());
            if self.observer.saw(FrameRange::new(gfn, 1), Access::Read) == Verdict::Clear {
                self.round.cleared_entries += 1;
                if self.last != Some(huge) {
                    self.last = Some(huge);
                    self.ranges.push(huge);
                }
            }
        }
    }
}

/// Appends ranges, and joins neighbours.
fn join(ranges: impl Iterator<Item = HvaRange>, to: &mut Vec<HvaRange>) {
    for range in ranges {
        match to.last_mut() {
            Some(last) if last.start.0 + last.bytes == range.start.0 => last.bytes += range.bytes,
            _ => to.push(range),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Levels, Uses};
    use ebb_sys::mapping::Mapping;
    use ebb_sys::process::Process;
    use ebb_sys::ram_file::RamFile;
    use ebb_units::{Gpa, Hva};
    use ebb_vm::Region;
    use ebb_vm::ram::Backing;
    use std::sync::atomic::Ordering::Relaxed;

    const BYTES: u64 = 16 << 20;

    /// This process as the VMM: it has the RAM mapped once more.
    struct Own(Mapping);

    impl HostPages for Own {
        fn forget(&self, ranges: &[HvaRange]) -> io::Result<()> {
            let start = self.0.address().0;
            ranges.iter().try_for_each(|range| self.0.forget(range.start.0 - start, range.bytes))
        }
    }

    impl Own {
        fn touch(&self, frame: u64) {
            // A write maps one page; a read maps those around it.
            self.0.words(frame * FRAME_BYTES, 1).unwrap()[0].store(frame, Relaxed);
        }
    }

    fn ram(own: &Mapping, file: RamFile) -> Ram {
        let mapping = Mapping::new(&file, 0, BYTES).unwrap();
        let half = BYTES / 2;
        let region = |gpa, at| Region {
            gpa: Gpa(gpa),
            bytes: half,
            hva: Hva(own.address().0 + at),
            file: 0,
            offset: at,
        };
        Ram::new(vec![region(0, 0), region(1 << 32, half)], vec![Backing::new(file, mapping)])
            .unwrap()
    }

    #[test]
    fn finds_what_the_vmm_touched() {
        let file = RamFile::create("heat-test", BYTES).unwrap();
        let own = Own(Mapping::new(&file, 0, BYTES).unwrap());
        own.0.use_huge_pages(false).unwrap();
        let ram = ram(&own.0, file);
        let pagemap = Pagemap::open(&Process::open(std::process::id() as i32).unwrap()).unwrap();
        let frames: Vec<FrameRange> = ram.regions().map(Region::frames).collect();
        let mut levels = Levels::new(&frames, 7);
        let mut tracker = HostTracker::new(&ram, &pagemap, &own);
        (0..BYTES / FRAME_BYTES).for_each(|frame| own.touch(frame));
        match tracker.round(Walk::Full, &mut levels) {
            Err(TrackError::Host(error)) if error.raw_os_error() == Some(25) => {
                eprintln!("SKIPPED: the kernel has no PAGEMAP_SCAN");
                return;
            }
            round => assert_eq!(round.unwrap().used_entries, BYTES / FRAME_BYTES),
        }
        let hot: Vec<u64> = (0..BYTES / FRAME_BYTES).filter(|frame| frame % 5 == 0).collect();
        for _ in 0..8 {
            hot.iter().for_each(|&frame| own.touch(frame));
            levels.next_window();
            tracker.round(Walk::Pruned, &mut levels).unwrap();
        }
        let (half, high) = (BYTES / 2 / FRAME_BYTES, 1 << 20);
        for (gfn, uses) in levels.all_uses() {
            let frame = if gfn.0 >= high { gfn.0 - high + half } else { gfn.0 };
            let reads = if frame % 5 == 0 { 8 } else { 0 };
            assert_eq!(uses, Uses { reads, writes: 0 }, "{gfn:?}");
        }
    }
}
