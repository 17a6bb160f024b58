//! Reclaiming huge frames: hard, until they are returned; soft, until the guest touches them.

use std::io;
use std::time::{Duration, Instant};

use ebb_llfree::{CHUNK_AREAS, Host};
use ebb_pager::{LockedHuge, Pager};
use ebb_units::{FRAMES_PER_HUGE, HUGE_BYTES};

use super::zone::Zone;
use super::{HyperAlloc, State};

/// Huge frames to reclaim together, so that neighbours are punched in one call: 64 MiB, as with
/// V-Probe.
const BATCH: usize = 32;
/// Part of a zone's free huge frames that the guest goes without at most while they are punched for
/// a soft reclaim: one in this many.
const SOFT_SHARE: u64 = 4;

/// For how long huge frames are reclaimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// Until the guest touches it.
    Soft,
    /// Until it is returned.
    Hard,
}

/// What was reclaimed, and what was not.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ReclaimedHuge {
    /// Huge frames that changed their state.
    pub huge_frames: u64,
    /// Bytes that the host got by that.
    pub reclaimed_bytes: u64,
    /// Reclaimed huge frames that had no memory before.
    pub already_empty: u64,
    /// Huge frames that had looked free, but were in use when they were to be reclaimed.
    pub in_use: u64,
    /// Huge frames that somebody else worked on, or that a device used.
    pub busy: u64,
    /// Part of the time that went into finding free huge frames.
    pub scan: Duration,
}

/// Why a reclaim ended early.
#[derive(Debug, thiserror::Error)]
pub enum HyperAllocStop {
    /// The guest may no longer be the one that has this allocator.
    #[error("the guest was reset")]
    Reset,
    /// A system call failed. What was reclaimed so far stays reclaimed.
    #[error("the host refused: {0}")]
    Io(#[from] io::Error),
}

impl How {
    fn becomes(self) -> State {
        match self {
            How::Soft => State::Soft,
            How::Hard => State::Hard,
        }
    }

    /// Whether a huge frame in this state is one to reclaim.
    fn wants(self, state: State) -> bool {
        match self {
            How::Soft => state == State::Installed,
            How::Hard => state != State::Hard,
        }
    }
}

impl HyperAlloc {
    /// Reclaims at most `want` huge frames that are free as a whole, after passing over `keep` of
    /// them. A soft reclaim counts only installed ones. Asks `still_runs` right before each batch,
    /// with what was reclaimed before: `false` once the guest may have been reset, or nobody wants
    /// more.
    ///
    /// Returns what was reclaimed, and what ended it early.
    pub fn reclaim(
        &self,
        pager: &Pager,
        how: How,
        want: u64,
        keep: u64,
        still_runs: impl FnMut(&ReclaimedHuge) -> bool,
    ) -> (ReclaimedHuge, Option<HyperAllocStop>) {
        let (reclaimed, mut kept) = (ReclaimedHuge::default(), 0);
        let mut pass = Pass { all: self, pager, how, want, reclaimed, still_runs };
        let each = self.zones.iter().try_for_each(|zone| {
            let spare = keep.saturating_sub(kept);
            kept += pass.zone(zone, spare)?;
            Ok(())
        });
        (pass.reclaimed, each.err())
    }
}

struct Pass<'a, R> {
    all: &'a HyperAlloc,
    pager: &'a Pager,
    how: How,
    want: u64,
    reclaimed: ReclaimedHuge,
    still_runs: R,
}

impl<'a, R: FnMut(&ReclaimedHuge) -> bool> Pass<'a, R> {
    /// Reclaims from one zone after passing over `spare` huge frames. Returns how many it passed
    /// over.
    fn zone(&mut self, zone: &Zone, spare: u64) -> Result<u64, HyperAllocStop> {
        let Some(host) = zone.host(&self.all.ram) else { return Ok(0) };
        let began = Instant::now();
        let mut free = candidates(zone, host, self.how).peekable();
        if free.peek().is_none() {
            self.reclaimed.scan += began.elapsed();
            return Ok(0);
        }
        let most = self.batch_size(zone, &host);
        self.reclaimed.scan += began.elapsed();
        let mut hard = zone.states.count().1;
        let spared = { free.by_ref() }.take(usize::try_from(spare).unwrap_or(usize::MAX)).count();
        while most > 0 && self.reclaimed.huge_frames < self.want {
            let left = usize::try_from(self.want - self.reclaimed.huge_frames).unwrap_or(most);
            let batch: Vec<usize> = free.by_ref().take(most.min(left)).collect();
            if batch.is_empty() {
                break;
            }
            if !(self.still_runs)(&self.reclaimed) || !zone.is_there(&self.all.ram) {
                return Err(HyperAllocStop::Reset);
            }
            if self.how == How::Hard {
                // Before they are reclaimed: the guest may think that it has less than it has,
                // never more.
                hard += batch.len() as u64;
                zone.publish_hard(&self.all.ram, hard);
            }
            self.batch(zone, &host, &batch)?;
        }
        zone.publish_hard(&self.all.ram, zone.states.count().1);
        Ok(spared as u64)
    }

    fn batch_size(&self, zone: &Zone, host: &Host<'_>) -> usize {
        if self.how == How::Hard {
            return BATCH;
        }
        let chunks = 0..zone.areas().div_ceil(CHUNK_AREAS);
        let free: u64 = chunks.map(|chunk| u64::from(host.free_areas(chunk).count_ones())).sum();
        usize::try_from(free / SOFT_SHARE).map_or(BATCH, |share| share.min(BATCH))
    }

    fn batch(&mut self, zone: &Zone, host: &Host<'_>, batch: &[usize]) -> io::Result<()> {
        let mut held = Vec::with_capacity(batch.len());
        for &index in batch {
            held.extend(self.take(zone, host, index).map(|frame| (index, frame)));
        }
        let punched = self.empty(&held);
        self.reclaimed.huge_frames += held.len() as u64;
        for (index, taken) in held {
            zone.states.set(index, self.how.becomes());
            if self.how == How::Soft {
                // A guest that has changed the area meanwhile has itself to blame.
                let _ = host.return_area(index);
            }
            taken.held.settle(self.how == How::Hard);
        }
        punched
    }

    /// Punches what has memory, and counts the bytes. What the guest takes of other memory
    /// meanwhile cannot be distinguished from that.
    fn empty(&mut self, held: &[(usize, RecordedHuge<'a>)]) -> io::Result<()> {
        let to_empty = || held.iter().map(|(_, taken)| taken).filter(|taken| !taken.was_empty);
        let most = to_empty().count() as u64 * HUGE_BYTES;
        if most == 0 {
            self.reclaimed.already_empty += held.len() as u64;
            return Ok(());
        }
        let before = self.resident_bytes();
        let result = self.pager.residency().empty_huge(to_empty().map(|taken| &taken.held));
        let bytes = before.saturating_sub(self.resident_bytes()).min(most);
        self.reclaimed.reclaimed_bytes += bytes;
        self.reclaimed.already_empty += held.len() as u64 - bytes.div_ceil(HUGE_BYTES);
        result
    }

    /// Reclaims one huge frame in the guest's allocator, and records that.
    fn take(&mut self, zone: &Zone, host: &Host<'_>, index: usize) -> Option<RecordedHuge<'a>> {
        let pager = self.pager;
        let Some(held) = pager.residency().lock_huge(zone.huge(index)) else {
            self.reclaimed.busy += 1;
            return None;
        };
        let before = zone.states.get(index);
        if !self.how.wants(before) {
            held.abandon();
            return None;
        }
        if host.hard_reclaim(index).is_err() {
            self.reclaimed.in_use += 1;
            held.abandon();
            return None;
        }
        if held.is_empty() {
            // It was punched and unmapped when it became soft.
            return Some(RecordedHuge { held, was_empty: true });
        }
        match held.record() {
            Ok(held) => Some(RecordedHuge { held, was_empty: false }),
            Err(held) => {
                self.reclaimed.busy += 1;
                let _ = host.return_area(index);
                if before == State::Installed {
                    host.install(index);
                }
                held.into_iter().for_each(LockedHuge::abandon);
                None
            }
        }
    }

    fn resident_bytes(&self) -> u64 {
        self.pager.ram().resident_bytes().unwrap_or(0)
    }
}

/// A huge frame that the host has, and that is recorded as such.
struct RecordedHuge<'p> {
    held: LockedHuge<'p>,
    was_empty: bool,
}

/// The free areas of a zone that can be reclaimed, chunk by chunk: the scan.
fn candidates<'a>(zone: &'a Zone, host: Host<'a>, how: How) -> impl Iterator<Item = usize> + 'a {
    (0..zone.areas().div_ceil(CHUNK_AREAS)).flat_map(move |chunk| {
        let states = zone.states.chunk(chunk);
        let mut mask = match how {
            How::Soft => !states.reclaimed,
            How::Hard => !states.hard,
        };
        // If none can be reclaimed, the guest's cache line is not even read.
        if mask != 0 {
            mask &= host.free_areas(chunk);
        }
        std::iter::from_fn(move || {
            let bit = (mask != 0).then(|| mask.trailing_zeros() as usize)?;
            mask &= mask - 1;
            Some(chunk * CHUNK_AREAS + bit)
        })
    })
}

const _: () = assert!(FRAMES_PER_HUGE == ebb_llfree::layout::AREA_FRAMES);
