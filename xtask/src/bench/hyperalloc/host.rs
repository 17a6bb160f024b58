//! Reclaiming memory in a guest's own allocator, against the bare system calls, and scanning it for
//! free memory.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::ensure;
use ebb_llfree::Fill;
use ebb_reclaim::hyperalloc::{How, HyperAlloc};
use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;
use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa, HUGE_BYTES};
use llfree_tests::Region;
use vmtest::HostSetting;

use super::speed;
use crate::bench::bare::{Bare, advise};
use crate::bench::handlers::{Ebb, Handler};
use crate::bench::llfree::compare_and_swap;
use crate::bench::report::Report;
use crate::bench::rounds::{Rounds, us};
use crate::bench::row::Row;
use crate::bench::session::Session;

/// First frame of the zone. The allocator's state is below it.
const ZONE: Gfn = Gfn(1024);
const ZONE_BYTES: u64 = 1 << 30;
const HUGE_FRAMES: u64 = ZONE_BYTES / HUGE_BYTES;
/// Bytes that one bare call empties: as much as a batch.
const CALL_BYTES: u64 = 64 << 20;
const SCANNED_GIB: u64 = 16;
/// Bytes written before a cold scan: several times as much as one processor caches.
const SWEEP_BYTES: usize = 512 << 20;

/// Goal: least part of the bare calls' speed, for touched memory in huge pages.
const TOUCHED_LEAST: f64 = 0.85;
/// Goal: most compare-and-swaps for a huge frame that has no memory.
const SWAPS_MOST: f64 = 12.0;
/// Goal: cache lines of the published design for a GiB.
const LINES_MOST: f64 = 18.0;
const SCAN_MOST: f64 = 3.0;

/// What the guest's memory is made of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Hugetlb,
    Thp,
    Small,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Hugetlb => "hugetlb",
            Kind::Thp => "THP",
            Kind::Small => "4 KiB",
        }
    }

    fn memory(self, bytes: u64) -> anyhow::Result<Bare> {
        if self != Kind::Hugetlb {
            return Ok(Bare::new(bytes, self == Kind::Thp)?);
        }
        let file = RamFile::create_hugetlb("ebb-bench", bytes)?;
        let [guest, own] = [Mapping::new(&file, 0, bytes)?, Mapping::new(&file, 0, bytes)?];
        Ok(Bare { file, guest, own })
    }
}

/// A pager over memory with one shared zone.
struct Rig {
    // HyperAlloc must be dropped before its zone's memory.
    shared: Arc<HyperAlloc>,
    ebb: Ebb,
    region: Region,
}

impl Rig {
    fn new(memory: Bare, huge: bool) -> anyhow::Result<Rig> {
        let frames = memory.guest.bytes() / FRAME_BYTES - ZONE.0;
        let region = Region::within(&memory.file, 0, ZONE.0, frames, 1)?;
        let ebb = Ebb::start(memory, huge)?;
        let shared = HyperAlloc::attach(ebb.pager(), &[Gpa(0)])?;
        Ok(Rig { shared, ebb, region })
    }

    /// Gives all of the zone memory, which the guest has mapped.
    fn fill(&self) -> anyhow::Result<()> {
        let frames = FrameRange::new(ZONE, ZONE_BYTES / FRAME_BYTES);
        self.ebb.pager().ram().populate(frames)?;
        touch(self.ebb.victim(), ZONE.gpa().0, ZONE_BYTES);
        Ok(())
    }

    fn reclaim(&self) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let (taken, stop) = self.shared.reclaim(self.ebb.pager(), How::Hard, u64::MAX, 0, |_| true);
        let took = start.elapsed();
        stop.map_or(Ok(()), Err)?;
        ensure!(taken.huge_frames == HUGE_FRAMES, "{taken:?}");
        Ok(took)
    }

    fn give(&self) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let given = self.shared.give(self.ebb.pager(), u64::MAX);
        let took = start.elapsed();
        ensure!(given == HUGE_FRAMES, "{given} were returned");
        Ok(took)
    }
}

fn touch(memory: &Mapping, offset: u64, bytes: u64) {
    for at in (offset..offset + bytes).step_by(FRAME_BYTES as usize) {
        if let Some([word]) = memory.words(at, 1) {
            word.fetch_or(1, Relaxed);
        }
    }
}

/// Figures in GiB/s, or in ns for each huge frame.
#[derive(Default)]
struct Figures {
    touched: [Rounds; 2],
    untouched: Rounds,
    returned: Rounds,
    install: [Rounds; 2],
}

/// Runs the paper's figure 4.
///
/// # Errors
/// There is no userfaultfd, or not enough memory.
pub fn fig4(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("hyperalloc-fig4");
    let rounds = if quick { 3 } else { 15 };
    report.note(format!(
        "A zone of 1 GiB, free as a whole, taken hard and returned; {rounds} rounds, Ebb and the \
         bare calls in turn. Touched: all of it has memory that the guest has mapped; the bare \
         calls punch 64 MiB at a time. Install: a thread writes to each 4 KiB; the bare side is a \
         first touch without userfaultfd."
    ));
    let mut swap = Rounds::default();
    for kind in [Kind::Hugetlb, Kind::Thp, Kind::Small] {
        // The memory of this side and of the bare one.
        let bytes = 2 * (ZONE.gpa().0 + ZONE_BYTES);
        let _reserved = match kind {
            Kind::Hugetlb => match HostSetting::reserved_huge_pages(bytes) {
                Ok(setting) => Some(setting),
                Err(why) => {
                    report.note(format!("No hugetlb: {why}"));
                    continue;
                }
            },
            _ => None,
        };
        let figures = measure(kind, rounds, &mut swap)?;
        rows(&mut report, kind, &figures, &swap);
    }
    if let Err(why) = speed::rows(&mut report, if quick { 2 } else { 5 }) {
        report.note(format!("No guests: {why:#}."));
    }
    Ok(report)
}

fn measure(kind: Kind, rounds: usize, swap: &mut Rounds) -> anyhow::Result<Figures> {
    let bytes = ZONE.gpa().0 + ZONE_BYTES;
    let (bare, rig) = (kind.memory(bytes)?, Rig::new(kind.memory(bytes)?, kind != Kind::Small)?);
    let mut figures = Figures::default();
    let speed = |took: Duration| ZONE_BYTES as f64 / took.as_secs_f64() / (1u64 << 30) as f64;
    let each = |took: Duration| took.as_nanos() as f64 / HUGE_FRAMES as f64;
    // The first round warms up.
    for round in 0..=rounds {
        rig.fill()?;
        let touched = rig.reclaim()?;
        let returned = rig.give()?;
        let untouched = rig.reclaim()?;
        let start = Instant::now();
        rig.give()?;
        touch(rig.ebb.victim(), ZONE.gpa().0, ZONE_BYTES);
        let install = start.elapsed();
        let [punch, first_touch] = bare_round(&bare)?;
        if round > 0 {
            figures.touched[0].push(speed(touched));
            figures.touched[1].push(speed(punch));
            figures.returned.push(each(returned));
            figures.untouched.push(each(untouched));
            figures.install[0].push(speed(install));
            figures.install[1].push(speed(first_touch));
            swap.push(compare_and_swap()?);
        }
    }
    Ok(figures)
}

fn bare_round(bare: &Bare) -> anyhow::Result<[Duration; 2]> {
    let first = ZONE.gpa().0;
    bare.own.populate(first, ZONE_BYTES)?;
    bare.own.forget(first, ZONE_BYTES)?;
    touch(&bare.guest, first, ZONE_BYTES);
    let start = Instant::now();
    for offset in (first..first + ZONE_BYTES).step_by(CALL_BYTES as usize) {
        bare.file.punch(offset, CALL_BYTES)?;
    }
    let punch = start.elapsed();
    let start = Instant::now();
    touch(&bare.guest, first, ZONE_BYTES);
    Ok([punch, start.elapsed()])
}

fn rows(report: &mut Report, kind: Kind, figures: &Figures, swap: &Rounds) {
    let name = kind.name();
    let touched = Row::new(format!("reclaim touched, {name}"), "GiB/s", &figures.touched[0])
        .against("bare punch", &figures.touched[1]);
    report.row(match kind {
        Kind::Small => touched,
        _ => touched.at_least(TOUCHED_LEAST),
    });
    for (what, rounds) in [("reclaim untouched", &figures.untouched), ("return", &figures.returned)]
    {
        let row = Row::new(format!("{what}, {name}"), "ns/2 MiB", rounds);
        report.row(row.against("compare-and-swap", swap).at_most(SWAPS_MOST));
    }
    let install = Row::new(format!("return + install, {name}"), "GiB/s", &figures.install[0]);
    report.row(install.against("bare first touch", &figures.install[1]));
}

/// Scans for free huge frames where there are none: that is what automatic reclaim does most of the
/// time.
///
/// # Errors
/// There is no userfaultfd.
pub fn scan(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("hyperalloc-scan");
    let bytes = ZONE.gpa().0 + (SCANNED_GIB << 30);
    let memory = Bare::new(bytes, false)?;
    advise(&memory.own, false);
    let rig = Rig::new(memory, false)?;
    rig.region.zone(()).format(Fill::Allocated);
    // The plain reads are of the areas in place, one by one.
    let areas = rig.region.parts().areas;
    let lines = rig.shared.scanned_bytes() as f64 / 64.0 / SCANNED_GIB as f64;
    let lines = [lines].into_iter().collect();
    report.row(Row::new("cache lines", "lines/GiB", &lines).exact().no_more_than(LINES_MOST));
    for (what, is_cold) in [("warm", false), ("cold", true)] {
        let (mut ebb, mut plain) = (Rounds::default(), Rounds::default());
        for _ in 0..if quick { 21 } else { 101 } {
            ebb.push(timed(is_cold, || {
                rig.shared.reclaim(rig.ebb.pager(), How::Soft, u64::MAX, 0, |_| true).0.huge_frames
            }));
            plain.push(timed(is_cold, || {
                areas.iter().map(|area| u64::from(area.load(Relaxed))).sum()
            }));
        }
        let row = Row::new(format!("scan, nothing free, {what}"), "us/GiB", &ebb);
        report.row(row.against("reading the areas", &plain).at_most(SCAN_MOST));
    }
    Ok(report)
}

fn timed(is_cold: bool, action: impl Fn() -> u64) -> f64 {
    if is_cold {
        black_box(vec![1u8; SWEEP_BYTES].iter().step_by(64).fold(0u8, |sum, byte| sum ^ byte));
    } else {
        black_box(action());
    }
    let start = Instant::now();
    black_box(action());
    us(start.elapsed()) / SCANNED_GIB as f64
}
