//! Large folios in a VM of small pages: memory that came before huge pages were forbidden there,
//! or came by another way.
//!
//! A punched part of a large folio may stay in the file as zeros, which the guest then reads:
//! the kernel splits the folio only if nobody uses any of it at that moment. So frames go one by
//! one once they are known to be in small pages, and stay so: from then on nobody makes large
//! ones. What is in a large folio is split before, or goes with its whole huge frame.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use ebb_sys::folios;
use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, HUGE_BYTES};

use crate::pager::{Grain, Pager};

/// What is known of the pages that the VM's memory is in.
pub(crate) struct Folios {
    /// A bit for each frame: it is in a small page.
    small: Vec<AtomicU64>,
    telling: OnceLock<Telling>,
}

/// Who tells.
struct Telling {
    folios: folios::Folios,
    vmm: Process,
    own: Process,
}

impl Folios {
    pub(crate) fn new(frames: u64) -> Folios {
        let words = frames.div_ceil(u64::BITS.into());
        Folios { small: (0..words).map(|_| AtomicU64::new(0)).collect(), telling: OnceLock::new() }
    }

    fn is_small(&self, gfn: Gfn) -> bool {
        let (word, bit) = (gfn.0 / 64, gfn.0 % 64);
        let word = usize::try_from(word).ok().and_then(|at| self.small.get(at));
        word.is_some_and(|word| word.load(Acquire) & 1 << bit != 0)
    }

    /// Nothing is known to be small any more: somebody else maps the memory, and may have brought
    /// it in larger pieces.
    pub(crate) fn forget(&self) {
        self.small.iter().for_each(|word| word.store(0, Release));
    }

    fn note_small(&self, gfn: Gfn) {
        if let Some(word) = usize::try_from(gfn.0 / 64).ok().and_then(|at| self.small.get(at)) {
            word.fetch_or(1 << (gfn.0 % 64), Release);
        }
    }
}

impl Pager {
    /// From now on frames are looked at before they are evicted one by one, and large folios are
    /// split in the VMM. Huge pages must be forbidden there and here by now. Once.
    ///
    /// # Errors
    /// The host does not tell large folios: see [`folios::Folios::open`].
    pub fn mind_large_folios(&self, vmm: Process) -> io::Result<()> {
        let telling = Telling { folios: folios::Folios::open()?, vmm, own: Process::own()? };
        // A second one would tell the same.
        let _ = self.folios.telling.set(telling);
        Ok(())
    }

    /// Whether large folios are minded.
    pub fn minds_large_folios(&self) -> bool {
        self.folios.telling.get().is_some()
    }

    /// Whether these frames of one huge frame, which are held, go together or not at all.
    pub(crate) fn goes_whole(&self, frames: impl IntoIterator<Item = Gfn>) -> bool {
        let may_be_large = |gfn| self.minds_large_folios() && !self.folios.is_small(gfn);
        self.grain == Grain::Huge || frames.into_iter().any(may_be_large)
    }

    /// Splits the large folios that held frames of one huge frame are in, as far as they can be
    /// split now. Afterwards [`Pager::goes_whole`] tells.
    pub(crate) fn split_folios(&self, frames: &[Gfn]) -> io::Result<()> {
        let (Some(telling), Some(first)) = (self.folios.telling.get(), frames.first()) else {
            return Ok(());
        };
        let huge = FrameRange::huge(first.huge()).frames();
        let here = |gfn: &Gfn| self.ram.here(*gfn);
        let there = |gfn| self.hva(FrameRange::new(gfn, 1)).ok().map(|range| range.start);
        if self.look(telling, frames)?.is_empty() {
            return Ok(());
        }
        // The VMM may have mapped other parts of them than these.
        self.report_split(folios::split(&telling.vmm, huge.filter_map(there)));
        let large = self.look(telling, frames)?;
        if large.is_empty() {
            return Ok(());
        }
        // Or none at all: mapped here, they are ours to split.
        self.map_data(&large)?;
        self.report_split(folios::split(&telling.own, large.iter().filter_map(here)));
        self.look(telling, &large).map(drop)
    }

    fn report_split(&self, result: io::Result<()>) {
        if let Err(error) = result {
            tracing::debug!("splitting large folios: {error}");
        }
    }

    /// Notes which of these held frames are in small pages. Returns those in large ones. On
    /// return none is mapped here, or nobody else could split them.
    fn look(&self, telling: &Telling, frames: &[Gfn]) -> io::Result<Vec<Gfn>> {
        let unknown = frames.iter().copied().filter(|gfn| !self.folios.is_small(*gfn));
        let unknown: Vec<Gfn> = unknown.collect();
        self.map_data(&unknown)?;
        let mut large = Vec::new();
        let mut looked = Ok(());
        for run in runs(&unknown) {
            let Some(start) = self.ram.here(run.start) else { continue };
            let range = HvaRange { start, bytes: run.count * FRAME_BYTES };
            let visit = |page: u64, is_large| match Gfn(run.start.0 + page) {
                gfn if is_large => large.push(gfn),
                gfn => self.folios.note_small(gfn),
            };
            looked = looked.and(telling.folios.look(range, visit));
            self.ram.forget(run)?;
            // What comes into a hole from now on is small.
            let unseen = |gfn: &Gfn| !self.folios.is_small(*gfn) && !large.contains(gfn);
            for gfn in run.frames().filter(unseen) {
                if self.ram.is_hole(FrameRange::new(gfn, 1))? {
                    self.folios.note_small(gfn);
                }
            }
        }
        looked.map(|()| large)
    }

    /// Maps what is in memory, or on its way there, of frames that are held.
    fn map_data(&self, frames: &[Gfn]) -> io::Result<()> {
        runs(frames).into_iter().try_for_each(|run| self.ram.map_data(run))
    }

    /// Whether large folios lie in one huge frame each, and this one is all of it RAM.
    pub(crate) fn holds_whole_folios(&self, gfn: Gfn) -> bool {
        let place = self.ram.range(FrameRange::huge(gfn.huge()));
        place.is_some_and(|place| place.offset.is_multiple_of(HUGE_BYTES))
    }
}

/// Frames in a row, within one region.
fn runs(frames: &[Gfn]) -> Vec<FrameRange> {
    let mut runs = Vec::new();
    frames.iter().for_each(|gfn| FrameRange::new(*gfn, 1).join(&mut runs));
    runs
}
