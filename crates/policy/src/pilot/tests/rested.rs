//! What latency VMs give because others miss memory, and how they get it back.

use proptest::prelude::*;

use super::*;

const MEMORY: u64 = 4096 * MIB;

/// A host with a normal VM that has too little, and a latency VM that has needed all of its memory
/// some time ago.
#[derive(Default)]
struct Host {
    pilot: Pilot,
    seconds: u64,
    /// The latency VM's limit.
    limit_bytes: Option<u64>,
    /// What has come back to the latency VM and to the other one, in MiB.
    refaulted: [u64; 2],
}

impl Host {
    fn vms(&self) -> [VmSight; 2] {
        let [refaulted, refaulted_other] = self.refaulted.map(|mib| mib * MIB);
        let calm = VmSight {
            limit_bytes: self.limit_bytes,
            resident_bytes: self.limit_bytes.unwrap_or(MEMORY),
            working_bytes: Some(MEMORY),
            refaulted_bytes: refaulted,
            ..of_class("calm", Class::Latency)
        };
        let needy = VmSight {
            limit_bytes: Some(2048 * MIB),
            resident_bytes: 2048 * MIB,
            working_bytes: Some(2048 * MIB),
            refaulted_bytes: refaulted_other,
            ..vm("needy")
        };
        [calm, needy]
    }

    /// Looks after a second in which so many MiB came back to the latency VM and to the other one.
    /// Returns what the latency VM is to give, in MiB. What it gets is below 0.
    fn look(&mut self, available_mib: u64, missed_mib: [u64; 2]) -> i64 {
        self.refaulted.iter_mut().zip(missed_mib).for_each(|(sum, mib)| *sum += mib);
        let (now, vms) = (Duration::from_secs(self.seconds), self.vms());
        self.seconds += 1;
        let decisions = self.pilot.look(now, RULE, &memory(available_mib), &vms);
        let mut gives = 0;
        for decision in decisions.iter().filter(|decision| decision.vm == "calm") {
            let Action::Limit { from, to } = decision.action else { panic!("{decision}") };
            assert_eq!(from, self.limit_bytes);
            let [before, after] = [from, to].map(|limit| limit.unwrap_or(MEMORY));
            assert!(after >= vms[0].least_bytes(), "{decision}");
            let is_probe = decision.why.starts_with("what it uses least, since another VM misses");
            assert!(after > before || is_probe, "{decision}");
            gives += (before as i64 - after as i64) / MIB as i64;
            self.limit_bytes = to;
        }
        gives
    }
}

#[test]
fn a_latency_vm_that_misses_nothing_is_probed_for_one_that_misses_memory() {
    let mut host = Host::default();
    assert_eq!(host.look(700, [0, 0]), 0, "nobody misses anything");
    let gives = [(); 4].map(|()| host.look(700, [0, 100]));
    // A hundredth of its memory, and twice as much each time up to a 25th.
    assert_eq!(gives, [40, 81, 163, 163]);
    assert_eq!(host.look(2000, [0, 100]), 0, "the host has what the other one misses");
}

#[test]
fn probes_end_with_the_first_miss_and_begin_anew_after_a_while() {
    let mut host = Host::default();
    host.look(700, [0, 0]);
    assert_eq!([(); 2].map(|()| host.look(700, [0, 100])), [40, 81]);
    // After the first two, nothing may have been missed for 10 s. Then the limit rests for longer.
    for (rest, back) in [(10, 122), (10, 40), (20, 40), (40, 40)] {
        assert_eq!(host.look(700, [50, 100]), -back, "it gets back what it gave");
        for second in 1..rest {
            assert_eq!(host.look(700, [0, 100]), 0, "{second} of {rest} s");
        }
        assert_eq!(host.look(700, [0, 100]), 40, "after {rest} s");
    }
}

#[test]
fn what_the_last_probe_took_comes_back_although_the_host_has_nothing_to_give() {
    let mut host = Host::default();
    host.look(700, [0, 0]);
    assert_eq!([(); 2].map(|()| host.look(700, [0, 100])), [40, 81]);
    // Half of the reserve is available.
    assert_eq!(host.look(512, [50, 100]), -81);
    assert_eq!(host.look(512, [50, 100]), 0, "once");
}

#[test]
fn for_a_batch_vm_normal_vms_are_probed_by_larger_steps_but_no_latency_vm() {
    let mut pilot = Pilot::default();
    let mut look = |seconds: u64| {
        let needy = VmSight {
            limit_bytes: Some(2048 * MIB),
            resident_bytes: 2048 * MIB,
            working_bytes: Some(2048 * MIB),
            refaulted_bytes: seconds * 100 * MIB,
            ..of_class("needy", Class::Batch)
        };
        let idle = VmSight { working_bytes: Some(3072 * MIB), ..vm("idle") };
        let calm = of_class("calm", Class::Latency);
        let calm = VmSight { working_bytes: Some(3072 * MIB), ..calm };
        let now = Duration::from_secs(seconds);
        let decisions = pilot.look(now, RULE, &memory(700), &[needy, idle, calm]);
        let limits = limits(&decisions);
        let of = |name: &str| limits.iter().find(|one| one.0 == name).and_then(|one| one.1);
        [of("idle"), of("calm")]
    };
    for (seconds, gives) in [(0, 41), (1, 82), (2, 164), (3, 164)] {
        assert_eq!(look(seconds), [Some(3072 - gives), None]);
    }
}

#[test]
fn a_latency_vm_of_which_nothing_is_known_stays_whole_if_others_have_what_the_host_lacks() {
    let calm = VmSight { working_bytes: None, ..of_class("calm", Class::Latency) };
    let idle = VmSight { working_bytes: Some(3072 * MIB), ..vm("idle") };
    let decided = |available_mib, other: &VmSight| {
        let decisions = once(available_mib, &[calm.clone(), other.clone()]);
        limits(&decisions).into_iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(decided(900, &idle), ["idle"]);
    let small = VmSight { memory_bytes: 512 * MIB, resident_bytes: 400 * MIB, ..idle.clone() };
    assert_eq!(decided(900, &small), ["idle", "calm"], "it cannot give that much");
    let rule = VmRule { is_held: true, ..VmRule::default() };
    assert_eq!(decided(900, &VmSight { rule, ..idle }), ["calm"]);
}

proptest! {
    /// Bounds are checked at each look.
    #[test]
    fn a_latency_vm_is_left_alone_after_it_missed_memory(
        seconds in proptest::collection::vec(
            (520u64..1024, prop_oneof![4 => Just(0u64), 1 => 3u64..300], 0u64..300),
            1..120,
        ),
    ) {
        let (mut host, mut missed_at) = (Host::default(), None);
        for (second, (available_mib, missed_mib, needed_mib)) in (0u64..).zip(seconds) {
            if missed_mib > 0 && host.limit_bytes.is_some() {
                missed_at = Some(second);
            }
            let gives = host.look(available_mib, [missed_mib, needed_mib]);
            prop_assert!(gives <= 163, "{gives} MiB");
            let is_quiet = missed_at.is_none_or(|missed| second >= missed + 10);
            prop_assert!(gives <= 0 || is_quiet, "{gives} MiB after {missed_at:?}, at {second} s");
        }
    }
}
