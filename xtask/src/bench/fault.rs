//! From a fault's event to its end: Ebb's fault thread against a bare handler.
//!
//! A thread of this process is the victim. Each round makes the memory and its handler anew, in
//! turn for Ebb's handler and the bare one.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_units::{FrameRange, Gfn};

use super::bare::{self, Bare};
use super::handlers::{Block, Ebb, Handler, Plain, Resolve};
use super::report::Report;
use super::rounds::{Rounds, percentile_us};
use super::row::Row;
use super::session::Session;

/// First frame of the blocks. Metadata frames are below it.
const FIRST: Gfn = Gfn(1024);
const P50_LIMIT: f64 = 1.3;
const P99_LIMIT: f64 = 2.0;

/// What the victim touches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Touch {
    /// Frames that never had memory.
    Missing,
    /// Frames of reclaimed blocks, before any of the blocks' metadata.
    Reclaimed,
    /// The metadata of reclaimed blocks.
    Metadata,
}

struct Case {
    what: &'static str,
    huge: bool,
    touch: Touch,
    order: u8,
    blocks: u64,
    /// How often the blocks are reclaimed in a round.
    passes: usize,
}

const CASES: [Case; 6] = [
    Case {
        what: "missing 4 KiB",
        huge: false,
        touch: Touch::Missing,
        order: 9,
        blocks: 4,
        passes: 2,
    },
    Case {
        what: "missing 4 KiB of an emptied block",
        huge: false,
        touch: Touch::Reclaimed,
        order: 9,
        blocks: 4,
        passes: 2,
    },
    Case {
        what: "missing 2 MiB",
        huge: true,
        touch: Touch::Missing,
        order: 9,
        blocks: 64,
        passes: 16,
    },
    Case {
        what: "metadata of 2 MiB, huge pages",
        huge: true,
        touch: Touch::Metadata,
        order: 9,
        blocks: 64,
        passes: 16,
    },
    Case {
        what: "metadata of 4 MiB, huge pages",
        huge: true,
        touch: Touch::Metadata,
        order: 10,
        blocks: 32,
        passes: 16,
    },
    Case {
        what: "metadata of 2 MiB, small pages",
        huge: false,
        touch: Touch::Metadata,
        order: 9,
        blocks: 64,
        passes: 4,
    },
];

impl Case {
    fn blocks(&self) -> Vec<Block> {
        let block = |index| Block {
            metadata: Gfn(index),
            head: Gfn(FIRST.0 + (index << self.order)),
            order: self.order,
        };
        (0..self.blocks).map(block).collect()
    }

    fn memory(&self) -> anyhow::Result<Bare> {
        let memory = Bare::new(FIRST.gpa().0 + ((self.blocks << self.order) * 4096), self.huge)?;
        // The victim's page table is populated, like that of a running guest.
        memory.touch();
        Ok(memory)
    }

    fn resolve(&self) -> Resolve {
        match (self.touch, self.huge) {
            (Touch::Metadata, _) => Resolve::Restore { first: FIRST, order: self.order },
            (_, true) => Resolve::Populate,
            (_, false) => Resolve::Zero,
        }
    }

    /// Returns the frames to touch, one for each fault.
    fn frames(&self, block: Block) -> Vec<Gfn> {
        match (self.touch, self.huge) {
            (Touch::Metadata, _) => vec![block.metadata],
            (_, true) => block.frames().by_huge().map(|part| part.start).collect(),
            (_, false) => block.frames().frames().collect(),
        }
    }

    /// Returns the time of every fault as the victim sees it.
    fn touch_all(&self, handler: &dyn Handler) -> anyhow::Result<Vec<Duration>> {
        let blocks = self.blocks();
        let mut times = Vec::new();
        for _ in 0..self.passes {
            handler.empty(&blocks, self.touch != Touch::Missing)?;
            for gfn in blocks.iter().flat_map(|&block| self.frames(block)) {
                times.push(store(handler, gfn));
            }
        }
        Ok(times)
    }
}

fn store(handler: &dyn Handler, gfn: Gfn) -> Duration {
    let word = handler.victim().words(gfn.gpa().0, 1);
    let start = Instant::now();
    if let Some([word]) = word {
        word.store(1, Relaxed);
    }
    start.elapsed()
}

/// Figures of one handler, in microseconds.
#[derive(Default)]
struct Figures {
    inside: [Rounds; 2],
    victim: [Rounds; 2],
}

const PERCENTS: [usize; 2] = [50, 99];

impl Figures {
    fn round(&mut self, case: &Case, handler: &dyn Handler) -> anyhow::Result<()> {
        let mut times = case.touch_all(handler)?;
        for (index, percent) in PERCENTS.into_iter().enumerate() {
            let inside = handler.inside_ns(percent as u64).unwrap_or(0);
            self.inside[index].push(inside as f64 / 1e3);
            self.victim[index].push(percentile_us(&mut times, percent));
        }
        Ok(())
    }
}

/// Runs the benchmark.
///
/// # Errors
/// The privilege for userfaultfd is missing.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("fault");
    let huge = got_huge()?;
    if !huge {
        report.note("The host gives shared memory no huge pages: those rows are left out.");
    }
    report.note(
        "inside: from the event's read to the end of the call that resolves it, by a histogram \
         that is within 7 %; seen: the victim's store, from before to after.",
    );
    for case in CASES.iter().filter(|case| huge || !case.huge) {
        let (mut ebb, mut plain) = (Figures::default(), Figures::default());
        for _ in 0..if quick { 3 } else { 15 } {
            ebb.round(case, &Ebb::start(case.memory()?, case.huge)?)?;
            plain.round(case, &Plain::start(case.memory()?, case.resolve())?)?;
        }
        rows(&mut report, case, &ebb, &plain);
    }
    Ok(report)
}

fn rows(report: &mut Report, case: &Case, ebb: &Figures, plain: &Figures) {
    let sides = [("inside", &ebb.inside, &plain.inside), ("seen", &ebb.victim, &plain.victim)];
    for (where_, ebb, plain) in sides {
        for (index, limit) in [P50_LIMIT, P99_LIMIT].into_iter().enumerate() {
            let what = format!("{}, {where_}, p{}", case.what, PERCENTS[index]);
            let row = Row::new(what, "us", &ebb[index]);
            report.row(row.against("bare handler", &plain[index]).at_most(limit));
        }
    }
}

/// Whether memory like that of the cases gets huge pages here.
fn got_huge() -> anyhow::Result<bool> {
    let memory = Bare::new(FrameRange::block(Gfn(0), 10).bytes(), true)?;
    memory.touch();
    let (all, huge) = bare::mapped_bytes(std::process::id() as i32);
    Ok(huge * 2 > all)
}
