//! Pools of random VMs: what must hold whatever they need, and equal parts against a giver of one
//! frame at a time.

use std::collections::BTreeMap;

use ebb_tier::pool::{Limits, Need, Pool, PoolError};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Vm {
    limits: Limits,
    /// The size of its hot set, round by round.
    hot_frames: Vec<u64>,
    /// Percent of what it should move that it moves, round by round.
    speed_percent: Vec<u64>,
}

fn vm() -> impl Strategy<Value = Vm> {
    let rounds = 1..8usize;
    (1u64..300, 0u32..=100, 100u32..300, rounds).prop_flat_map(|(share, lower, upper, rounds)| {
        let limits = Limits { share_frames: share, lower_percent: lower, upper_percent: upper };
        let hot = prop::collection::vec(0u64..600, rounds);
        let speed = prop::collection::vec(0u64..=100, rounds);
        (Just(limits), hot, speed).prop_map(|(limits, hot_frames, speed_percent)| Vm {
            limits,
            hot_frames,
            speed_percent,
        })
    })
}

struct Host {
    pool: Pool,
    vms: Vec<Vm>,
    needs: BTreeMap<String, Need>,
}

fn name(index: usize) -> String {
    format!("vm{index}")
}

impl Host {
    fn new(vms: &[Vm], spare: u64) -> Host {
        let shares: u64 = vms.iter().map(|vm| vm.limits.share_frames).sum();
        let mut pool = Pool::new(shares + spare);
        for (index, vm) in vms.iter().enumerate() {
            pool.set(&name(index), vm.limits).unwrap();
        }
        Host { pool, vms: vms.to_vec(), needs: BTreeMap::new() }
    }

    /// A round in which each VM moves a part of what it should.
    fn round(&mut self, round: usize) {
        for (index, vm) in self.vms.iter().enumerate() {
            let need = self.needs.entry(name(index)).or_default();
            need.hot_frames = vm.hot_frames[round % vm.hot_frames.len()];
        }
        for (vm, target) in self.pool.targets(&self.needs) {
            let index: usize = vm[2..].parse().unwrap();
            let speed = &self.vms[index].speed_percent;
            let held = &mut self.needs.get_mut(&vm).unwrap().held_frames;
            let (before, part) = (*held, speed[round % speed.len()]);
            *held = match target >= before {
                true => before + (target - before) * part / 100,
                false => before - (before - target) * part / 100,
            };
            self.check(&vm, before, target);
        }
        let held: u64 = self.needs.values().map(|need| need.held_frames).sum();
        assert!(held <= self.pool.capacity_frames(), "{held} are given out");
    }

    fn check(&self, vm: &str, before: u64, target: u64) {
        let limits = self.pool.limits(vm).unwrap();
        let lower = limits.lower_frames();
        assert!(target <= limits.upper_frames(), "{vm} gets {target} of {limits:?}");
        assert!(target >= before.min(lower), "{vm} loses what is its own: {target} of {limits:?}");
    }

    fn settle(&mut self) {
        for _ in 0..2 {
            for (vm, target) in self.pool.targets(&self.needs) {
                self.needs.get_mut(&vm).unwrap().held_frames = target;
            }
        }
    }
}

proptest! {
    #[test]
    fn nothing_is_given_twice_and_limits_hold(
        vms in prop::collection::vec(vm(), 1..6), spare in 0u64..200, rounds in 1usize..12,
    ) {
        let mut host = Host::new(&vms, spare);
        (0..rounds).for_each(|round| host.round(round));
        host.settle();
        let goals = host.pool.goals(&host.needs);
        let goal_sum: u64 = goals.values().sum();
        prop_assert!(goal_sum <= host.pool.capacity_frames());
        for (vm, goal) in goals {
            let (need, limits) = (host.needs[&vm], host.pool.limits(&vm).unwrap());
            let want = need.hot_frames.clamp(limits.lower_frames(), limits.upper_frames());
            prop_assert_eq!(need.held_frames, goal, "{} does not come to rest", vm);
            prop_assert!(goal >= want.min(limits.share_frames), "{} is short of its share", vm);
            prop_assert!(goal <= want.max(limits.share_frames), "{} has of others' shares", vm);
            prop_assert!(
                goal >= want || goal_sum == host.pool.capacity_frames(),
                "{} is short while there is some", vm
            );
        }
    }

    #[test]
    fn spare_memory_goes_to_the_vm_that_got_least(
        vms in prop::collection::vec(vm(), 1..6), spare in 0u64..200,
    ) {
        let mut host = Host::new(&vms, spare);
        for (index, vm) in vms.iter().enumerate() {
            let need = Need { held_frames: 0, hot_frames: vm.hot_frames[0] };
            host.needs.insert(name(index), need);
        }
        let want = |vm: &str| {
            let (need, limits) = (host.needs[vm], host.pool.limits(vm).unwrap());
            need.hot_frames.clamp(limits.lower_frames(), limits.upper_frames())
        };
        let own = |vm: &str| want(vm).min(host.pool.limits(vm).unwrap().share_frames);
        let mut naive: BTreeMap<String, u64> =
            (0..vms.len()).map(|index| (name(index), own(&name(index)))).collect();
        let mut left = host.pool.capacity_frames() - naive.values().sum::<u64>();
        // One frame at a time goes to the VM that got least so far: first of those that want it,
        // then of those whose share it is.
        let share = |vm: &str| host.pool.limits(vm).unwrap().share_frames;
        for upto in [&want as &dyn Fn(&str) -> u64, &share] {
            while left > 0 {
                let hungry = naive.iter_mut().filter(|(vm, got)| **got < upto(vm));
                let Some((_, got)) = hungry.min_by_key(|(vm, got)| **got - own(vm)) else { break };
                *got += 1;
                left -= 1;
            }
        }
        prop_assert_eq!(host.pool.goals(&host.needs), naive);
    }
}

#[test]
fn four_vms_as_in_the_paper() {
    // As in section 4.9.1: 8 GiB each. Two hot sets need about 6.5 GiB, one less than 6, one 9.5.
    let frames = |gib: f64| (gib * 262_144.0) as u64;
    let mut pool = Pool::new(frames(32.0));
    let mut needs = BTreeMap::new();
    for (vm, hot) in [("fotonik", 9.5), ("graph500", 6.5), ("redis", 6.5), ("pagerank", 2.0)] {
        pool.set(vm, Limits::of_share(frames(8.0))).unwrap();
        needs.insert(vm.into(), Need { held_frames: frames(8.0), hot_frames: frames(hot) });
    }
    let goals: Vec<u64> = pool.goals(&needs).into_values().collect();
    // Three VMs do not need 5 GiB. One takes 1.5 of them, and the rest stays, in equal parts.
    let third = 7 * 131_072 / 3;
    let [fotonik, graph500, pagerank, redis] = [9.5, 6.5, 6.0, 6.5].map(frames);
    assert_eq!(goals, [fotonik, graph500 + third + 1, pagerank + third + 1, redis + third]);
    // The three give up at once. The one that takes gets what is free, which is nothing yet.
    let first = pool.targets(&needs);
    assert_eq!(first["fotonik"], frames(8.0));
    for (vm, target) in first {
        needs.get_mut(&vm).unwrap().held_frames = target;
    }
    assert_eq!(pool.targets(&needs)["fotonik"], frames(9.5));
}

#[test]
fn limits_that_contradict_each_other_are_refused() {
    let mut pool = Pool::new(100);
    let limits = |share_frames, lower_percent, upper_percent| Limits {
        share_frames,
        lower_percent,
        upper_percent,
    };
    for (lower, upper) in [(101, 125), (75, 99), (110, 90)] {
        let refused = pool.set("a", limits(50, lower, upper));
        assert!(matches!(refused, Err(PoolError::NotAround { .. })), "{refused:?}");
    }
    assert_eq!(pool.set("a", limits(0, 75, 125)), Err(PoolError::NoShare { vm: "a".into() }));
    pool.set("a", limits(60, 75, 125)).unwrap();
    let refused = pool.set("b", limits(41, 75, 125));
    assert!(matches!(refused, Err(PoolError::TooMuch { left_frames: 40, .. })), "{refused:?}");
    let refused = pool.set("b", limits(u64::MAX, 75, 125));
    assert!(matches!(refused, Err(PoolError::TooMuch { .. })), "{refused:?}");
    pool.set("b", limits(40, 100, 100)).unwrap();
    // A new share for the same VM does not count twice.
    pool.set("a", limits(50, 75, 125)).unwrap();
    let refused = pool.set_capacity(89);
    assert_eq!(refused, Err(PoolError::TooLittle { capacity_frames: 89, shares_frames: 90 }));
    assert_eq!(pool.capacity_frames(), 100);
    pool.remove("b");
    pool.set_capacity(50).unwrap();
}

#[test]
fn a_vm_that_comes_gets_its_share_back_from_those_who_borrowed() {
    let mut pool = Pool::new(200);
    pool.set("a", Limits::of_share(100)).unwrap();
    let mut needs = BTreeMap::from([("a".into(), Need { held_frames: 100, hot_frames: 500 })]);
    assert_eq!(pool.targets(&needs)["a"], 125);
    needs.get_mut("a").unwrap().held_frames = 125;
    pool.set("b", Limits::of_share(100)).unwrap();
    needs.insert("b".into(), Need { held_frames: 0, hot_frames: 500 });
    let targets = pool.targets(&needs);
    assert_eq!((targets["a"], targets["b"]), (100, 75));
    needs.get_mut("a").unwrap().held_frames = 100;
    needs.get_mut("b").unwrap().held_frames = 75;
    assert_eq!(pool.targets(&needs)["b"], 100);
}
