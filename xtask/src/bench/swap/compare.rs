//! What all figures of swapping share: whom they compare, what they count, and their rows.

mod metric;
mod screening;
mod side;

use vmtest::Vm;

pub use self::metric::{COUNTED, Metric};
pub use self::screening::{Screening, best, screen};
pub use self::side::again;
use self::side::{held_to, name, tries};
use super::held;
use super::keeper::Keeper;
use super::rig::{Ground, Rig};
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::kept::Figures;
pub use crate::bench::kept::add;
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::{Better, Row};
use crate::bench::session::Session;
use crate::bench::stats::geometric_mean;

/// VMs of each side.
pub const BLOCKS: usize = 5;

/// The report names guests that had less than this part of the memory of Ebb's.
const LEAST_PART: f64 = 0.95;

/// Returns how many blocks a session takes.
pub fn blocks_of(session: &Session) -> usize {
    if session.identity.quick { 1 } else { BLOCKS }
}

/// Does the rig's work. Returns its figures with what it cost: see [`COUNTED`].
///
/// # Errors
/// Those of `work`.
pub fn counting(
    rig: &Rig,
    work: impl FnOnce(&mut Figures) -> anyhow::Result<()>,
) -> anyhow::Result<Figures> {
    let (mut figures, mut cost) = (Figures::new(), Figures::new());
    let (ground, vms, memory_mib) = rig.ground();
    let ((), held) =
        counted_on(&mut cost, (ground, &vms, memory_mib), || rig.watched(|| work(&mut figures)))?;
    figures.append(&mut cost);
    held.add_to(&mut figures, rig.held_to());
    Ok(figures)
}

/// Does the work of VMs that believe to have `memory_mib` MiB each, and adds what it cost.
///
/// # Errors
/// Those of `work`.
pub fn counted_on<T>(
    figures: &mut Figures,
    (ground, vms, memory_mib): (&Ground, &[&Vm], u64),
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    // Asking for the peak resets it.
    ground.peak_mib()?;
    let (before, waits) = (ground.ran()?, ground.waits());
    let done = work();
    // A guest that waits long for its memory complains, and the complaints are counted.
    vms.iter().for_each(|vm| vm.forgive());
    let done = done?;
    let (after, waits_after) = (ground.ran()?, ground.waits());
    let complaints: usize = vms.iter().map(|vm| vm.complaints().len()).sum();
    let mut add = |name: &str, figure: f64| add(figures, name, figure);
    add("cpu", after.group - before.group);
    add("host-cpu", after.host - before.host);
    add("stolen", after.stolen - before.stolen);
    add("peak-mib", ground.peak_mib()?);
    add("own-swapped-mib", ground.own_swapped_mib(vms, memory_mib)?);
    add("waits", (waits_after.times - waits.times) as f64);
    add("waited", (waits_after.time - waits.time).as_secs_f64());
    add("complaints", complaints as f64);
    Ok(done)
}

/// Takes blocks of these sides. A side that exceeds its limit fails.
///
/// # Errors
/// Those of [`Blocks::take`].
pub fn take(
    (session, blocks, report): (&Session, &mut Blocks, &mut Report),
    case: &str,
    sides: &[Keeper],
    mut one: impl FnMut(Keeper) -> anyhow::Result<Figures>,
) -> anyhow::Result<Taken> {
    let held = |keeper| held_to(one(keeper)?, keeper, held::LINUX_PERCENT);
    let taken = blocks.take(report, case, (sides, name), blocks_of(session), held)?;
    if let Some(said) = tries(&taken, sides) {
        report.note(said);
    }
    Ok(taken)
}

/// Adds rows of a figure against the best of Linux's ways, which may have a goal, and against each
/// of them.
pub fn rows(
    report: &mut Report,
    taken: &Taken,
    metric: Metric,
    (ebb, linux): (Keeper, &[Keeper]),
    goal: Option<f64>,
) {
    let what = match ebb {
        Keeper::Ebb => format!("{}: {}", taken.case, metric.what),
        _ => format!("{}: {}, {}", taken.case, metric.what, ebb.name()),
    };
    let of_ebb = taken.rounds(&ebb.name(), metric.figure);
    let new = || Row::new(what.clone(), metric.unit, &of_ebb).failed(taken.failed());
    let others: Vec<(String, Rounds)> = linux
        .iter()
        .map(|keeper| (name(*keeper), taken.rounds(&keeper.name(), metric.figure)))
        .filter(|(_, rounds)| !rounds.figures().is_empty())
        .collect();
    if let Some(goal) = goal {
        let row = new().against_best(&others, metric.better);
        report.row(match metric.better {
            Better::Less => row.at_most(goal),
            Better::More => row.at_least(goal),
        });
    }
    for (name, rounds) in &others {
        let row = new();
        // Figures that may be zero have no geometric mean.
        let has_none = |rounds: &Rounds| rounds.figures().iter().any(|figure| *figure <= 0.0);
        report.row(match has_none(&of_ebb) || has_none(rounds) {
            true => row.against(name, rounds),
            false => row.against_vms(name, rounds),
        });
    }
}

/// Adds rows of [`COUNTED`] against the first of Linux's ways, which was the best in the screening.
pub fn costs(report: &mut Report, taken: &Taken, ebb: Keeper, linux: &[Keeper]) {
    for metric in COUNTED {
        rows(report, taken, metric, (ebb, &linux[..linux.len().min(1)]), None);
    }
    if let Some(said) = less_memory(taken, ebb, linux) {
        report.note(said);
    }
}

/// Says in one sentence which guests had clearly less memory than Ebb's, or returns `None`: times
/// of unequal guests are not comparable.
fn less_memory(taken: &Taken, ebb: Keeper, linux: &[Keeper]) -> Option<String> {
    let mean =
        |keeper: Keeper| geometric_mean(taken.rounds(&keeper.name(), held::GUESTS).figures());
    let of_ebb = mean(ebb);
    let parts = linux.iter().map(|keeper| (keeper, mean(*keeper) / of_ebb));
    let less = parts.filter(|(_, part)| *part < LEAST_PART);
    let list: Vec<String> =
        less.map(|(keeper, part)| format!("{} {:.0} %", keeper.name(), part * 100.0)).collect();
    (!list.is_empty()).then(|| {
        format!(
            "{}: guests had less memory than Ebb's, which favours Ebb: {}.",
            taken.case,
            list.join("; ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::side::TRIES;
    use super::*;
    use crate::bench::identity::Identity;
    use crate::bench::swap::keeper::PLAIN_LINUX;

    /// A killed QEMU is a second try for Linux and a failure for Ebb. The report tells both.
    #[test]
    fn tries_are_reported_and_ebb_has_one() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let place = directory.path().to_owned();
        let session = Session::new(Identity::of_test(), false, Some(1), place).unwrap();
        let mut report = Report::new("x");
        let mut blocks = Blocks::open(&session, "x").unwrap();
        let sides = [Keeper::Ebb, PLAIN_LINUX[0]];
        let mut killed = std::collections::BTreeSet::new();
        let context = (&session, &mut blocks, &mut report);
        let taken = take(context, "case", &sides, |keeper| {
            again(keeper, || match killed.insert(keeper) {
                true => anyhow::bail!("QEMU ended"),
                false => Ok(Figures::from([("s".into(), vec![1.0])])),
            })
        })
        .unwrap();
        assert_eq!(taken.failed(), 1);
        let notes = report.notes().join("\n");
        assert!(notes.contains("Ebb failed, which misses every goal: 1 tries: QEMU"), "{notes}");
        let seconds = Metric::less("x", "s", "s");
        rows(&mut report, &taken, seconds, (Keeper::Ebb, &PLAIN_LINUX[..1]), Some(0.9));
        report.finish(&session);
        let json = std::fs::read_to_string(report.save(directory.path()).unwrap()).unwrap();
        assert!(json.contains("Ebb failed 1 of 5 times") && json.contains("\"met\": false"));
        let tries = taken.rounds(&PLAIN_LINUX[0].name(), TRIES);
        assert!(tries.figures().len() == 4, "{:?}", tries.figures());
    }

    #[test]
    fn guests_with_less_memory_are_reported() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let place = directory.path().to_owned();
        let session = Session::new(Identity::of_test(), false, Some(1), place).unwrap();
        let mut report = Report::new("x");
        let mut blocks = Blocks::open(&session, "x").unwrap();
        let [huge, memfd] = PLAIN_LINUX;
        let context = (&session, &mut blocks, &mut report);
        let taken = take(context, "case", &[Keeper::Ebb, huge, memfd], |keeper| {
            let mib = if keeper == huge { 94.0 } else { 100.0 };
            Ok(Figures::from([(held::GUESTS.into(), vec![mib])]))
        });
        let said = less_memory(&taken.unwrap(), Keeper::Ebb, &PLAIN_LINUX).unwrap();
        assert!(said.contains("THP") && said.contains(" 94 %.") && !said.contains("memfd"));
    }
}
