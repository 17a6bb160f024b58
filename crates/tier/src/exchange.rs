//! Carrying out a plan.

use ebb_units::Gfn;

use crate::plan::{Move, Step};
use crate::tier::{Outcome, Tally, Tier, TierError};

/// What happened to the steps of a plan.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Exchanged {
    /// Frames that were to go to slower tiers.
    pub down: Tally,
    /// Frames that were to go to faster tiers.
    pub up: Tally,
    /// Frames that stayed because those that were to make room for them did.
    pub held_back_frames: u64,
}

/// Carries out steps of a plan, `batch` at a time. In each batch the moves down come first, and
/// then as many moves up as have become possible. So the faster tier needs no spare room, and the
/// slower one has to have room for a batch. `tiers` are the VM's, by number.
///
/// # Errors
/// A tier takes no pages. What was moved until then stays moved, and no content is lost.
pub fn carry_out(
    tiers: &[&dyn Tier],
    steps: &[Step],
    batch: usize,
) -> Result<Exchanged, TierError> {
    let mut all = Exchanged::default();
    for steps in steps.chunks(batch.max(1)) {
        let down = bring(tiers, steps.iter().filter_map(|step| step.down))?;
        let stuck: Vec<Gfn> = { down.iter() }
            .filter_map(|(moved, outcome)| outcome.stays().then_some(moved.gfn))
            .collect();
        let (free, held_back): (Vec<&Step>, Vec<&Step>) = { steps.iter() }
            .filter(|step| step.up.is_some())
            .partition(|step| step.down.is_none_or(|down| !stuck.contains(&down.gfn)));
        let up = bring(tiers, free.iter().filter_map(|step| step.up))?;
        all.down.extend(down.into_iter().map(|(_, outcome)| outcome));
        all.up.extend(up.into_iter().map(|(_, outcome)| outcome));
        all.held_back_frames += held_back.len() as u64;
    }
    Ok(all)
}

/// Moves frames, all those of one tier at once.
fn bring(
    tiers: &[&dyn Tier],
    moves: impl Iterator<Item = Move>,
) -> Result<Vec<(Move, Outcome)>, TierError> {
    let moves: Vec<Move> = moves.collect();
    let mut done = Vec::with_capacity(moves.len());
    for (number, tier) in (0u8..=u8::MAX).zip(tiers) {
        let own: Vec<Move> = moves.iter().filter(|moved| moved.to == number).copied().collect();
        if own.is_empty() {
            continue;
        }
        let frames: Vec<Gfn> = own.iter().map(|moved| moved.gfn).collect();
        done.extend(own.into_iter().zip(tier.bring(&frames)?));
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::ladder::TierKind;

    /// A tier that refuses the frames it is told to, and notes what comes.
    struct Shelf {
        stuck: Vec<Gfn>,
        came: Mutex<Vec<Gfn>>,
    }

    impl Tier for Shelf {
        fn kind(&self) -> TierKind {
            TierKind::Dram
        }

        fn bring(&self, frames: &[Gfn]) -> Result<Vec<Outcome>, TierError> {
            self.came.lock().unwrap().extend(frames);
            let outcome = |gfn| match self.stuck.contains(gfn) {
                true => Outcome::InUse,
                false => Outcome::Moved,
            };
            Ok(frames.iter().map(outcome).collect())
        }
    }

    fn swap(down: u64, up: u64) -> Step {
        Step {
            down: Some(Move { gfn: Gfn(down), from: 0, to: 1 }),
            up: Some(Move { gfn: Gfn(up), from: 1, to: 0 }),
        }
    }

    #[test]
    fn a_page_that_cannot_go_down_lets_none_up() {
        let shelf = |stuck: &[u64]| Shelf {
            stuck: stuck.iter().copied().map(Gfn).collect(),
            came: Mutex::default(),
        };
        let (fast, slow) = (shelf(&[12]), shelf(&[2]));
        let alone = Step { down: None, up: Some(Move { gfn: Gfn(14), from: 1, to: 0 }) };
        let steps = vec![swap(1, 11), swap(2, 12), swap(3, 13), alone];
        for batch in [1, 2, 100] {
            fast.came.lock().unwrap().clear();
            slow.came.lock().unwrap().clear();
            let done = carry_out(&[&fast, &slow], &steps, batch).unwrap();
            assert_eq!(*slow.came.lock().unwrap(), [1, 2, 3].map(Gfn));
            assert_eq!(*fast.came.lock().unwrap(), [11, 13, 14].map(Gfn));
            assert_eq!(done.held_back_frames, 1);
            assert_eq!((done.down.of(Outcome::Moved), done.down.of(Outcome::InUse)), (2, 1));
            assert_eq!(done.up.of(Outcome::Moved), 3);
        }
    }
}
