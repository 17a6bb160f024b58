//! A side of a comparison: its name, its tries and its limit.

use anyhow::Context;

use crate::bench::blocks::Taken;
use crate::bench::kept::{Figures, add};
use crate::bench::swap::held;
use crate::bench::swap::keeper::Keeper;
use crate::bench::work;
use crate::guard::guard;

/// Name of the figure that says how often a VM was begun.
pub(super) const TRIES: &str = "tries";

pub(super) fn name(keeper: Keeper) -> String {
    keeper.name().into_owned()
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
pub(super) fn tries(taken: &Taken, keepers: &[Keeper]) -> Option<String> {
    let of = |keeper: &Keeper| {
        let tries = taken.rounds(&keeper.name(), TRIES);
        let (vms, sum) = (tries.figures().len(), tries.figures().iter().sum::<f64>());
        (sum > vms as f64).then(|| format!("{} {sum} for {vms} VMs", keeper.name()))
    };
    let list: Vec<String> = keepers.iter().filter_map(of).collect();
    let all = list.join("; ");
    (!list.is_empty()).then(|| format!("{}: tries, since QEMU was killed: {all}.", taken.case))
}

/// Fails if a side was above its limit on average; otherwise returns its figures. Linux may have
/// `linux_percent` of its limit.
pub(super) fn held_to(
    figures: Figures,
    keeper: Keeper,
    linux_percent: f64,
) -> anyhow::Result<Figures> {
    let percent = match keeper {
        Keeper::Linux(_) => linux_percent,
        _ => held::HELD_PERCENT,
    };
    held::check(&figures, percent)?;
    Ok(figures)
}
