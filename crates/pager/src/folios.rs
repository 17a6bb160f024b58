//! Large folios where frames are evicted one by one: in a VM of small pages, memory that came
//! before huge pages were forbidden there; in a VM of huge pages, huge frames that were broken up
//! (`docs/decisions/0043-*`).
//!
//! A punched part of a large folio may stay in the file as zeros, which the guest then reads: the
//! kernel splits the folio only if nobody uses any of it at that moment. So frames are evicted one
//! by one only once they are known to be in small pages, and they stay so, because from then on
//! nobody makes large folios there. A large folio is split first, or evicted with its whole huge
//! frame.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, OnceLock};

use ebb_sys::process::Process;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE, FrameRange, Gfn, HUGE_BYTES, HugeFrame};

use crate::frames::Frames;
use ebb_sys::folios;

pub mod mapped;

/// The grain in which missing memory is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grain {
    /// A frame at a time: small pages back the memory.
    Frame,
    /// A huge frame at a time.
    Huge,
}

/// What is known of the pages that back the VM's memory.
pub struct FolioMap {
    frames: Arc<Frames>,
    grain: Grain,
    /// A bit for each frame: a small page backs it.
    small: Bits,
    /// A bit for each huge frame: it was broken up.
    broken: Bits,
    telling: OnceLock<Telling>,
    /// Set by [`FolioMap::on_forget`].
    forget_other_maps: OnceLock<Forget>,
}

type Forget = Box<dyn Fn(FrameRange) + Send + Sync>;

/// What tells large folios, and the processes in which they are split.
struct Telling {
    folios: folios::Folios,
    vmm: Process,
    own_process: Process,
}

struct Bits(Vec<AtomicU64>);

impl Bits {
    fn new(count: u64) -> Bits {
        Bits((0..count.div_ceil(u64::BITS.into())).map(|_| AtomicU64::new(0)).collect())
    }

    fn word(&self, index: u64) -> Option<&AtomicU64> {
        self.0.get(usize::try_from(index / 64).ok()?)
    }

    fn has(&self, index: u64) -> bool {
        self.word(index).is_some_and(|word| word.load(Acquire) >> (index % 64) & 1 != 0)
    }

    fn set(&self, index: u64) {
        if let Some(word) = self.word(index) {
            word.fetch_or(1 << (index % 64), Release);
        }
    }

    fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Release));
    }
}

impl FolioMap {
    pub(crate) fn new(frames: &Arc<Frames>, grain: Grain) -> FolioMap {
        let count = frames.ram().end().0;
        FolioMap {
            frames: Arc::clone(frames),
            grain,
            small: Bits::new(count),
            broken: Bits::new(count.div_ceil(FRAMES_PER_HUGE)),
            telling: OnceLock::new(),
            forget_other_maps: OnceLock::new(),
        }
    }

    fn is_small(&self, gfn: Gfn) -> bool {
        self.small.has(gfn.0)
    }

    /// Forgets which frames are in small pages, and which huge frames are broken up: another
    /// process maps the memory, and may bring larger pages.
    pub(crate) fn forget(&self) {
        self.broken.clear();
        self.small.clear();
    }

    fn note_small(&self, gfn: Gfn) {
        self.small.set(gfn.0);
    }
}

impl FolioMap {
    /// The grain in which the VM's memory is given, except in huge frames that are broken up:
    /// [`FolioMap::grain_of`].
    pub fn grain(&self) -> Grain {
        self.grain
    }

    /// From now on frames are looked at before they are evicted one by one, and large folios are
    /// split in the VMM. Huge pages must be forbidden by now wherever frames are evicted one by
    /// one. Takes effect once.
    ///
    /// # Errors
    /// The host does not tell large folios: see [`folios::Folios::open`].
    pub fn mind_large_folios(&self, vmm: Process) -> io::Result<()> {
        let (folios, own_process) = (folios::Folios::open()?, Process::own()?);
        let telling = Telling { folios, vmm, own_process };
        // A second one would tell the same.
        let _ = self.telling.set(telling);
        Ok(())
    }

    /// Whether large folios are looked for and split.
    pub fn minds_large_folios(&self) -> bool {
        self.telling.get().is_some()
    }

    /// Whether these locked frames of one huge frame must be evicted together or not at all.
    pub(crate) fn goes_whole(&self, frames: impl IntoIterator<Item = Gfn>) -> bool {
        let may_be_large = |gfn: Gfn| match self.grain_of(gfn.huge()) {
            Grain::Huge => true,
            Grain::Frame => self.minds_large_folios() && !self.is_small(gfn),
        };
        frames.into_iter().any(may_be_large)
    }

    /// The grain in which a huge frame's memory is given, and evicted.
    pub fn grain_of(&self, huge: HugeFrame) -> Grain {
        if self.broken.has(huge.0) { Grain::Frame } else { self.grain }
    }

    /// Whether [`FolioMap::break_up`] may be called: the host tells large folios, and those of this
    /// huge frame lie in no other one.
    pub fn can_break_up(&self, huge: HugeFrame) -> bool {
        self.minds_large_folios() && self.holds_whole_folios(huge.first())
    }

    /// Breaks up a huge frame: from now on its frames are evicted one by one. A second call does no
    /// harm.
    ///
    /// Nobody may make a large folio there any more: not the VMM, not this process
    /// ([`ebb_vm::Ram::use_small_pages`]), and not khugepaged, which must have been
    /// [asleep](ebb_sys::khugepaged::is_asleep) since.
    ///
    /// # Errors
    /// `Unsupported`: [`FolioMap::can_break_up`] says no.
    pub fn break_up(&self, huge: HugeFrame) -> io::Result<()> {
        let telling = { self.telling.get() }.filter(|_| self.can_break_up(huge));
        let telling = telling.ok_or(io::ErrorKind::Unsupported)?;
        let frames = FrameRange::huge(huge);
        // A thread that is about to bring a large folio there has locked the words. Frames are
        // looked at with their words locked, so after that.
        self.broken.set(huge.0);
        self.forget_here(frames);
        let there = |gfn| self.frames.hva(FrameRange::new(gfn, 1)).ok().map(|range| range.start);
        // The split is done here and not at the eviction: afterwards each page is mapped by itself,
        // so that its use is seen.
        self.report_split(folios::split(&telling.vmm, frames.frames().filter_map(there)));
        Ok(())
    }

    /// Splits the large folios that back locked frames of one huge frame, as far as that is
    /// possible now. Afterwards [`FolioMap::goes_whole`] tells the result.
    pub(crate) fn split_folios(&self, frames: &[Gfn]) -> io::Result<()> {
        let (Some(telling), Some(first)) = (self.telling.get(), frames.first()) else {
            return Ok(());
        };
        let huge = FrameRange::huge(first.huge()).frames();
        let here = |gfn: &Gfn| self.frames.ram().here(*gfn);
        let there = |gfn| self.frames.hva(FrameRange::new(gfn, 1)).ok().map(|range| range.start);
        if self.look(telling, frames)?.is_empty() {
            return Ok(());
        }
        // The VMM, or a device of ours, may have mapped other parts of these folios.
        self.forget_here(FrameRange::huge(first.huge()));
        self.report_split(folios::split(&telling.vmm, huge.filter_map(there)));
        let large = self.look(telling, frames)?;
        if large.is_empty() {
            return Ok(());
        }
        // The VMM may have mapped none of it: mapped here, the folios are this process's to split.
        self.map_data(&large)?;
        self.report_split(folios::split(&telling.own_process, large.iter().filter_map(here)));
        self.look(telling, &large).map(drop)
    }

    /// Sets the function that takes frames out of page tables of this process when large folios are
    /// split. It is for whoever maps the guest's memory beside the pager. Takes effect once.
    pub fn on_forget(&self, forget: impl Fn(FrameRange) + Send + Sync + 'static) {
        // A second function would only be told of the same.
        let _ = self.forget_other_maps.set(Box::new(forget));
    }

    /// Takes these frames out of this process's page tables: the kernel splits no folio that two
    /// processes map.
    fn forget_here(&self, frames: FrameRange) {
        if let Some(forget) = self.forget_other_maps.get() {
            forget(frames);
        }
        for part in self.frames.ram().parts(frames) {
            self.frames.report("forget", self.frames.ram().forget(part));
        }
    }

    fn report_split(&self, result: io::Result<()>) {
        if let Err(error) = result {
            tracing::debug!("splitting large folios: {error}");
        }
    }

    /// Notes which of these locked frames are in small pages, and returns those in large ones. On
    /// return none is mapped here, as nobody else could split them then.
    fn look(&self, telling: &Telling, frames: &[Gfn]) -> io::Result<Vec<Gfn>> {
        let unknown = frames.iter().copied().filter(|gfn| !self.is_small(*gfn));
        let unknown: Vec<Gfn> = unknown.collect();
        let mut large = Vec::new();
        let looked = self.look_at(telling, &unknown, &mut large);
        // The kernel has mapped what lies around them, too.
        let around =
            unknown.first().map(|gfn| self.frames.ram().parts(FrameRange::huge(gfn.huge())));
        let forget = |part| self.frames.ram().forget(part);
        let forgotten = around.into_iter().flatten().map(forget).fold(Ok(()), io::Result::and);
        looked.and(forgotten).map(|()| large)
    }

    fn look_at(&self, telling: &Telling, unknown: &[Gfn], large: &mut Vec<Gfn>) -> io::Result<()> {
        self.map_data(unknown)?;
        for run in self.runs(unknown) {
            let Some(start) = self.frames.ram().here(run.start) else { continue };
            let range = HvaRange { start, bytes: run.count * FRAME_BYTES };
            let visit = |page: u64, is_large| match Gfn(run.start.0 + page) {
                gfn if is_large => large.push(gfn),
                gfn => self.note_small(gfn),
            };
            telling.folios.look(range, visit)?;
            // A page that fills a hole from now on is small.
            let unseen = |gfn: &Gfn| !self.is_small(*gfn) && !large.contains(gfn);
            for gfn in run.frames().filter(unseen) {
                if self.frames.ram().is_hole(FrameRange::new(gfn, 1))? {
                    self.note_small(gfn);
                }
            }
        }
        Ok(())
    }

    /// Maps those of the locked frames that are in memory, or on their way there.
    fn map_data(&self, frames: &[Gfn]) -> io::Result<()> {
        self.runs(frames).into_iter().try_for_each(|run| self.frames.ram().map_data(run))
    }

    /// The parts of RAM that frames in order form, each in one region.
    fn runs(&self, frames: &[Gfn]) -> Vec<FrameRange> {
        let mut runs = Vec::new();
        frames.iter().for_each(|gfn| FrameRange::new(*gfn, 1).join(&mut runs));
        runs.into_iter().flat_map(|run| self.frames.ram().parts(run)).collect()
    }

    /// Whether each large folio lies in one huge frame, and all of this huge frame is RAM.
    pub fn holds_whole_folios(&self, gfn: Gfn) -> bool {
        let place = self.frames.ram().range(FrameRange::huge(gfn.huge()));
        place.is_some_and(|place| place.offset.is_multiple_of(HUGE_BYTES))
    }
}
