//! Sides that take turns: each block runs every side once, in a random order. The first side in the
//! list is judged.

use std::fmt;
use std::time::Instant;

use anyhow::bail;

use super::kept::{Block, Figures, Kept, Outcome};
use super::report::Report;
use super::row::Better;
use super::session::Session;
use super::stats::{self, Random, median};
pub use super::taken::Taken;
use crate::guard::guard;
use crate::interrupt;

/// Most additional blocks in place of dropped ones.
const MORE: usize = 2;

/// Name of a side's figure of its total time in seconds, setup and teardown included.
const TOOK: &str = "took";

/// The host failed, so this says nothing about the side that was to run on it.
#[derive(Debug)]
pub struct HostFails;

impl fmt::Display for HostFails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this host")
    }
}

/// The blocks of a benchmark.
pub struct Blocks {
    name: &'static str,
    kept: Kept,
}

/// Sides with their figures of one block, the best first.
pub type Ranked<T> = Vec<(T, f64)>;

impl Blocks {
    /// Opens the blocks of this benchmark, with those that are finished.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn open(session: &Session, name: &'static str) -> anyhow::Result<Blocks> {
        let kept = Kept::open(session, name)?;
        println!("{name}: sides in random order, seed {}", kept.seed);
        Ok(Blocks { name, kept })
    }

    /// Returns the seed of the order.
    pub fn seed(&self) -> u64 {
        self.kept.seed
    }

    /// Takes `count` blocks of a case in which all baselines succeeded. A block with a failed
    /// baseline is dropped for all sides. The report says so, and also if there were fewer blocks
    /// in the end. A failure of the judged side, the first, drops no block: [`Taken::failed`]
    /// counts it.
    ///
    /// # Errors
    /// The user interrupted, all sides fail, or the results cannot be kept.
    pub fn take<T: Copy>(
        &mut self,
        report: &mut Report,
        case: &str,
        (sides, name): (&[T], impl Fn(T) -> String),
        count: usize,
        mut one: impl FnMut(T) -> anyhow::Result<Figures>,
    ) -> anyhow::Result<Taken> {
        let names: Vec<String> = sides.iter().map(|&side| name(side)).collect();
        let mut blocks: Vec<Block> = Vec::new();
        for number in 1..=count + MORE {
            if Taken::count(&blocks, &names) >= count {
                break;
            }
            blocks.push(self.block((case, number), sides, &names, &mut one)?);
        }
        Ok(Taken::of(report, case, &blocks, &names, count))
    }

    /// Takes one block. Sides that are kept already are not taken again, so an interruption costs
    /// one side.
    fn block<T: Copy>(
        &mut self,
        (case, number): (&str, usize),
        sides: &[T],
        names: &[String],
        one: &mut impl FnMut(T) -> anyhow::Result<Figures>,
    ) -> anyhow::Result<Block> {
        let key = &format!("{case}, block {number}");
        let anew = || Block { key: key.clone(), sides: Vec::new() };
        let kept = self.kept.get(key).filter(|block| block.is_of(names));
        let mut block = kept.cloned().unwrap_or_else(anew);
        let order = stats::balanced(self.order(case), sides.len(), number);
        for place in order {
            if block.outcome(&names[place]).is_none() {
                let outcome = self.side(key, &names[place], || one(sides[place]))?;
                block.sides.push((names[place].clone(), outcome));
                self.kept.put(block.clone())?;
            }
        }
        if block.sides.iter().all(|(_, outcome)| matches!(outcome, Outcome::Failed(_)))
            && let Some((name, Outcome::Failed(why))) = block.sides.first()
        {
            // This says nothing about any side, so a later session does not continue the block.
            self.kept.put(anew())?;
            bail!("{key}: all fail; {name}: {why}");
        }
        Ok(block)
    }

    /// Runs one side, and measures how long that took with setup and teardown.
    fn side(
        &self,
        key: &str,
        name: &str,
        one: impl FnOnce() -> anyhow::Result<Figures>,
    ) -> anyhow::Result<Outcome> {
        println!("{}: {key}: {name}", self.name);
        let begun = Instant::now();
        let outcome = guard(one);
        // A failure after an interruption says nothing about the side.
        interrupt::check()?;
        let took = begun.elapsed().as_secs_f64();
        Ok(match outcome {
            Ok(mut figures) => {
                println!("  {took:.0} s");
                figures.insert(TOOK.to_owned(), vec![took]);
                Outcome::Figures(figures)
            }
            Err(why) if why.is::<HostFails>() => return Err(why),
            Err(why) => {
                println!("  failed after {took:.0} s: {why:#}");
                Outcome::Failed(format!("{why:#}"))
            }
        })
    }

    /// Takes one block for each candidate, so that an interruption costs one candidate. Failed
    /// candidates are named in the report, and are not ranked.
    ///
    /// # Errors
    /// The user interrupted, or the results cannot be kept.
    pub fn screen<T: Copy>(
        &mut self,
        report: &mut Report,
        case: &str,
        (candidates, name): (&[T], impl Fn(T) -> String),
        (figure, better): (&str, Better),
        mut one: impl FnMut(T) -> anyhow::Result<Figures>,
    ) -> anyhow::Result<Ranked<T>> {
        let mut order: Vec<T> = candidates.to_vec();
        self.order(case).shuffle(&mut order);
        let mut ranked: Ranked<T> = Vec::new();
        for side in order {
            let name = name(side);
            let key = format!("{case}, {name}");
            let block = match self.kept.get(&key) {
                Some(block) => block.clone(),
                None => {
                    let outcome = self.side(case, &name, || one(side))?;
                    let block = Block { key: key.clone(), sides: vec![(name.clone(), outcome)] };
                    self.kept.put(block.clone())?;
                    block
                }
            };
            match &block.sides[..] {
                [(_, Outcome::Figures(figures))] => {
                    ranked.push((side, figures.get(figure).map_or(f64::NAN, |all| median(all))));
                }
                [(_, Outcome::Failed(why))] => report.note(format!("{key}: {why}.")),
                _ => {}
            }
        }
        // A figure that was not measured cannot be the best.
        ranked.retain(|(_, figure)| !figure.is_nan());
        ranked.sort_by(|a, b| match better {
            Better::Less => a.1.total_cmp(&b.1),
            Better::More => b.1.total_cmp(&a.1),
        });
        Ok(ranked)
    }

    fn order(&self, key: &str) -> Random {
        stats::order(self.kept.seed, &format!("{}, {key}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::bench::identity::Identity;
    use crate::bench::session::Session;

    fn figures(seconds: f64) -> Figures {
        Figures::from([("s".to_owned(), vec![seconds])])
    }

    fn name(side: u32) -> String {
        format!("side {side}")
    }

    fn session(directory: &vmtest::Scratch) -> Session {
        Session::new(Identity::of_test(), true, Some(5), directory.path().to_owned()).unwrap()
    }

    fn take(
        session: &Session,
        count: usize,
        one: impl FnMut(u32) -> anyhow::Result<Figures>,
    ) -> anyhow::Result<(Taken, Vec<String>)> {
        let mut report = Report::new("x");
        let mut blocks = Blocks::open(session, "x")?;
        let taken = blocks.take(&mut report, "case", (&[1, 2, 3], name), count, one)?;
        Ok((taken, report.notes().to_vec()))
    }

    #[test]
    fn all_sides_take_turns_in_any_order() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let order = RefCell::new(Vec::new());
        let (taken, notes) = take(&session(&directory), 5, |side| {
            order.borrow_mut().push(side);
            Ok(figures(f64::from(side)))
        })
        .unwrap();
        assert_eq!(taken.rounds("side 2", "s").figures(), [2.0; 5]);
        assert!(notes.is_empty(), "{notes:?}");
        let order = order.into_inner();
        let blocks: Vec<&[u32]> = order.chunks(3).collect();
        assert!(blocks.iter().all(|block| block.iter().sum::<u32>() == 6), "{order:?}");
        assert!(blocks.iter().any(|block| *block != blocks[0]), "{order:?}");
    }

    #[test]
    fn blocks_on_record_are_not_run_again() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        take(&session(&directory), 2, |_| Ok(figures(1.0))).unwrap();
        let taken_now = Cell::new(0);
        let (taken, _) = take(&session(&directory), 3, |_| {
            taken_now.set(taken_now.get() + 1);
            Ok(figures(2.0))
        })
        .unwrap();
        assert_eq!(taken_now.get(), 3);
        assert_eq!(taken.rounds("side 1", "s").figures(), [1.0, 1.0, 2.0]);
    }

    #[test]
    fn an_interruption_costs_one_side_and_a_failing_host_none() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let taken_now = RefCell::new(Vec::new());
        let run = |most: usize| {
            take(&session(&directory), 1, |side| {
                if taken_now.borrow().len() == most {
                    return Err(anyhow::anyhow!("no room").context(HostFails).context("1 tries"));
                }
                taken_now.borrow_mut().push(side);
                Ok(figures(f64::from(side)))
            })
        };
        let error = run(2).err().unwrap();
        assert!(format!("{error:#}").contains("this host: no room"), "{error:#}");
        let (taken, notes) = run(3).unwrap();
        assert!(notes.is_empty(), "{notes:?}");
        assert_eq!(taken.rounds("side 2", "s").figures(), [2.0]);
        let mut all = taken_now.into_inner();
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3]);
    }

    #[test]
    fn a_failure_drops_its_block_for_all_and_is_said() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let times = Cell::new(0);
        let (taken, notes) = take(&session(&directory), 3, |side| {
            times.set(times.get() + u32::from(side == 2));
            if side == 2 && times.get() == 1 {
                bail!("killed");
            }
            Ok(figures(f64::from(times.get())))
        })
        .unwrap();
        // The last figure is of a fourth block.
        assert_eq!(taken.rounds("side 2", "s").figures(), [2.0, 3.0, 4.0]);
        assert_eq!(taken.rounds("side 1", "s").figures().len(), 3);
        assert_eq!(notes.len(), 1);
        assert!(notes[0].contains("dropped for all sides, since side 2 failed: killed"));
    }

    /// Otherwise a side that fails where it is slow would look fast.
    #[test]
    fn a_failure_of_a_judged_side_counts() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let times = Cell::new(0);
        let (taken, notes) = take(&session(&directory), 3, |side| {
            times.set(times.get() + u32::from(side == 1));
            if side == 1 && times.get() < 3 {
                bail!("killed");
            }
            Ok(figures(f64::from(side)))
        })
        .unwrap();
        assert_eq!((times.get(), taken.failed()), (3, 2));
        assert_eq!(taken.rounds("side 1", "s").figures(), [1.0]);
        assert_eq!(taken.rounds("side 2", "s").figures(), [2.0]);
        assert!(notes.iter().all(|note| note.contains("side 1 failed, which misses")), "{notes:?}");
        assert_eq!(notes.len(), 2);
    }

    #[test]
    fn a_side_that_is_left_out_late_causes_no_further_block() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let times = Cell::new(0);
        let (taken, _) = take(&session(&directory), 3, |side| {
            times.set(times.get() + u32::from(side == 3));
            match (side, times.get()) {
                (3, 3 | 4) => bail!("no"),
                _ => Ok(figures(f64::from(side))),
            }
        })
        .unwrap();
        assert_eq!(taken.names().count(), 2);
        assert_eq!(taken.rounds("side 2", "s").figures().len(), 3);
    }

    #[test]
    fn a_side_that_fails_again_and_again_is_left_out_and_said() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let (taken, notes) = take(&session(&directory), 3, |side| match side {
            3 => bail!("no"),
            _ => Ok(figures(1.0)),
        })
        .unwrap();
        assert_eq!(taken.names().collect::<Vec<_>>(), ["side 1", "side 2"]);
        assert_eq!(taken.rounds("side 1", "s").figures().len(), 3);
        assert!(notes.iter().all(|note| note.contains("side 3 failed and is left out")));
    }

    #[test]
    fn fewer_blocks_than_asked_for_are_said_and_none_is_an_error() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let (mut report, times) = (Report::new("x"), Cell::new(0));
        let mut blocks = Blocks::open(&session(&directory), "x").unwrap();
        let one = |side: u32| {
            times.set(times.get() + 1);
            // Each baseline fails once, in the blocks one to three.
            if (times.get() - 1) / 4 + 2 == side { bail!("no") } else { Ok(figures(1.0)) }
        };
        let taken = blocks.take(&mut report, "case", (&[1, 2, 3, 4], name), 3, one).unwrap();
        assert_eq!(taken.rounds("side 1", "s").figures().len(), 2);
        let said = "case: 2 blocks of the 3 asked for.";
        assert!(report.notes().iter().any(|note| note == said), "{:?}", report.notes());
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let error = take(&session(&directory), 3, |_| bail!("no kernel")).err().unwrap();
        assert!(error.to_string().contains("all fail"), "{error}");
    }

    #[test]
    fn a_screening_ranks_by_its_figure() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let mut report = Report::new("x");
        let mut blocks = Blocks::open(&session(&directory), "x").unwrap();
        let mut screen = |better| {
            let one = |side: u32| match side {
                2 => bail!("not held"),
                5 => Ok(Figures::new()),
                _ => Ok(figures(f64::from(side))),
            };
            let candidates = [3, 1, 2, 4, 5];
            let by = ("s", better);
            blocks.screen(&mut report, "screening", (&candidates[..], name), by, one).unwrap()
        };
        assert_eq!(screen(Better::Less), [(1, 1.0), (3, 3.0), (4, 4.0)]);
        assert_eq!(screen(Better::More), [(4, 4.0), (3, 3.0), (1, 1.0)]);
        assert!(report.notes()[0].contains("side 2: not held"));
    }
}
