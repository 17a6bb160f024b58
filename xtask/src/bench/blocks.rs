//! Sides that take turns: in each block every side once, in any order. The first of them is the one
//! that is judged.

use anyhow::bail;

use super::kept::{Block, Figures, Kept, Outcome};
use super::report::Report;
use super::rounds::Rounds;
use super::row::Better;
use super::session::Session;
use super::stats::{self, Random, median};
use crate::guard::guard;
use crate::interrupt;

/// So many blocks more than asked for are taken in the place of those that were dropped.
const MORE: usize = 2;
/// A baseline that failed so often is left out, and drops no more blocks.
const FAILURES_MOST: usize = 2;

/// A benchmark's blocks.
pub struct Blocks {
    name: &'static str,
    kept: Kept,
}

/// What blocks of one case came to.
pub struct Taken {
    pub case: String,
    /// Of each side that is left its figures, block by block: of those in which the judged one came
    /// to its end.
    sides: Vec<(String, Vec<Figures>)>,
    /// In so many more blocks the judged one failed.
    failed: usize,
}

/// Sides, the best first, by what each of them managed in one block.
pub type Ranked<T> = Vec<(T, f64)>;

impl Blocks {
    /// Those of this benchmark, and what is finished of them.
    ///
    /// # Errors
    /// As the file system's.
    pub fn open(session: &Session, name: &'static str) -> anyhow::Result<Blocks> {
        let kept = Kept::open(session, name)?;
        println!("{name}: sides in random order, seed {}", kept.seed);
        Ok(Blocks { name, kept })
    }

    /// The seed of the order.
    pub fn seed(&self) -> u64 {
        self.kept.seed
    }

    /// Takes `count` blocks of a case in which all baselines came to their end. A block with one that
    /// failed is dropped for all, which the report says, and so it does when fewer were had. A
    /// failure of the side that is judged, the first, drops none: it is told in [`Taken::failed`].
    ///
    /// # Errors
    /// The user has had enough, all sides fail, or the results cannot be kept.
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
            if whole(&blocks, &left(&blocks, &names)).len() >= count {
                break;
            }
            let key = format!("{case}, block {number}");
            blocks.push(self.block(&key, sides, &names, &mut one)?);
        }
        let left = left(&blocks, &names);
        say(report, case, &blocks, &names, &left, count);
        let mut whole = whole(&blocks, &left);
        // Who was left out late dropped blocks that count now.
        whole.truncate(count);
        let judged = &names[0];
        let all = whole.len();
        whole.retain(|block| block.failed(judged).is_none());
        let figures =
            |name: &String| whole.iter().filter_map(|block| block.figures(name)).collect();
        let sides = left.iter().map(|name| (name.clone(), figures(name))).collect();
        Ok(Taken { case: case.to_owned(), sides, failed: all - whole.len() })
    }

    fn block<T: Copy>(
        &mut self,
        key: &str,
        sides: &[T],
        names: &[String],
        one: &mut impl FnMut(T) -> anyhow::Result<Figures>,
    ) -> anyhow::Result<Block> {
        if let Some(block) = self.kept.get(key).filter(|block| block.is_of(names)) {
            return Ok(block.clone());
        }
        let mut order: Vec<usize> = (0..sides.len()).collect();
        self.order(key).shuffle(&mut order);
        let mut block = Block { key: key.to_owned(), sides: Vec::new() };
        for place in order {
            println!("{}: {key}: {}", self.name, names[place]);
            let outcome = guard(|| one(sides[place]));
            // What fails then is no news of the side.
            interrupt::check()?;
            let outcome = match outcome {
                Ok(figures) => Outcome::Figures(figures),
                Err(why) => Outcome::Failed(format!("{why:#}")),
            };
            block.sides.push((names[place].clone(), outcome));
        }
        if block.sides.iter().all(|(_, outcome)| matches!(outcome, Outcome::Failed(_)))
            && let Some((name, Outcome::Failed(why))) = block.sides.first()
        {
            bail!("{key}: all fail; {name}: {why}");
        }
        self.kept.put(block.clone())?;
        Ok(block)
    }

    /// One block for each of the candidates, so that an interruption costs one; who failed is said
    /// in the report and not among those ranked.
    ///
    /// # Errors
    /// The user has had enough, or the results cannot be kept.
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
                    println!("{}: {key}", self.name);
                    let outcome = guard(|| one(side));
                    interrupt::check()?;
                    let outcome = match outcome {
                        Ok(figures) => Outcome::Figures(figures),
                        Err(why) => Outcome::Failed(format!("{why:#}")),
                    };
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
        // What was not measured is not the best.
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

impl Block {
    fn failed(&self, name: &str) -> Option<&str> {
        self.sides.iter().find_map(|(side, outcome)| match outcome {
            Outcome::Failed(why) if side == name => Some(why.as_str()),
            _ => None,
        })
    }

    fn figures(&self, name: &str) -> Option<Figures> {
        self.sides.iter().find_map(|(side, outcome)| match outcome {
            Outcome::Figures(figures) if side == name => Some(figures.clone()),
            _ => None,
        })
    }

    /// Whether it has these sides and no others.
    fn is_of(&self, names: &[String]) -> bool {
        self.sides.len() == names.len()
            && names.iter().all(|name| self.sides.iter().any(|(side, _)| side == name))
    }
}

/// The one that is judged, and the others that did not fail too often.
fn left(blocks: &[Block], names: &[String]) -> Vec<String> {
    let failures = |name: &str| blocks.iter().filter(|block| block.failed(name).is_some()).count();
    let is_left = |(place, name): &(usize, &String)| *place == 0 || failures(name) < FAILURES_MOST;
    names.iter().enumerate().filter(is_left).map(|(_, name)| name.clone()).collect()
}

/// The blocks in which none of those failed but the judged one.
fn whole<'a>(blocks: &'a [Block], left: &[String]) -> Vec<&'a Block> {
    let is_whole = |block: &&Block| left.iter().skip(1).all(|name| block.failed(name).is_none());
    blocks.iter().filter(is_whole).collect()
}

fn say(
    report: &mut Report,
    case: &str,
    blocks: &[Block],
    names: &[String],
    left: &[String],
    asked: usize,
) {
    for name in names {
        for block in blocks {
            let Some(why) = block.failed(name) else { continue };
            report.note(match left.contains(name) {
                _ if *name == names[0] => {
                    format!("{}: {name} failed, which misses every goal: {why}.", block.key)
                }
                true => {
                    format!("{}: dropped for all sides, since {name} failed: {why}.", block.key)
                }
                false => format!("{}: {name} failed and is left out of {case}: {why}.", block.key),
            });
        }
    }
    let had = whole(blocks, left).len();
    if had < asked {
        report.note(format!("{case}: {had} blocks of the {asked} asked for."));
    }
}

impl Taken {
    /// One figure of a side, block by block: of several, the median. None of a side that failed.
    pub fn rounds(&self, name: &str, figure: &str) -> Rounds {
        let side = self.sides.iter().find(|(side, _)| side == name);
        let blocks = side.map_or(&[][..], |(_, blocks)| blocks);
        let of = |figures: &Figures| figures.get(figure).map_or(f64::NAN, |all| median(all));
        blocks.iter().map(of).collect()
    }

    /// The same as it was taken, in the last block: for pictures.
    pub fn course(&self, name: &str, figure: &str) -> Vec<f64> {
        let side = self.sides.iter().find(|(side, _)| side == name);
        let last = side.and_then(|(_, blocks)| blocks.last());
        last.and_then(|figures| figures.get(figure).cloned()).unwrap_or_default()
    }

    /// In how many blocks the side that is judged failed; [`Taken::rounds`] has none of those.
    pub fn failed(&self) -> usize {
        self.failed
    }

    /// The sides that are left.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sides.iter().map(|(name, _)| name.as_str())
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
    fn what_is_kept_is_not_taken_again() {
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
        // Of a fourth block instead.
        assert_eq!(taken.rounds("side 2", "s").figures(), [2.0, 3.0, 4.0]);
        assert_eq!(taken.rounds("side 1", "s").figures().len(), 3);
        assert_eq!(notes.len(), 1);
        assert!(notes[0].contains("dropped for all sides, since side 2 failed: killed"));
    }

    /// Else who fails where it is slow would look fast.
    #[test]
    fn who_is_judged_fails_for_good() {
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
    fn who_is_left_out_late_makes_no_block_too_many() {
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
            // Of each baseline once, in the blocks one to three.
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
