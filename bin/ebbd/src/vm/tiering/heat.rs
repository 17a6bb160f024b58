//! What a monitoring found: each page's degree, and a heat map.

use std::fs;
use std::time::{Duration, Instant};

use ebb_api::{Accelerator, DegreeBytes, HeatBlock, HeatFigures, HeatRegion, HeatTracker};
use ebb_heat::{Levels, Round, Sorted, Uses, Weights};
use ebb_reclaim::cost::HEATS;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, HUGE_BYTES};

use super::run::Run;

/// The hot set is this percentage, the hottest, of the pages of degree [`HOT_DEGREE_MIN`] or more
/// (vTMM, section 3.5).
const HOT_PERCENT: u32 = 80;
/// Least degree of the pages that the hot set is taken from.
const HOT_DEGREE_MIN: u64 = 3;
/// Most blocks of a heat map.
const BLOCKS_MAX: u64 = 4096;

/// What a monitoring found of each page.
pub struct Heat {
    ended: Instant,
    took: Duration,
    tracking: Duration,
    windows: u8,
    rounds: Round,
    tracker: HeatTracker,
    why: String,
    host_needs: String,
    /// Whether the host lacks what the tracker needs, so that uses are missed.
    misses_uses: bool,
    weights: Weights,
    used_frames: u64,
    reused_frames: u64,
    hot_frames: u64,
    degrees: Vec<DegreeBytes>,
    map: Map,
}

impl Heat {
    /// Makes the heat from a monitoring that has ended, and its pages in order. `weights`: what
    /// reads and writes count for. With a `threshold`, in windows, a limit sees each page as either
    /// as hot as can be or not hot at all.
    pub fn new(
        run: &Run,
        sorted: &Sorted,
        weights: Weights,
        threshold: Option<u8>,
        accelerator: Accelerator,
    ) -> Heat {
        let hot_frames = sorted.wanted_frames(HOT_PERCENT, HOT_DEGREE_MIN);
        let (host_needs, misses_uses) = host_needs(run.tracker(), accelerator);
        let scale = Scale { degree_max: degree_max(weights, run.windows), threshold };
        let mut degrees: Vec<DegreeBytes> = Vec::new();
        for (degree, pages) in sorted.degrees() {
            let bytes = pages * FRAME_BYTES;
            match degrees.last_mut() {
                Some(last) if last.degree == degree => last.bytes += bytes,
                _ => degrees.push(DegreeBytes { degree, bytes }),
            }
        }
        Heat {
            ended: Instant::now(),
            took: run.began.elapsed(),
            tracking: run.tracking,
            windows: run.windows,
            rounds: run.rounds,
            tracker: run.tracker(),
            why: run.why.clone(),
            host_needs,
            misses_uses,
            weights,
            used_frames: sorted.used_frames(),
            reused_frames: sorted.wanted_frames(100, 2 * least_weight(weights)),
            hot_frames,
            degrees,
            map: Map::new(&run.levels, sorted, hot_frames, scale),
        }
    }

    /// Returns the time since the monitoring ended.
    pub fn age(&self) -> Duration {
        self.ended.elapsed()
    }

    /// Returns when the monitoring began.
    pub fn began(&self) -> Instant {
        self.ended.checked_sub(self.took).unwrap_or(self.ended)
    }

    /// Whether it tells what programs use, and nothing of the kernel.
    pub fn is_by_guest(&self) -> bool {
        self.tracker == HeatTracker::GuestTables
    }

    /// Returns the bytes of the hot set.
    pub fn hot_bytes(&self) -> u64 {
        self.hot_frames * FRAME_BYTES
    }

    /// Returns the bytes that were used more than once. Of memory that comes back by a fault, it
    /// pays to keep these resident, since a fault costs as much as thousands of accesses.
    pub fn reused_bytes(&self) -> u64 {
        self.reused_frames * FRAME_BYTES
    }

    /// Returns why uses are missed on this host, if they are.
    pub fn blind_spot(&self) -> Option<&str> {
        self.misses_uses.then_some(&self.host_needs)
    }

    /// Returns how hot a frame is, as [`ebb_reclaim::cost`] counts: 0 if it was not used.
    pub fn of(&self, gfn: Gfn) -> usize {
        let region = self.map.regions.iter().find(|region| region.frames.contains(gfn));
        let heat = region.and_then(|region| {
            region.heats.get(usize::try_from(gfn.0 - region.frames.start.0).ok()?)
        });
        heat.map_or(0, |&heat| heat.into())
    }

    /// Returns all of it for a client.
    pub fn figures(&self) -> HeatFigures {
        let weight = |reads, writes| {
            u32::try_from(self.weights.degree(Uses { reads, writes })).unwrap_or(u32::MAX)
        };
        HeatFigures {
            age_s: self.age().as_secs(),
            windows: self.windows,
            duration_ms: u64::try_from(self.took.as_millis()).unwrap_or(u64::MAX),
            tracker: self.tracker,
            tracker_reason: self.why.clone(),
            host_needs: self.host_needs.clone(),
            read_weight: weight(1, 0),
            write_weight: weight(0, 1),
            degree_max: degree_max(self.weights, self.windows),
            memory_bytes: self.map.frames() * FRAME_BYTES,
            used_bytes: self.used_frames * FRAME_BYTES,
            hot_bytes: self.hot_bytes(),
            looking_us: u64::try_from(self.tracking.as_micros()).unwrap_or(u64::MAX),
            tables_read: self.rounds.tables,
            tables_pruned: self.rounds.pruned_tables,
            marks_cleared: self.rounds.cleared_entries,
            is_truncated: self.rounds.is_truncated,
            degrees: self.degrees.clone(),
            block_bytes: self.map.block_frames * FRAME_BYTES,
            regions: self.map.regions.iter().map(Region::report).collect(),
        }
    }
}

/// Returns what the lighter kind of use counts for.
pub fn least_weight(weights: Weights) -> u64 {
    let degree = |reads, writes| weights.degree(Uses { reads, writes });
    degree(1, 0).min(degree(0, 1))
}

/// Returns the degree of a page that was used in every window.
fn degree_max(weights: Weights, windows: u8) -> u64 {
    let degree = |reads, writes| weights.degree(Uses { reads, writes });
    degree(windows, 0).max(degree(0, windows)).max(1)
}

/// How a degree becomes a heat.
#[derive(Clone, Copy)]
struct Scale {
    degree_max: u64,
    threshold: Option<u8>,
}

impl Scale {
    fn heat(self, degree: u64, uses: Uses) -> u8 {
        let most = HEATS as u64 - 1;
        let heat = match self.threshold {
            Some(windows) if uses.reads + uses.writes >= windows => most,
            Some(_) => 0,
            // A page that was used at all gets more than 0.
            None => (degree * most).div_ceil(self.degree_max),
        };
        heat as u8
    }
}

/// Degrees by block, and the heat of each page.
struct Map {
    block_frames: u64,
    regions: Vec<Region>,
}

struct Region {
    frames: FrameRange,
    block_frames: u64,
    blocks: Vec<Block>,
    /// The heat of each page, below [`HEATS`].
    heats: Vec<u8>,
}

#[derive(Clone, Copy, Default)]
struct Block {
    degrees: u64,
    used_frames: u64,
    hot_frames: u64,
}

impl Map {
    fn new(levels: &Levels, sorted: &Sorted, hot_frames: u64, scale: Scale) -> Map {
        let ram = levels.ram();
        let block_frames = block_frames(ram);
        let regions = ram.iter().map(|&frames| {
            let count = frames.count.div_ceil(block_frames);
            let blocks = vec![Block::default(); usize::try_from(count).unwrap_or(0)];
            let heats = vec![0; usize::try_from(frames.count).unwrap_or(0)];
            Region { frames, block_frames, blocks, heats }
        });
        let mut map = Map { block_frames, regions: regions.collect() };
        for (index, (gfn, degree)) in (0..).zip(sorted.hottest_first()) {
            let heat = scale.heat(degree, levels.uses(gfn));
            if let Some((block, heat_of)) = map.place(gfn) {
                block.degrees += degree;
                block.used_frames += 1;
                block.hot_frames += u64::from(index < hot_frames);
                *heat_of = heat;
            }
        }
        map
    }

    fn place(&mut self, gfn: Gfn) -> Option<(&mut Block, &mut u8)> {
        let region = self.regions.iter_mut().find(|region| region.frames.contains(gfn))?;
        let index = gfn.0 - region.frames.start.0;
        let block = region.blocks.get_mut(usize::try_from(index / region.block_frames).ok()?)?;
        Some((block, region.heats.get_mut(usize::try_from(index).ok()?)?))
    }

    fn frames(&self) -> u64 {
        self.regions.iter().map(|region| region.frames.count).sum()
    }
}

impl Region {
    fn report(&self) -> HeatRegion {
        let ends = (1..).map(|index: u64| (index * self.block_frames).min(self.frames.count));
        let blocks = self.blocks.iter().zip(ends).enumerate().map(|(index, (block, end))| {
            let frames = end - (index as u64 * self.block_frames).min(end);
            let hundredths = block.degrees.saturating_mul(100) / frames.max(1);
            HeatBlock {
                degree: hundredths as f64 / 100.0,
                used_bytes: block.used_frames * FRAME_BYTES,
                hot_bytes: block.hot_frames * FRAME_BYTES,
            }
        });
        HeatRegion { start: self.frames.start.gpa().0, blocks: blocks.collect() }
    }
}

/// Returns the frames of a block: a power of two, 2 MiB at least, so that there are not too many
/// blocks.
fn block_frames(ram: &[FrameRange]) -> u64 {
    let frames: u64 = ram.iter().map(|range| range.count).sum();
    frames.div_ceil(BLOCKS_MAX).max(HUGE_BYTES / FRAME_BYTES).next_power_of_two()
}

/// Returns what makes a page's next use set its mark again after that was cleared, and whether some
/// uses are missed all the same.
fn host_needs(tracker: HeatTracker, accelerator: Accelerator) -> (String, bool) {
    let two_dimensional = || {
        let parameters =
            ["/sys/module/kvm_intel/parameters/ept", "/sys/module/kvm_amd/parameters/npt"];
        let values = parameters.iter().filter_map(|path| fs::read_to_string(path).ok());
        values.into_iter().any(|value| matches!(value.trim(), "Y" | "1"))
    };
    let (needs, misses) = match (tracker, accelerator) {
        (HeatTracker::VmmTable, _) => {
            ("PAGEMAP_SCAN (Linux 6.7); a page's first use in a window is a minor fault", false)
        }
        (HeatTracker::IdlePages, _) => (
            "CONFIG_IDLE_PAGE_TRACKING; in 2 MiB, a page's first use in a window is a minor fault",
            false,
        ),
        (HeatTracker::GuestTables, Accelerator::Tcg) => (
            "an emulator keeps translations until the guest loads other page tables: pages of \
             a program that never leaves the processor are missed (pti=on in the guest helps)",
            true,
        ),
        (HeatTracker::GuestTables, Accelerator::Kvm) if two_dimensional() => (
            "two-dimensional paging: a write-protection at the end of each round has processors \
             forget their translations",
            false,
        ),
        (HeatTracker::GuestTables, Accelerator::Kvm) => (
            "shadow paging: a translation that is kept does not set its mark again before its \
             page is protected, so hot pages look colder than they are",
            true,
        ),
    };
    (needs.into(), misses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_heat::{Access, Observer};

    #[test]
    fn a_map_has_the_degrees_where_the_pages_are() {
        let ram = [FrameRange::new(Gfn(0), 1000), FrameRange::new(Gfn(1 << 20), 512)];
        let mut levels = Levels::new(&ram, 0);
        for _ in 0..4 {
            levels.next_window();
            levels.saw(FrameRange::new(Gfn(512), 100), Access::Read);
            levels.saw(FrameRange::new(Gfn(1 << 20), 1), Access::Write);
        }
        let sorted = Sorted::new(&levels, Weights::new(1, 3).unwrap());
        let by_degree = Scale { degree_max: 12, threshold: None };
        let map = Map::new(&levels, &sorted, 81, by_degree);
        let report: Vec<HeatRegion> = map.regions.iter().map(Region::report).collect();
        assert_eq!((map.block_frames, map.frames(), report.len()), (512, 1512, 2));
        assert_eq!((report[0].start, report[1].start), (0, 4 << 30));
        let cold = HeatBlock::default();
        // 100 of the 488 pages of the last block of the first region.
        let warm = HeatBlock { degree: 0.81, used_bytes: 100 << 12, hot_bytes: 80 << 12 };
        assert_eq!(report[0].blocks, [cold, warm]);
        let one = HeatBlock { degree: 0.02, used_bytes: 1 << 12, hot_bytes: 1 << 12 };
        assert_eq!(report[1].blocks, [one]);
        let heats = [(0, 511), (0, 512), (0, 611), (0, 612), (1, 0)];
        let heats = heats.map(|(region, page)| map.regions[region].heats[page]);
        assert_eq!(heats, [0, 1, 1, 0, 3]);
        let uses = |reads| Uses { reads, writes: 1 };
        let by_threshold = Scale { degree_max: 12, threshold: Some(4) };
        let heats = [(12, 2), (1, 3), (12, 7)]
            .map(|(degree, reads)| by_threshold.heat(degree, uses(reads)));
        assert_eq!(heats, [0, 3, 3]);
    }

    #[test]
    fn a_map_is_no_larger_than_it_should_be() {
        let blocks = |gib: u64| {
            let ram = [FrameRange::new(Gfn(0), gib << 18)];
            (block_frames(&ram), (gib << 18).div_ceil(block_frames(&ram)))
        };
        assert_eq!(blocks(1), (512, 512));
        assert_eq!(blocks(8), (512, 4096));
        assert_eq!(blocks(9), (1024, 2304));
        assert_eq!(blocks(1024).1, 4096);
    }
}
