//! The shared allocator, in Rust and in C: nanoseconds a call, against one compare-and-swap of the
//! same processor in the same run.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::thread;
use std::time::Instant;

use anyhow::{Context, ensure};
use ebb_llfree::{Error, Kind};
use llfree_tests::{Allocator, Region};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::report::Report;
use super::rounds::Rounds;
use super::row::Row;
use super::session::Session;

const ZONE_FRAMES: u64 = 1 << 20;
const THREADS: usize = 2;
/// Frames that each thread gets in bulk. All threads together get all but a quarter of the zone, so
/// that they need not search for the last frames.
const THREAD_FRAMES: u64 = ZONE_FRAMES * 3 / 8;
/// Least number of calls for one figure.
const CALLS: usize = 1 << 18;
/// Calls that are timed together.
const SAMPLE_CALLS: usize = 256;
/// Factor above the median at which a sample does not count, because the processor was taken away.
const TAKEN_AWAY: f64 = 4.0;

/// Runs two languages and three patterns, each with one thread, with two that have slots of their own,
/// and with two that share the slots.
///
/// # Errors
/// Those of the region's memory, or an allocator fails.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("llfree");
    let rounds = if quick { 3 } else { 15 };
    report.note(format!(
        "A zone of 4 GiB; bulk: {} MiB a thread, got and put in order; random: half of that \
         put in random order and got again; repeat: get and put of one block. Each thread has \
         its processor, and its slots if they are not shared. {rounds} rounds, all cases in \
         turn; each {SAMPLE_CALLS} calls are timed, and do not count when they took over \
         {TAKEN_AWAY} times the middle: there the processor was taken away.",
        THREAD_FRAMES * 4 / 1024
    ));
    let cases: Vec<Case> = each_case().collect();
    let (mut cas, mut found) =
        (Rounds::default(), vec![[Rounds::default(), Rounds::default()]; cases.len()]);
    // The first round warms up.
    for round in 0..=rounds {
        let swap = compare_and_swap()?;
        let figures: Vec<_> = cases.iter().map(Case::measure).collect::<Result<_, _>>()?;
        if round == 0 {
            continue;
        }
        cas.push(swap);
        for (rounds, figures) in found.iter_mut().zip(figures) {
            rounds.iter_mut().zip(figures).for_each(|(rounds, figure)| rounds.push(figure));
        }
    }
    for (case, rounds) in cases.iter().zip(&found) {
        let single = Case { threads: 1, slots: Slots::Own, ..*case };
        let alone = cases.iter().position(|other| *other == single).map(|index| &found[index]);
        case.rows(rounds, &cas, alone).into_iter().for_each(|row| report.row(row));
    }
    Ok(report)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Language {
    Rust,
    C,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pattern {
    Bulk,
    Random,
    Repeat,
}

/// Who uses a reservation slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slots {
    /// One thread.
    Own,
    /// All threads, as in a guest by default.
    Shared,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Case {
    language: Language,
    threads: usize,
    slots: Slots,
    pattern: Pattern,
    order: u8,
}

fn each_case() -> impl Iterator<Item = Case> {
    let languages = [Language::Rust, Language::C];
    let threads = [(1, Slots::Own), (THREADS, Slots::Own), (THREADS, Slots::Shared)];
    languages.into_iter().flat_map(move |language| {
        [0, 9].into_iter().flat_map(move |order| {
            [Pattern::Bulk, Pattern::Random, Pattern::Repeat].into_iter().flat_map(move |pattern| {
                let case =
                    move |(threads, slots)| Case { language, threads, slots, pattern, order };
                threads.into_iter().map(case)
            })
        })
    })
}

impl Case {
    /// Returns how many compare-and-swaps one thread may need for a get and for a put.
    fn goals(&self) -> [f64; 2] {
        if self.order == 0 { [4.0, 3.4] } else { [6.0, 2.6] }
    }

    fn rows(&self, rounds: &[Rounds; 2], cas: &Rounds, alone: Option<&[Rounds; 2]>) -> Vec<Row> {
        let language = if self.language == Language::Rust { "Rust" } else { "C" };
        let pattern = format!("{:?}", self.pattern).to_lowercase();
        let row = |index: usize, call: &str| {
            let name = format!("{language}, order {}, {pattern}, {call}", self.order);
            let what = match (self.threads, self.slots) {
                (1, _) => name,
                (threads, Slots::Own) => format!("{name}, {threads} threads"),
                (threads, Slots::Shared) => format!("{name}, {threads} threads, shared slots"),
            };
            let row = Row::new(what, "ns", &rounds[index]);
            match alone {
                Some(alone) if self.threads > 1 => {
                    let row = row.against("1 thread", &alone[index]);
                    // Whoever shares slots pays for the sharing.
                    if self.slots == Slots::Own { row.at_most(1.25) } else { row }
                }
                _ if self.pattern == Pattern::Repeat => {
                    let goals = self.goals();
                    row.against("compare-and-swap", cas).at_most(goals[0] + goals[1])
                }
                _ => row.against("compare-and-swap", cas).at_most(self.goals()[index]),
            }
        };
        match self.pattern {
            Pattern::Repeat => vec![row(0, "get and put")],
            _ => vec![row(0, "get"), row(1, "put")],
        }
    }

    /// Returns nanoseconds for a get and for a put, the mean of the threads. For
    /// [`Pattern::Repeat`], they are of both together.
    fn measure(&self) -> anyhow::Result<[f64; 2]> {
        let cores = match self.slots {
            Slots::Own => THREADS as u32,
            Slots::Shared => 1,
        };
        let region = Region::new(ZONE_FRAMES, cores)?;
        match self.language {
            Language::Rust => self.measure_with(&region.zone(())),
            Language::C => self.measure_with(&region.c_zone(())),
        }
    }

    fn measure_with<A: Allocator>(&self, zone: &A) -> anyhow::Result<[f64; 2]> {
        let together = Barrier::new(self.threads);
        let run = |core: usize| {
            let _pinned = Pinned::to(core)?;
            let worker = Worker { zone, together: &together, core: core as u32, order: self.order };
            Ok(worker.run(self.pattern)?)
        };
        let figures: Vec<[f64; 2]> = thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> =
                (0..self.threads).map(|core| scope.spawn(move || run(core))).collect();
            let joined = threads.into_iter().map(|thread| match thread.join() {
                Ok(figures) => figures,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            joined.collect::<anyhow::Result<_>>()
        })?;
        zone.drain();
        let free = zone.verify().map_err(anyhow::Error::msg)?;
        ensure!(free == ZONE_FRAMES, "{} frames are lost", ZONE_FRAMES - free);
        let mean = |index: usize| figures.iter().map(|each| each[index]).sum::<f64>();
        Ok([0, 1].map(|index| mean(index) / self.threads as f64))
    }
}

/// One thread of a case.
struct Worker<'a, A> {
    zone: &'a A,
    together: &'a Barrier,
    core: u32,
    order: u8,
}

impl<A: Allocator> Worker<'_, A> {
    fn run(&self, pattern: Pattern) -> Result<[f64; 2], Error> {
        let mut samples = [Samples::default(), Samples::default()];
        match pattern {
            Pattern::Repeat => self.repeat(&mut samples[0])?,
            Pattern::Bulk => self.bulk(&mut samples)?,
            Pattern::Random => self.random(&mut samples)?,
        }
        Ok(samples.map(|samples| samples.mean()))
    }

    fn repeat(&self, samples: &mut Samples) -> Result<(), Error> {
        self.together.wait();
        samples.time(CALLS, |_| self.zone.put(black_box(self.get()?), self.order))
    }

    fn bulk(&self, [gets, puts]: &mut [Samples; 2]) -> Result<(), Error> {
        let mut blocks = vec![0; self.blocks()];
        // The first pass is not measured, because nobody has touched the words before.
        self.fill(&mut blocks, &mut Samples::default())?;
        self.empty(&blocks, &mut Samples::default())?;
        for _ in 0..CALLS.div_ceil(blocks.len()) {
            self.fill(&mut blocks, gets)?;
            self.empty(&blocks, puts)?;
        }
        Ok(())
    }

    fn random(&self, [gets, puts]: &mut [Samples; 2]) -> Result<(), Error> {
        let (mut blocks, mut seed) = (vec![0; self.blocks()], 1 + u64::from(self.core));
        self.fill(&mut blocks, &mut Samples::default())?;
        let half = blocks.len() / 2;
        for _ in 0..CALLS.div_ceil(half) {
            shuffle(&mut blocks, &mut seed);
            self.empty(&blocks[..half], puts)?;
            self.fill(&mut blocks[..half], gets)?;
        }
        self.empty(&blocks, &mut Samples::default())
    }

    fn blocks(&self) -> usize {
        (THREAD_FRAMES >> self.order) as usize
    }

    #[inline]
    fn get(&self) -> Result<u64, Error> {
        self.zone.get(self.order, Kind::Movable, self.core)
    }

    /// Gets blocks, while the other threads do the same.
    fn fill(&self, blocks: &mut [u64], samples: &mut Samples) -> Result<(), Error> {
        self.together.wait();
        samples.time(blocks.len(), |index| {
            blocks[index] = self.get()?;
            Ok(())
        })
    }

    fn empty(&self, blocks: &[u64], samples: &mut Samples) -> Result<(), Error> {
        self.together.wait();
        samples.time(blocks.len(), |index| self.zone.put(blocks[index], self.order))
    }
}

/// Nanoseconds a call, one sample for each few calls together.
#[derive(Default)]
struct Samples(Vec<f64>);

impl Samples {
    fn time(
        &mut self,
        calls: usize,
        mut call: impl FnMut(usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        for first in (0..calls).step_by(SAMPLE_CALLS) {
            let end = calls.min(first + SAMPLE_CALLS);
            let began = Instant::now();
            (first..end).try_for_each(&mut call)?;
            self.0.push(began.elapsed().as_nanos() as f64 / (end - first) as f64);
        }
        Ok(())
    }

    /// Returns the mean, without samples in which the processor was taken away.
    fn mean(mut self) -> f64 {
        self.0.sort_unstable_by(f64::total_cmp);
        let Some(&median) = self.0.get(self.0.len() / 2) else { return f64::NAN };
        let kept: Vec<f64> =
            self.0.into_iter().filter(|&sample| sample <= TAKEN_AWAY * median).collect();
        kept.iter().sum::<f64>() / kept.len() as f64
    }
}

pub(super) fn shuffle(blocks: &mut [u64], seed: &mut u64) {
    for last in (1..blocks.len()).rev() {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        blocks.swap(last, (*seed % (last as u64 + 1)) as usize);
    }
}

/// Returns nanoseconds of one uncontended compare-and-swap, on the first processor.
///
/// # Errors
/// This thread cannot be pinned to that processor.
pub fn compare_and_swap() -> anyhow::Result<f64> {
    let (word, mut samples) = (AtomicU64::new(0), Samples::default());
    let _pinned = Pinned::to(0)?;
    samples.time(CALLS, |call| {
        let value = call as u64;
        let _ = black_box(black_box(&word).compare_exchange(value, value + 1, AcqRel, Acquire));
        Ok(())
    })?;
    Ok(samples.mean())
}

/// Keeps this thread on one processor until this is dropped.
struct Pinned(CpuSet);

impl Pinned {
    fn to(core: usize) -> anyhow::Result<Pinned> {
        let before = sched_getaffinity(None)?;
        let mut usable = (0..CpuSet::MAX_CPU).filter(|&cpu| before.is_set(cpu));
        let mut one = CpuSet::new();
        one.set(usable.nth(core).context("the benchmark needs a processor for each thread")?);
        sched_setaffinity(None, &one)?;
        Ok(Pinned(before))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.0);
    }
}
