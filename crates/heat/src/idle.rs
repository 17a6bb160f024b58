//! Tracking by the host kernel's idle page tracking, for guests that are not known.
//!
//! The kernel looks at the accessed bit wherever a frame of the host is mapped, in KVM's tables
//! too, and the guest takes no fault. It looks frame by frame, at idle frames as well, so the cost
//! follows the size of the VM. A VM with too much memory for this is refused
//! ([`TrackError::TooMuch`]).

use std::io;

use ebb_sys::page_idle::{FRAMES_PER_WORD, PageIdle};
use ebb_sys::pagemap::Pagemap;
use ebb_sys::uffd::HvaRange;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Hva};
use ebb_vm::{Ram, Region};

use crate::{Access, HostPages, Observer, Round, TrackError, Tracker, Verdict, Walk};

/// Pages to look at at once.
const PAGES: u64 = 32768;
/// Part of the pages to be marked that may keep no mark: one in this many. A page keeps none if it
/// is in use just now, or not yet among those that the kernel reclaims. Of huge pages, hardly any
/// keeps one.
const UNMARKED_PART: u64 = 2;
/// Fewest marked pages that say something about the others.
const MARKED_MIN: u64 = 4096;

/// Tracks uses of the frames that one VMM has mapped.
pub struct IdleTracker<'a> {
    ram: &'a Ram,
    pagemap: &'a Pagemap,
    idle: &'a PageIdle,
    pages: &'a dyn HostPages,
    goes_on: &'a dyn Fn() -> bool,
}

impl<'a> IdleTracker<'a> {
    /// A tracker of the VMM that `pagemap` belongs to. A round is given up when `goes_on` says no.
    pub fn new(
        ram: &'a Ram,
        pagemap: &'a Pagemap,
        idle: &'a PageIdle,
        pages: &'a dyn HostPages,
        goes_on: &'a dyn Fn() -> bool,
    ) -> IdleTracker<'a> {
        IdleTracker { ram, pagemap, idle, pages, goes_on }
    }

    /// The pages mapped from page `from` of the region on, in order of the host's frames.
    fn mapped(&self, region: &Region, from: u64) -> io::Result<Vec<Mapped>> {
        let (frames, mut mapped) = (region.frames(), Vec::new());
        let first = frames.start.0 + from;
        let bytes = PAGES.min(frames.count - from) * FRAME_BYTES;
        let range = HvaRange { start: Hva(region.hva.0 + from * FRAME_BYTES), bytes };
        self.pagemap.frames(range, |page, frame| {
            mapped.push(Mapped { frame, gfn: Gfn(first + page) });
        })?;
        mapped.sort_unstable_by_key(|page| page.frame);
        Ok(mapped)
    }

    /// Reports which of these pages were used. Their words must lie side by side.
    fn look(
        &self,
        pages: &[Mapped],
        walk: Walk,
        tally: &mut RoundTally,
        observer: &mut dyn Observer,
    ) -> io::Result<()> {
        let [Some(first), Some(last)] = [pages.first(), pages.last()] else { return Ok(()) };
        let word = first.word();
        let mut idle = vec![0; usize::try_from(last.word() - word + 1).unwrap_or(0)];
        if walk == Walk::Pruned {
            self.idle.read(word, &mut idle)?;
        }
        let mut marks = vec![0; idle.len()];
        for page in pages {
            let at = (page.word() - word) as usize;
            if idle[at] & page.bit() != 0 {
                continue;
            }
            tally.round.used_entries += 1;
            if observer.saw(FrameRange::new(page.gfn, 1), Access::Read) == Verdict::Clear {
                tally.round.cleared_entries += 1;
                tally.last_cleared = Some(page.gfn);
                marks[at] |= page.bit();
            }
        }
        if marks.iter().any(|&mark| mark != 0) {
            self.idle.mark(word, &marks)?;
        }
        if walk == Walk::Full {
            self.idle.read(word, &mut idle)?;
            let kept = idle.iter().zip(&marks).map(|(idle, mark)| (idle & mark).count_ones());
            tally.kept += kept.map(u64::from).sum::<u64>();
        }
        Ok(())
    }

    /// Has processors drop translations: one that a processor keeps sets no bit again. Taking a
    /// range out of the VMM's page table has them drop all of the guest's under KVM, and all of the
    /// VMM's if the range is more than a few pages.
    fn forget_translations(&self, near: Gfn) -> io::Result<()> {
        let clip = |frames| self.ram.clip(frames);
        let frames = clip(FrameRange::huge(near.huge())).or_else(|| clip(FrameRange::new(near, 1)));
        let range = frames.and_then(|frames| self.ram.hva_range(frames));
        range.map_or(Ok(()), |range| self.pages.forget(&[range]))
    }
}

impl Tracker for IdleTracker<'_> {
    fn round(&mut self, walk: Walk, observer: &mut dyn Observer) -> Result<Round, TrackError> {
        let mut tally = RoundTally::default();
        for region in self.ram.regions() {
            for from in (0..region.frames().count).step_by(PAGES as usize) {
                let mapped = self.mapped(region, from)?;
                for pages in mapped.chunk_by(|one, next| next.word() - one.word() <= 1) {
                    self.look(pages, walk, &mut tally, observer)?;
                }
                if !(self.goes_on)() {
                    return Err(TrackError::TooMuch);
                }
            }
        }
        let cleared = tally.round.cleared_entries;
        let unmarked_max = cleared / UNMARKED_PART;
        if walk == Walk::Full && cleared > MARKED_MIN && tally.unmarked() > unmarked_max {
            return Err(TrackError::Unmarked);
        }
        if let Some(gfn) = tally.last_cleared {
            self.forget_translations(gfn)?;
        }
        Ok(tally.round)
    }
}

#[derive(Default)]
struct RoundTally {
    round: Round,
    /// In a full round: pages that were marked, and whose mark was seen to stay.
    kept: u64,
    last_cleared: Option<Gfn>,
}

impl RoundTally {
    fn unmarked(&self) -> u64 {
        self.round.cleared_entries.saturating_sub(self.kept)
    }
}

/// A page of the guest's, and the frame of the host's that backs it.
struct Mapped {
    frame: u64,
    gfn: Gfn,
}

impl Mapped {
    fn word(&self) -> u64 {
        self.frame / FRAMES_PER_WORD
    }

    fn bit(&self) -> u64 {
        1 << (self.frame % FRAMES_PER_WORD)
    }
}
