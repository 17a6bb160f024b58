//! What blocks of one case came to.

use super::kept::{Block, Figures};
use super::report::Report;
use super::rounds::Rounds;
use super::stats::median;

/// A baseline that failed so often is left out, and drops no more blocks.
const FAILURES_MOST: usize = 2;

/// See [`super::blocks::Blocks::take`].
pub struct Taken {
    pub case: String,
    /// Of each side that is left its figures, block by block: of those in which the judged one came
    /// to its end.
    sides: Vec<(String, Vec<Figures>)>,
    /// In so many more blocks the judged one failed.
    failed: usize,
}

impl Taken {
    /// Of `count` blocks those that count; the first of the names is judged. The report is told what
    /// failed.
    pub fn of(
        report: &mut Report,
        case: &str,
        blocks: &[Block],
        names: &[String],
        count: usize,
    ) -> Taken {
        let left = left(blocks, names);
        say(report, case, blocks, names, &left, count);
        let mut whole = whole(blocks, &left);
        // Who was left out late dropped blocks that count now.
        whole.truncate(count);
        let all = whole.len();
        whole.retain(|block| block.failed(&names[0]).is_none());
        let figures =
            |name: &String| whole.iter().filter_map(|block| block.figures(name).cloned()).collect();
        let sides = left.iter().map(|name| (name.clone(), figures(name))).collect();
        Taken { case: case.to_owned(), sides, failed: all - whole.len() }
    }

    /// How many of these blocks count.
    pub fn count(blocks: &[Block], names: &[String]) -> usize {
        whole(blocks, &left(blocks, names)).len()
    }

    /// One figure of a side, block by block: of several, the median. None of a side that failed.
    pub fn rounds(&self, name: &str, figure: &str) -> Rounds {
        let side = self.sides.iter().find(|(side, _)| side == name);
        let blocks = side.map_or(&[][..], |(_, blocks)| blocks);
        let of = |figures: &Figures| figures.get(figure).map_or(f64::NAN, |all| median(all));
        blocks.iter().map(of).collect()
    }

    /// The same as it was taken, in the last block: for pictures.
    pub fn course(&self, name: &str, figure: &str) -> Vec<f64> {
        let found = self.courses(name).find(|(found, _)| *found == figure);
        found.map(|(_, course)| course.to_vec()).unwrap_or_default()
    }

    /// All figures of a side in the last block.
    pub fn courses(&self, name: &str) -> impl Iterator<Item = (&str, &[f64])> {
        let side = self.sides.iter().find(|(side, _)| side == name);
        let last = side.and_then(|(_, blocks)| blocks.last()).into_iter().flatten();
        last.map(|(figure, course)| (figure.as_str(), course.as_slice()))
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
