//! Results of the blocks of one case.

use super::kept::{Block, Figures};
use super::report::Report;
use super::rounds::Rounds;
use super::stats::median;

/// Number of failures at which a baseline is left out, and drops no more blocks.
const FAILURES_MOST: usize = 2;

/// Result of [`super::blocks::Blocks::take`].
pub struct Taken {
    pub case: String,
    /// Name and figures of each remaining side, block by block. Blocks in which the judged side
    /// failed are left out.
    sides: Vec<(String, Vec<Figures>)>,
    /// Number of further blocks, in which the judged side failed.
    failed: usize,
}

impl Taken {
    /// Selects `count` blocks that count. The first of the names is the judged side. Failures are
    /// named in the report.
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
        // A baseline that is left out late had dropped blocks that count now, so there may be too
        // many.
        whole.truncate(count);
        let all = whole.len();
        whole.retain(|block| block.failed(&names[0]).is_none());
        let figures =
            |name: &String| whole.iter().filter_map(|block| block.figures(name).cloned()).collect();
        let sides = left.iter().map(|name| (name.clone(), figures(name))).collect();
        Taken { case: case.to_owned(), sides, failed: all - whole.len() }
    }

    /// Returns how many of these blocks count.
    pub fn count(blocks: &[Block], names: &[String]) -> usize {
        whole(blocks, &left(blocks, names)).len()
    }

    /// Returns one figure of a side, block by block: the median of a block's values. A side that
    /// was left out has none.
    pub fn rounds(&self, name: &str, figure: &str) -> Rounds {
        let side = self.sides.iter().find(|(side, _)| side == name);
        let blocks = side.map_or(&[][..], |(_, blocks)| blocks);
        let of = |figures: &Figures| figures.get(figure).map_or(f64::NAN, |all| median(all));
        blocks.iter().map(of).collect()
    }

    /// Returns all values of a figure in the last block, for pictures.
    pub fn course(&self, name: &str, figure: &str) -> Vec<f64> {
        let found = self.courses(name).find(|(found, _)| *found == figure);
        found.map(|(_, course)| course.to_vec()).unwrap_or_default()
    }

    /// Returns all figures of a side in the last block.
    pub fn courses(&self, name: &str) -> impl Iterator<Item = (&str, &[f64])> {
        let side = self.sides.iter().find(|(side, _)| side == name);
        let last = side.and_then(|(_, blocks)| blocks.last()).into_iter().flatten();
        last.map(|(figure, course)| (figure.as_str(), course.as_slice()))
    }

    /// Returns in how many blocks the judged side failed. [`Taken::rounds`] does not include them.
    pub fn failed(&self) -> usize {
        self.failed
    }

    /// Returns the names of the remaining sides.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sides.iter().map(|(name, _)| name.as_str())
    }
}

/// Returns the judged side, and the others that did not fail too often.
fn left(blocks: &[Block], names: &[String]) -> Vec<String> {
    let failures = |name: &str| blocks.iter().filter(|block| block.failed(name).is_some()).count();
    let is_left = |(place, name): &(usize, &String)| *place == 0 || failures(name) < FAILURES_MOST;
    names.iter().enumerate().filter(is_left).map(|(_, name)| name.clone()).collect()
}

/// Returns the blocks in which no remaining baseline failed.
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
