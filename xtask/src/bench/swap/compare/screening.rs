//! The screening of Linux's ways: which of them go on to the blocks.

use super::metric::Metric;
use super::side::{held_to, name};
use crate::bench::blocks::{Blocks, Ranked};
use crate::bench::kept::Figures;
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::{Better, Row};
use crate::bench::session::Session;
use crate::bench::stats::geometric_mean;
use crate::bench::swap::held;
use crate::bench::swap::keeper::{Keeper, PLAIN_LINUX};
use crate::bench::swap::linux::Linux;
use crate::bench::swap::medium::Medium;

/// Number of Linux's screened ways that are screened once more.
const AGAIN: usize = 4;
/// Number of compressors that are then combined with the best memory.
const CROSSED: usize = 2;
/// Number of ways that go on to the blocks, beside Linux's defaults.
const BEST: usize = 3;

/// How Linux's ways are screened.
pub struct Screening<'a> {
    /// Names of the two cases: the one for all ways, and the one for the best of them.
    pub cases: [&'a str; 2],
    /// Figure by which the best are chosen.
    pub metric: Metric,
    /// Ebb's side, which runs for comparison.
    pub ebb: Keeper,
    pub beside: &'a [Keeper],
    /// Whether the guests' memory compresses. If it does not, a way that compresses keeps
    /// everything in memory, so the guests are not limited.
    pub shrinks: bool,
    /// Disk that they swap to.
    pub medium: Medium,
}

/// Screens Linux's ways. Each kind of memory and each compressor runs in one VM, with shortened
/// work. The best of them, and the best of both combined, run in one VM of the other case. The best
/// of those go on, with Linux's defaults. A quick session takes the defaults without screening.
///
/// # Errors
/// The user interrupted, or no way gets through.
pub fn screen(
    (session, blocks, report): (&Session, &mut Blocks, &mut Report),
    screening: &Screening<'_>,
    mut one: impl FnMut(Keeper, usize) -> anyhow::Result<Figures>,
) -> anyhow::Result<Vec<Keeper>> {
    let Screening { cases, metric, ebb, beside, shrinks, medium } = *screening;
    if session.identity.quick {
        return Ok(PLAIN_LINUX.into());
    }
    let by = (metric.figure, metric.better);
    let mut one = |keeper, pass| held_to(one(keeper, pass)?, keeper, held::SCREENED_PERCENT);
    let linux = Linux::offered(shrinks, medium).into_iter();
    let linux: Vec<Keeper> = linux.map(Keeper::Linux).collect();
    let all = [&[ebb], beside, &linux].concat();
    let case = format!("screening, {}", cases[0]);
    let first = blocks.screen(report, &case, (&all, name), by, |keeper| one(keeper, 0))?;
    tell(report, &case, metric, ebb, &first);
    let first = of_linux(&first);
    let ways: Vec<Linux> = first.iter().filter_map(|(keeper, _)| keeper.linux()).collect();
    let crossed: Vec<Keeper> =
        Linux::crossed(&ways, CROSSED).into_iter().map(Keeper::Linux).collect();
    let best = first.iter().take(AGAIN).map(|(keeper, _)| *keeper);
    let again: Vec<Keeper> = best.chain(crossed.iter().copied()).chain([ebb]).collect();
    let case = format!("screening again, {}", cases[1]);
    let second = blocks.screen(report, &case, (&again, name), by, |keeper| one(keeper, 1))?;
    tell(report, &case, metric, ebb, &second);
    if !shrinks {
        report.note(format!(
            "{}: nothing shrinks, so that zswap and zram hold it in memory as it is: Linux's ways are \
             those of the disk alone.",
            cases[0]
        ));
    }
    report.note(format!(
        "{}: {} ways of Linux's had one VM each, the best {AGAIN} of them and {} that join the best \
         memory and the best compressors one more ({}), and the best {BEST} go on. A way of Linux's may have \
         {:.0} % of its limit on average here. Who is chosen by so few was lucky, too: another one may be \
         better, which favours Ebb.",
        cases[0],
        linux.len(),
        crossed.len(),
        cases[1],
        held::SCREENED_PERCENT
    ));
    let best = best_of_both(&first, &of_linux(&second), metric.better);
    Ok(with_defaults(best.into_iter().take(BEST)))
}

fn of_linux(ranked: &Ranked<Keeper>) -> Ranked<Keeper> {
    ranked.iter().filter(|(keeper, _)| matches!(keeper, Keeper::Linux(_))).copied().collect()
}

/// Adds a row for each screened way.
fn tell(report: &mut Report, case: &str, metric: Metric, ebb: Keeper, ranked: &Ranked<Keeper>) {
    let single = |figure: f64| [figure].into_iter().collect::<Rounds>();
    let of_ebb = ranked.iter().find(|(keeper, _)| *keeper == ebb).map_or(f64::NAN, |found| found.1);
    for (keeper, figure) in ranked.iter().filter(|(keeper, _)| *keeper != ebb) {
        let row = Row::new(format!("{case}: {}", metric.what), metric.unit, &single(of_ebb));
        report.row(row.against(keeper.name(), &single(*figure)));
    }
}

/// Returns the ways that got through the second screening, the best first, and then those that were
/// in the first only. A way's rank is how far it is behind the best one in both: the best one by a
/// single figure was often only lucky.
fn best_of_both(first: &Ranked<Keeper>, second: &Ranked<Keeper>, better: Better) -> Vec<Keeper> {
    let behind = |ranked: &Ranked<Keeper>, keeper: Keeper| {
        let (best, found) =
            (ranked.first()?.1, ranked.iter().find(|(other, _)| *other == keeper)?.1);
        Some(if better == Better::Less { found / best } else { best / found })
    };
    let both = second.iter().map(|(keeper, _)| {
        let of = [behind(first, *keeper), behind(second, *keeper)];
        (*keeper, geometric_mean(&of.into_iter().flatten().collect::<Vec<f64>>()))
    });
    let mut both: Ranked<Keeper> = both.collect();
    both.sort_by(|a, b| a.1.total_cmp(&b.1));
    let rest = first.iter().filter(|(keeper, _)| second.iter().all(|(other, _)| other != keeper));
    both.iter().chain(rest).map(|(keeper, _)| *keeper).collect()
}

/// Returns the best ways that [`screen`] found, at most `most`, without defaults that were not
/// among the best.
pub fn best(linux: &[Keeper], most: usize) -> &[Keeper] {
    &linux[..linux.len().min(BEST).min(most)]
}

fn with_defaults(best: impl Iterator<Item = Keeper>) -> Vec<Keeper> {
    let mut chosen: Vec<Keeper> = best.collect();
    for plain in PLAIN_LINUX {
        if !chosen.contains(&plain) {
            chosen.push(plain);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::swap::linux::{Memory, Swap};

    #[test]
    fn a_way_that_was_lucky_once_is_not_the_best() {
        let of = |swap| Keeper::Linux(Linux { memory: Memory::Anonymous, swap });
        let [lucky, good, killed] = [Swap::Disk(0), Swap::Disk(3), Swap::Zram("lz4")].map(of);
        let first = vec![(killed, 0.9), (lucky, 1.0), (good, 1.1)];
        let second = vec![(good, 1.1), (lucky, 2.0)];
        assert_eq!(best_of_both(&first, &second, Better::Less), [good, lucky, killed]);
        let first = vec![(lucky, 9.0), (good, 8.0)];
        let second = vec![(good, 8.0), (lucky, 1.0)];
        assert_eq!(best_of_both(&first, &second, Better::More), [good, lucky]);
        let joined = of(Swap::ZramDisk("lz4"));
        let second = vec![(joined, 9.0), (good, 8.0), (lucky, 1.0)];
        assert_eq!(best_of_both(&first, &second, Better::More), [joined, good, lucky]);
    }

    #[test]
    fn defaults_go_on_whether_they_are_the_best_or_not() {
        let zram = Keeper::Linux(Linux { memory: Memory::Anonymous, swap: Swap::Zram("lz4") });
        let [huge, memfd] = PLAIN_LINUX;
        assert_eq!(with_defaults([zram, memfd].into_iter()), [zram, memfd, huge]);
        assert_eq!(with_defaults([memfd, huge].into_iter()), [memfd, huge]);
    }
}
