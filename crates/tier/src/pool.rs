//! Fast memory that VMs share (vTMM, section 3.5).
//!
//! Each VM has a *share*. A VM with a larger hot set takes what the hot sets of others do not need
//! of their shares. Both stay within limits: 75 % and 125 % of the share, unless the administrator
//! says otherwise. A VM's share is its own: what nobody takes of it stays with it, and what others
//! took comes back when its hot set needs it.

use std::collections::BTreeMap;

use ebb_units::{Bytes, FRAME_BYTES};

use crate::plan::Heat;

/// Least page-degree of a page in a hot set (vTMM, section 3.5).
pub const HOT_DEGREE_MIN: u32 = 3;
/// Percent of the pages of at least that degree that are in the hot set: the hottest.
pub const HOT_PERCENT: u64 = 80;

/// The size of a VM's hot set. `order` has all its pages, by degree, coldest first.
pub fn hot_set_frames(order: &[Heat]) -> u64 {
    let cold = order.partition_point(|heat| heat.degree < HOT_DEGREE_MIN);
    ((order.len() - cold) as u64 * HOT_PERCENT).div_ceil(100)
}

/// What a VM may have of the fast memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Its share, in frames.
    pub share_frames: u64,
    /// Percent of its share that it always has, whatever others need.
    pub lower_percent: u32,
    /// Most that it can have, in percent of its share.
    pub upper_percent: u32,
}

impl Limits {
    /// Limits of 75 % and 125 %, as in the paper.
    pub fn of_share(share_frames: u64) -> Limits {
        Limits { share_frames, lower_percent: 75, upper_percent: 125 }
    }

    /// The fewest frames that it has.
    pub fn lower_frames(&self) -> u64 {
        percent(self.share_frames, self.lower_percent, 99)
    }

    /// The most frames that it can have.
    pub fn upper_frames(&self) -> u64 {
        percent(self.share_frames, self.upper_percent, 0)
    }

    /// The frames that a VM with a hot set of this size should have.
    fn want(&self, hot_frames: u64) -> u64 {
        hot_frames.clamp(self.lower_frames(), self.upper_frames())
    }
}

/// Takes a percentage. A `round` of 99 rounds up, of 0 down.
fn percent(frames: u64, percent: u32, round: u128) -> u64 {
    let part = (u128::from(frames) * u128::from(percent) + round) / 100;
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// What a VM has and needs now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Need {
    /// Its pages in fast memory.
    pub held_frames: u64,
    /// The size of its hot set ([`hot_set_frames`]).
    pub hot_frames: u64,
}

/// Why limits or shares are refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PoolError {
    /// The lower limit is above the share, or the upper limit below it.
    #[error(
        "limits of {lower_percent} % and {upper_percent} % leave out the share itself: give a \
         lower one of 100 % at most and an upper one of 100 % at least"
    )]
    NotAround {
        /// The lower limit.
        lower_percent: u32,
        /// The upper limit.
        upper_percent: u32,
    },
    /// A VM without fast memory has nothing to run in.
    #[error("{vm} has no share of the fast memory: give it some")]
    NoShare {
        /// The VM.
        vm: String,
    },
    /// The shares would together be more than the fast memory.
    #[error(
        "{vm} cannot have {} of fast memory: of {} the other VMs' shares leave {}",
        bytes(*share_frames), bytes(*capacity_frames), bytes(*left_frames)
    )]
    TooMuch {
        /// The VM that asked.
        vm: String,
        /// The share that was asked for.
        share_frames: u64,
        /// All the fast memory.
        capacity_frames: u64,
        /// What is in no other VM's share.
        left_frames: u64,
    },
    /// The fast memory would be less than the shares.
    #[error(
        "{} of fast memory is less than the VMs' shares of {} together: make those smaller first",
        bytes(*capacity_frames), bytes(*shares_frames)
    )]
    TooLittle {
        /// The fast memory that there would be.
        capacity_frames: u64,
        /// All shares together.
        shares_frames: u64,
    },
}

fn bytes(frames: u64) -> Bytes {
    Bytes(frames.saturating_mul(FRAME_BYTES))
}

/// The fast memory of a host, and each VM's share of it. The shares together are never more than
/// all of it.
#[derive(Clone, Debug)]
pub struct Pool {
    capacity_frames: u64,
    vms: BTreeMap<String, Limits>,
}

impl Pool {
    /// A pool of fast memory in which no VM has a share.
    pub fn new(capacity_frames: u64) -> Pool {
        Pool { capacity_frames, vms: BTreeMap::new() }
    }

    /// All fast memory.
    pub fn capacity_frames(&self) -> u64 {
        self.capacity_frames
    }

    /// A VM's limits.
    pub fn limits(&self, vm: &str) -> Option<Limits> {
        self.vms.get(vm).copied()
    }

    /// Changes how much fast memory there is.
    ///
    /// # Errors
    /// [`PoolError::TooLittle`]. Nothing has changed then.
    pub fn set_capacity(&mut self, capacity_frames: u64) -> Result<(), PoolError> {
        let shares_frames = self.shares_besides(None);
        if shares_frames > capacity_frames {
            return Err(PoolError::TooLittle { capacity_frames, shares_frames });
        }
        self.capacity_frames = capacity_frames;
        Ok(())
    }

    /// Gives a VM a share, or changes its share.
    ///
    /// # Errors
    /// The limits are refused for themselves, or together with other VMs' shares. Nothing has
    /// changed then.
    pub fn set(&mut self, vm: &str, limits: Limits) -> Result<(), PoolError> {
        let Limits { share_frames, lower_percent, upper_percent } = limits;
        if lower_percent > 100 || upper_percent < 100 {
            return Err(PoolError::NotAround { lower_percent, upper_percent });
        }
        if share_frames == 0 {
            return Err(PoolError::NoShare { vm: vm.into() });
        }
        let left_frames = self.capacity_frames.saturating_sub(self.shares_besides(Some(vm)));
        if share_frames > left_frames {
            let (vm, capacity_frames) = (vm.into(), self.capacity_frames);
            return Err(PoolError::TooMuch { vm, share_frames, capacity_frames, left_frames });
        }
        self.vms.insert(vm.into(), limits);
        Ok(())
    }

    /// Removes a VM. Its share returns to the pool.
    pub fn remove(&mut self, vm: &str) {
        self.vms.remove(vm);
    }

    fn shares_besides(&self, but: Option<&str>) -> u64 {
        let others = self.vms.iter().filter(|(vm, _)| Some(vm.as_str()) != but);
        others.map(|(_, limits)| limits.share_frames).sum()
    }

    /// What each VM should have in the end. Within its limits it gets what its hot set needs: up to
    /// its share in any case, and beyond that in equal parts of what the others leave. What nobody
    /// needs stays with the VMs that have a share in it, in equal parts too. `needs` of VMs that
    /// are not in the pool are ignored. A VM without `needs` has no hot set.
    pub fn goals(&self, needs: &BTreeMap<String, Need>) -> BTreeMap<String, u64> {
        let wanted = { self.vms.iter() }
            .map(|(vm, limits)| limits.want(needs.get(vm).map_or(0, |need| need.hot_frames)));
        let wanted: Vec<u64> = wanted.collect();
        let own: Vec<u64> = { self.vms.values().zip(&wanted) }
            .map(|(limits, &want)| want.min(limits.share_frames))
            .collect();
        let wanted_more: Vec<u64> = wanted.iter().zip(&own).map(|(want, own)| want - own).collect();
        let shares = self.vms.values().map(|limits| limits.share_frames);
        let unneeded: Vec<u64> = shares.zip(&own).map(|(share, own)| share - own).collect();
        let left = self.capacity_frames.saturating_sub(own.iter().sum());
        let more = spread(left, &wanted_more);
        let back = spread(left - more.iter().sum::<u64>(), &unneeded);
        let goals = own.iter().zip(more).zip(back).map(|((own, more), back)| own + more + back);
        self.vms.keys().cloned().zip(goals).collect()
    }

    /// What each VM may have now, on the way to its goal. A VM with too much gives it up at once. A
    /// VM with too little gets part of what is free: first those below their lower limit, then
    /// those below their share. Must be asked again when memory has become free. Moves go one way
    /// only: what is free in the pool holds no page.
    pub fn targets(&self, needs: &BTreeMap<String, Need>) -> BTreeMap<String, u64> {
        let goals = self.goals(needs);
        let held = |vm: &str| needs.get(vm).map_or(0, |need| need.held_frames);
        let all_held = needs.values().map(|need| need.held_frames).sum();
        let mut free = self.capacity_frames.saturating_sub(all_held);
        let mut targets: Vec<u64> = goals.iter().map(|(vm, &goal)| held(vm).min(goal)).collect();
        let stages: [fn(&Limits) -> u64; 3] =
            [Limits::lower_frames, |limits| limits.share_frames, |_| u64::MAX];
        for stage in stages {
            let upto = self.vms.values().zip(goals.values()).map(|(l, &goal)| stage(l).min(goal));
            let more: Vec<u64> =
                upto.zip(&targets).map(|(upto, &has)| upto.saturating_sub(has)).collect();
            for (has, more) in targets.iter_mut().zip(spread(free, &more)) {
                *has += more;
                free -= more;
            }
        }
        goals.into_keys().zip(targets).collect()
    }
}

/// Gives out `free` in equal parts, to nobody more than is wanted. What remains after the division
/// goes to the first.
fn spread(free: u64, wanted: &[u64]) -> Vec<u64> {
    let mut sorted = wanted.to_vec();
    sorted.sort_unstable();
    let (mut left, mut waiting, mut level) = (free, sorted.len() as u64, 0);
    for want in sorted {
        let rise = want - level;
        let Some(rest) = rise.checked_mul(waiting).and_then(|cost| left.checked_sub(cost)) else {
            break;
        };
        (left, level, waiting) = (rest, want, waiting - 1);
    }
    let mut over = 0;
    if let Some(rise) = left.checked_div(waiting) {
        (level, over) = (level + rise, left - rise * waiting);
    }
    let part = |&want: &u64| {
        let more = want > level && over > 0;
        over -= u64::from(more);
        want.min(level) + u64::from(more)
    };
    wanted.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hot_set_is_four_fifths_of_what_is_used_enough() {
        let order: Vec<Heat> = [0, 0, 1, 2, 2, 3, 3, 4, 9, 24]
            .map(|degree| Heat { gfn: ebb_units::Gfn(0), degree })
            .into();
        assert_eq!(hot_set_frames(&order), 4);
        assert_eq!(hot_set_frames(&order[..5]), 0);
        assert_eq!(hot_set_frames(&[]), 0);
    }

    #[test]
    fn equal_parts_go_round() {
        assert_eq!(spread(10, &[1, 100, 3, 100]), [1, 3, 3, 3]);
        assert_eq!(spread(11, &[1, 100, 3, 100]), [1, 4, 3, 3]);
        assert_eq!(spread(99, &[1, 2]), [1, 2]);
        assert_eq!(spread(1, &[0, 5, 5]), [0, 1, 0]);
        assert_eq!(spread(u64::MAX, &[u64::MAX, 3]), [u64::MAX - 3, 3]);
        assert!(spread(5, &[]).is_empty());
    }

    #[test]
    fn errors_are_one_clear_line() {
        let mut pool = Pool::new(1 << 20);
        pool.set("a", Limits::of_share(3 << 18)).unwrap();
        let error = pool.set("b", Limits::of_share(1 << 19)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "b cannot have 2 GiB of fast memory: of 4 GiB the other VMs' shares leave 1 GiB"
        );
        assert_eq!(pool.limits("b"), None);
    }
}
