//! What all figures of swapping share: whom they compare, what they count, and their rows.

use anyhow::Context;
use vmtest::Vm;

use super::held;
use super::keeper::{Keeper, PLAIN_LINUX};
use super::linux::Linux;
use super::medium::Medium;
use super::rig::{Ground, Rig};
use crate::bench::blocks::{Blocks, Ranked, Taken};
use crate::bench::kept::Figures;
pub use crate::bench::kept::add;
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::{Better, Row};
use crate::bench::session::Session;
use crate::bench::stats::geometric_mean;
use crate::bench::work;
use crate::guard::guard;

/// VMs of each side.
pub const BLOCKS: usize = 5;
/// Number of Linux's screened ways that are screened once more.
const AGAIN: usize = 4;
/// Number of compressors that are then combined with the best memory.
const CROSSED: usize = 2;
/// Number of ways that go on to the blocks, beside Linux's defaults.
const BEST: usize = 3;

/// The report names guests that had less than this part of the memory of Ebb's.
const LEAST_PART: f64 = 0.95;

/// Name of the figure that says how often a VM was begun.
const TRIES: &str = "tries";

/// A figure of a VM, as rows show it.
#[derive(Clone, Copy)]
pub struct Told {
    pub what: &'static str,
    pub unit: &'static str,
    /// The figure's name among a VM's figures.
    pub figure: &'static str,
    pub better: Better,
}

/// What a VM cost, whatever it did.
pub const COUNTED: [Told; 11] = [
    counted("CPU of QEMU and the daemon", "s", "cpu"),
    counted("CPU of all that the host did, but for this bench", "s", "host-cpu"),
    counted("memory of the guest's on average, compressed memory in it", "MiB", "guest-mib"),
    counted("the same at most", "MiB", "guest-most-mib"),
    counted("memory of the guest's and the daemon's on average", "MiB", "all-mib"),
    counted("memory of the daemon's own", "MiB", "daemon-mib"),
    counted("most memory of all processes together", "MiB", "peak-mib"),
    counted("memory of QEMU's own that is swapped out in the end", "MiB", "own-swapped-mib"),
    counted("times that QEMU waited for memory that only this bench gives", "", "waits"),
    counted("how long it waited for that", "s", "waited"),
    counted("complaints of the guest's kernel", "", "complaints"),
];

const fn counted(what: &'static str, unit: &'static str, figure: &'static str) -> Told {
    Told { what, unit, figure, better: Better::Less }
}

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

/// Runs a VM, and runs it once more if version 1 of control groups killed a QEMU that Linux swaps.
/// Ebb has no second try. The number of tries is among the figures.
///
/// # Errors
/// Those of `run`.
pub fn again(
    keeper: Keeper,
    run: impl FnMut() -> anyhow::Result<Figures>,
) -> anyhow::Result<Figures> {
    let (mut run, mut tries) = (run, 0.0);
    let counted = || {
        tries += 1.0;
        run()
    };
    let figures = match keeper {
        Keeper::Linux(_) => work::again_if_killed(counted),
        _ => guard(counted),
    };
    let mut figures = figures.with_context(|| format!("{tries} tries"))?;
    add(&mut figures, TRIES, tries);
    Ok(figures)
}

/// Says in one sentence which sides needed more than one try for a VM, or returns `None`.
fn tries(taken: &Taken, keepers: &[Keeper]) -> Option<String> {
    let of = |keeper: &Keeper| {
        let tries = taken.rounds(&keeper.name(), TRIES);
        let (vms, sum) = (tries.figures().len(), tries.figures().iter().sum::<f64>());
        (sum > vms as f64).then(|| format!("{} {sum} for {vms} VMs", keeper.name()))
    };
    let list: Vec<String> = keepers.iter().filter_map(of).collect();
    let all = list.join("; ");
    (!list.is_empty()).then(|| format!("{}: tries, since QEMU was killed: {all}.", taken.case))
}

/// How Linux's ways are screened.
pub struct Screening<'a> {
    /// Names of the two cases: the one for all ways, and the one for the best of them.
    pub cases: [&'a str; 2],
    /// Figure by which the best are chosen.
    pub told: Told,
    /// Ebb's side, which runs for comparison.
    pub ebb: Keeper,
    pub beside: &'a [Keeper],
    /// Whether the guests' memory compresses. If it does not, a way that compresses keeps
    /// everything in memory, so the guests are not limited.
    pub shrinks: bool,
    /// Disk that they swap to.
    pub medium: Medium,
}

fn name(keeper: Keeper) -> String {
    keeper.name().into_owned()
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
    let Screening { cases, told, ebb, beside, shrinks, medium } = *screening;
    if session.identity.quick {
        return Ok(PLAIN_LINUX.into());
    }
    let by = (told.figure, told.better);
    let mut one = |keeper, pass| held_to(one(keeper, pass)?, keeper, held::SCREENED_PERCENT);
    let linux = Linux::offered(shrinks, medium).into_iter();
    let linux: Vec<Keeper> = linux.map(Keeper::Linux).collect();
    let all = [&[ebb], beside, &linux].concat();
    let case = format!("screening, {}", cases[0]);
    let first = blocks.screen(report, &case, (&all, name), by, |keeper| one(keeper, 0))?;
    tell(report, &case, told, ebb, &first);
    let first = of_linux(&first);
    let ways: Vec<Linux> = first.iter().filter_map(|(keeper, _)| keeper.linux()).collect();
    let crossed: Vec<Keeper> =
        Linux::crossed(&ways, CROSSED).into_iter().map(Keeper::Linux).collect();
    let best = first.iter().take(AGAIN).map(|(keeper, _)| *keeper);
    let again: Vec<Keeper> = best.chain(crossed.iter().copied()).chain([ebb]).collect();
    let case = format!("screening again, {}", cases[1]);
    let second = blocks.screen(report, &case, (&again, name), by, |keeper| one(keeper, 1))?;
    tell(report, &case, told, ebb, &second);
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
    let best = best_of_both(&first, &of_linux(&second), told.better);
    Ok(with_defaults(best.into_iter().take(BEST)))
}

fn of_linux(ranked: &Ranked<Keeper>) -> Ranked<Keeper> {
    ranked.iter().filter(|(keeper, _)| matches!(keeper, Keeper::Linux(_))).copied().collect()
}

/// Adds a row for each screened way.
fn tell(report: &mut Report, case: &str, told: Told, ebb: Keeper, ranked: &Ranked<Keeper>) {
    let single = |figure: f64| [figure].into_iter().collect::<Rounds>();
    let of_ebb = ranked.iter().find(|(keeper, _)| *keeper == ebb).map_or(f64::NAN, |found| found.1);
    for (keeper, figure) in ranked.iter().filter(|(keeper, _)| *keeper != ebb) {
        let row = Row::new(format!("{case}: {}", told.what), told.unit, &single(of_ebb));
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

/// Fails if a side was above its limit on average; otherwise returns its figures. Linux may have
/// `linux_percent` of its limit.
fn held_to(figures: Figures, keeper: Keeper, linux_percent: f64) -> anyhow::Result<Figures> {
    let percent = match keeper {
        Keeper::Linux(_) => linux_percent,
        _ => held::HELD_PERCENT,
    };
    held::check(&figures, percent)?;
    Ok(figures)
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
    told: Told,
    (ebb, linux): (Keeper, &[Keeper]),
    goal: Option<f64>,
) {
    let what = match ebb {
        Keeper::Ebb => format!("{}: {}", taken.case, told.what),
        _ => format!("{}: {}, {}", taken.case, told.what, ebb.name()),
    };
    let of_ebb = taken.rounds(&ebb.name(), told.figure);
    let new = || Row::new(what.clone(), told.unit, &of_ebb).failed(taken.failed());
    let others: Vec<(String, Rounds)> = linux
        .iter()
        .map(|keeper| (name(*keeper), taken.rounds(&keeper.name(), told.figure)))
        .filter(|(_, rounds)| !rounds.figures().is_empty())
        .collect();
    if let Some(goal) = goal {
        let row = new().against_best(&others, told.better);
        report.row(match told.better {
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
    for told in COUNTED {
        rows(report, taken, told, (ebb, &linux[..linux.len().min(1)]), None);
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
    use super::*;
    use crate::bench::identity::Identity;
    use crate::bench::swap::linux::{Memory, Swap};

    /// A killed QEMU is a second try for Linux and a failure for Ebb. The report tells both.
    #[test]
    fn tries_are_told_and_ebb_has_one() {
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
        let seconds = Told { what: "x", unit: "s", figure: "s", better: Better::Less };
        rows(&mut report, &taken, seconds, (Keeper::Ebb, &PLAIN_LINUX[..1]), Some(0.9));
        report.finish(&session);
        let json = std::fs::read_to_string(report.save(directory.path()).unwrap()).unwrap();
        assert!(json.contains("Ebb failed 1 of 5 times") && json.contains("\"met\": false"));
        let tries = taken.rounds(&PLAIN_LINUX[0].name(), TRIES);
        assert!(tries.figures().len() == 4, "{:?}", tries.figures());
    }

    #[test]
    fn guests_with_less_memory_are_told() {
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

    #[test]
    fn who_was_lucky_once_is_not_the_best() {
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
