//! Hosts over time: the pilot's decisions change what it sees next.

use std::cmp::Ordering;

use proptest::prelude::*;

use super::*;

/// A VM that uses all that it works with in each second, and the rest never.
#[derive(Clone, Debug)]
struct Guest {
    rule: VmRule,
    memory: u64,
    working: u64,
    /// What it works with, as it was when something was evicted.
    known: u64,
    resident: Resident,
    limit: Option<u64>,
    refaulted: u64,
    compressed: Zone,
    /// Whether it tells what it needs.
    tells: bool,
    plugged: Plugged,
}

/// Memory that a guest unplugs, from whom nothing else can be taken; all 0: it has none.
#[derive(Clone, Copy, Debug, Default)]
struct Plugged {
    full: u64,
    asked: u64,
    now: u64,
}

/// A guest unplugs so much in a second.
const UNPLUGS: u64 = 64;

/// Compressed memory. Pages shrink to a half.
#[derive(Clone, Copy, Debug, Default)]
struct Zone {
    taken: u64,
    most: u64,
    /// What went from there to the disk.
    written: u64,
}

/// What is resident.
#[derive(Clone, Copy, Debug)]
struct Resident {
    working: u64,
    cold: u64,
    free: u64,
}

impl Guest {
    /// A guest all of whose memory is resident. In MiB.
    fn new(class: Class, memory: u64, working: u64, cold: u64) -> Guest {
        let rule = VmRule { class, ..VmRule::default() };
        let resident = Resident { working, cold, free: memory - working - cold };
        let (limit, compressed) = (None, Zone::default());
        let (tells, plugged) = (false, Plugged::default());
        Guest {
            rule,
            memory,
            working,
            known: working,
            resident,
            limit,
            refaulted: 0,
            compressed,
            tells,
            plugged,
        }
    }

    /// Makes it a guest from which nothing can be taken but what it unplugs: a half of it.
    fn unplugging(mut self) -> Guest {
        let full = self.memory / 2;
        (self.tells, self.plugged) = (true, Plugged { full, asked: full, now: full });
        self
    }

    /// Has it work with so much of what it has used from now on.
    fn needs(&mut self, working: u64) {
        let used = self.resident.working + self.resident.cold;
        self.resident.working = used.min(working);
        self.resident.cold = used - self.resident.working;
        self.working = working;
    }

    /// What it has.
    fn size(&self) -> u64 {
        self.memory - (self.plugged.full - self.plugged.now)
    }

    /// Plugs or unplugs what it was asked for.
    fn plug(&mut self) {
        if self.plugged.full == 0 {
            return;
        }
        let Plugged { asked, now, .. } = &mut self.plugged;
        *now = (*now).saturating_sub(UNPLUGS).max(*asked);
        let all = self.resident.working + self.resident.cold + self.resident.free;
        let mut over = all.saturating_sub(self.size());
        for part in [&mut self.resident.free, &mut self.resident.cold] {
            let gone = over.min(*part);
            (*part, over) = (*part - gone, over - gone);
        }
        assert_eq!(over, 0, "it works with that");
    }

    fn resident(&self) -> u64 {
        self.resident.working + self.resident.cold + self.resident.free + self.compressed.taken
    }

    /// A second of work.
    fn work(&mut self) {
        self.plug();
        let missed = self.working.saturating_sub(self.resident.working);
        self.refaulted += missed;
        self.resident.working = self.working;
        let zone = &mut self.compressed;
        zone.taken = zone.taken.saturating_sub(missed / 2);
        zone.written += zone.taken.saturating_sub(zone.most);
        zone.taken = zone.taken.min(zone.most);
        let before = self.resident();
        let mut over = before.saturating_sub(self.limit.unwrap_or(u64::MAX));
        let Resident { working, cold, free } = &mut self.resident;
        for part in [free, cold, working] {
            let gone = over.min(*part);
            (*part, over) = (*part - gone, over - gone);
        }
        let evicted = before - self.resident();
        self.known = if evicted > 0 { self.working } else { self.known.max(self.working) };
        self.compress(evicted);
    }

    /// Compresses as much of what was evicted as there is room for, which takes the room of more.
    fn compress(&mut self, evicted: u64) {
        let floor = 48 + self.memory / 64;
        let share = self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(floor) / 2);
        let room = self.compressed.most.min(share).saturating_sub(self.compressed.taken);
        let mut over = room.min(evicted / 2);
        self.compressed.taken += over;
        let Resident { working, cold, free } = &mut self.resident;
        for part in [free, cold, working] {
            let gone = over.min(*part);
            (*part, over) = (*part - gone, over - gone);
        }
    }

    fn obey(&mut self, action: Action) {
        match action {
            Action::Reclaim { bytes } => {
                self.resident.free -= (bytes / MIB).min(self.resident.free);
            }
            Action::Limit { from, to } => {
                assert_eq!(from, self.limit.map(|limit| limit * MIB));
                self.limit = to.map(|bytes| bytes / MIB);
            }
            Action::Compress { from, to } => {
                assert_eq!(from, self.compressed.most * MIB);
                self.compressed.most = to.expect("a size") / MIB;
            }
            Action::Plug { from, to } => {
                assert_eq!(from, self.plugged.asked * MIB);
                self.plugged.asked = to / MIB;
            }
        }
    }

    fn seen_as(&self, name: String) -> VmSight {
        let Plugged { full, asked, now } = self.plugged;
        let plugged = PluggedSight {
            bytes: now * MIB,
            asked_bytes: asked * MIB,
            full_bytes: full * MIB,
            block_bytes: MIB,
            may_unplug: true,
        };
        let size = self.size();
        VmSight {
            name,
            rule: self.rule,
            memory_bytes: size * MIB,
            resident_bytes: self.resident() * MIB,
            floor_bytes: (48 + self.memory / 64) * MIB,
            limit_bytes: self.limit.map(|limit| limit * MIB),
            spare_bytes: self.resident.free * MIB,
            working_bytes: self.limit.map(|_| self.known * MIB),
            refaulted_bytes: self.refaulted * MIB,
            guest: self.tells.then(|| MemoryFigures {
                total_bytes: size * MIB,
                available_bytes: (size - self.working) * MIB,
            }),
            plugged: Some(plugged).filter(|_| full > 0),
            compressed: Some(CompressedSight {
                own_bytes: 0,
                bytes: self.compressed.taken * MIB,
                most_bytes: self.compressed.most * MIB,
            }),
            waits: false,
            may_reclaim: full == 0,
            may_limit: full == 0,
        }
    }
}

/// A host, its VMs and its pilot.
struct Host {
    memory: u64,
    guests: Vec<Guest>,
    pilot: Pilot,
    seconds: u64,
    /// How often each VM's limit has turned from down to up or back, and its last direction.
    turns: Vec<(u32, Ordering)>,
    /// The same of compressed memory.
    compressed_turns: Vec<(u32, Ordering)>,
    /// The same of plugged memory.
    plugged_turns: Vec<(u32, Ordering)>,
    /// What came back since this was last counted.
    refaulted: u64,
}

impl Host {
    fn new(memory: u64, guests: Vec<Guest>) -> Host {
        let turns = vec![(0, Ordering::Equal); guests.len()];
        let (compressed_turns, plugged_turns) = (turns.clone(), turns.clone());
        let (pilot, seconds, refaulted) = (Pilot::default(), 0, 0);
        Host { memory, guests, pilot, seconds, turns, compressed_turns, plugged_turns, refaulted }
    }

    fn rule(&self) -> HostRule {
        HostRule {
            reserve: Below::Bytes(self.memory / 20 * MIB),
            stall_permille: None,
            swap_max_bytes: None,
        }
    }

    fn available(&self) -> u64 {
        let taken: u64 = self.guests.iter().map(Guest::resident).sum();
        self.memory.saturating_sub(taken)
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            let before: u64 = self.guests.iter().map(|guest| guest.refaulted).sum();
            self.guests.iter_mut().for_each(Guest::work);
            let after: u64 = self.guests.iter().map(|guest| guest.refaulted).sum();
            self.refaulted += after - before;
            self.look(true);
            // The host hears at once of a guest that misses memory.
            self.look(false);
            self.seconds += 1;
        }
    }

    /// Looks at the end of a second, or a little later at VMs that miss memory.
    fn look(&mut self, is_whole: bool) {
        let sights: Vec<VmSight> = { self.guests.iter().enumerate() }
            .map(|(number, guest)| guest.seen_as(number.to_string()))
            .collect();
        let host = Budget {
            name: "the host".into(),
            total_bytes: self.memory * MIB,
            available_bytes: self.available() * MIB,
        };
        let host = HostMemory { host, groups: Vec::new(), stall_permille: None };
        let (now, rule) = (Duration::from_secs(self.seconds), self.rule());
        let decisions = match is_whole {
            true => self.pilot.look(now, rule, &host, &sights),
            false => self.pilot.relieve(now + Duration::from_millis(500), rule, &host, &sights),
        };
        // Until there is twice the reserve, and some more.
        let border = self.memory / 20 * MIB * 2;
        let mut lacks = (border + border * 3 / 16).saturating_sub(host.host.available_bytes);
        for decision in decisions {
            let number: usize = decision.vm.parse().unwrap();
            let (guest, sight) = (&mut self.guests[number], &sights[number]);
            assert!(!guest.rule.is_held, "{decision}");
            if let Action::Limit { from, to } = decision.action {
                let to = to.unwrap_or(sight.memory_bytes);
                // What is above the maximum goes step by step.
                let most = sight.most_bytes().max(sight.has_bytes());
                assert!(to >= sight.least_bytes() && to <= most, "{decision}");
                turn(&mut self.turns[number], to.cmp(&from.unwrap_or(sight.memory_bytes)));
            }
            if let Action::Compress { from, to } = decision.action {
                let to = to.expect("a size");
                assert!(to <= sight.memory_bytes, "{decision}");
                turn(&mut self.compressed_turns[number], to.cmp(&from));
            }
            if let Action::Plug { from, to } = decision.action {
                let gone = from.saturating_sub(to);
                assert!(to <= guest.plugged.full * MIB && gone <= lacks, "{decision}, {lacks}");
                lacks -= gone;
                let left = sight.memory_bytes - gone;
                let working = guest.working * MIB + sight.guest.map_or(0, |it| it.reserve_bytes());
                assert!(gone == 0 || left >= sight.least_bytes().max(working), "{decision}");
                turn(&mut self.plugged_turns[number], to.cmp(&from));
            }
            guest.obey(decision.action);
        }
    }

    fn count_anew(&mut self) {
        let all = self.turns.iter_mut().chain(&mut self.compressed_turns);
        let all = all.chain(&mut self.plugged_turns);
        all.for_each(|(turns, _)| *turns = 0);
        self.refaulted = 0;
    }
}

/// Notes a change in that direction.
fn turn((turns, before): &mut (u32, Ordering), direction: Ordering) {
    *turns += u32::from(*before == direction.reverse());
    *before = direction;
}

#[test]
fn cold_memory_makes_room_for_what_others_work_with() {
    let guests = vec![
        Guest::new(Class::Latency, 4000, 2000, 1000),
        Guest::new(Class::Normal, 4000, 1000, 3000),
        Guest::new(Class::Batch, 4000, 500, 3000),
    ];
    let mut host = Host::new(8000, guests);
    host.run(120);
    assert_eq!(host.pilot.stage(), Stage::Ample, "{} MiB", host.available());
    assert_eq!(host.refaulted, 0);
    let cold = host.guests.iter().map(|guest| guest.resident.cold).collect::<Vec<_>>();
    assert!(cold[2] < cold[0], "the batch VM gave first: {cold:?}");
}

#[test]
fn a_vm_that_needs_more_gets_it_from_batch_vms() {
    let guests = vec![
        Guest::new(Class::Latency, 4000, 1000, 0),
        Guest::new(Class::Batch, 4000, 3000, 0),
        Guest::new(Class::Batch, 4000, 3000, 0),
    ];
    let mut host = Host::new(8000, guests);
    host.run(60);
    let guest = &mut host.guests[0];
    guest.working = 3500;
    host.run(60);
    let guest = &host.guests[0];
    assert_eq!(guest.resident.working, 3500);
    host.count_anew();
    let before = host.guests[0].refaulted;
    host.run(60);
    assert_eq!(host.guests[0].refaulted, before, "it does not pay for the others");
    assert!(host.available() > 200, "{} MiB", host.available());
}

/// As in the benchmark: each of them needs all that it has once, and there is no room for two.
#[test]
fn vms_that_need_their_memory_in_turn_give_it_to_each_other() {
    let (few, all) = (1020, 3100);
    let guests = vec![
        Guest::new(Class::Latency, 3840, all, 0),
        Guest::new(Class::Normal, 3840, few, all - few),
        Guest::new(Class::Batch, 3840, few, all - few),
    ];
    let mut host = Host::new(6912, guests);
    host.run(60);
    assert_eq!(host.refaulted, 0, "the latency VM keeps what it needs");
    for needy in 1..3 {
        let guests = host.guests.iter_mut().enumerate();
        guests.for_each(|(place, guest)| guest.needs(if place == needy { all } else { few }));
        host.run(60);
        host.count_anew();
        host.run(20);
        // A probe may find what somebody misses.
        assert!(host.refaulted < 600, "{} MiB for {needy}", host.refaulted);
    }
    let latency = &host.guests[0];
    assert!(latency.resident() < 2 * few && latency.refaulted < 200, "{latency:?}");
}

#[test]
fn vms_of_a_class_share_what_there_is_by_weight() {
    let of = |weight| {
        let mut guest = Guest::new(Class::Normal, 8000, 7000, 500);
        guest.rule.weight = weight;
        guest
    };
    let mut host = Host::new(9000, vec![of(100), of(300)]);
    host.run(900);
    let mut has = [0, 0];
    for _ in 0..300 {
        host.run(1);
        let each = has.iter_mut().zip(&host.guests);
        each.for_each(|(sum, guest)| *sum += guest.limit.unwrap_or(guest.memory) / 300);
    }
    let [light, heavy] = has;
    assert!(heavy > light * 3 / 2, "{light} and {heavy} MiB");
    assert!(light > 1000, "{light} and {heavy} MiB");
}

#[test]
fn thousands_of_vms_are_looked_at() {
    let guests = (0..4000).map(|_| Guest::new(Class::Normal, 1000, 300, 500)).collect();
    let mut host = Host::new(3_500_000, guests);
    host.run(90);
    assert_eq!(host.pilot.stage(), Stage::Ample, "{} MiB", host.available());
    assert_eq!(host.refaulted, 0);
}

fn guests() -> impl Strategy<Value = Vec<Guest>> {
    let class = prop_oneof![Just(Class::Latency), Just(Class::Normal), Just(Class::Batch)];
    let flags = (any::<bool>(), any::<bool>());
    let guest = (class, 512u64..8192, 0u64..=100, 0u64..=100, flags, 1u32..1000);
    let guest = guest.prop_map(|(class, memory, working, cold, (bounded, tells), weight)| {
        let working = (memory - 200) * working / 100;
        let cold = (memory - working) * cold / 100;
        let mut guest = Guest::new(class, memory, working, cold);
        (guest.rule.weight, guest.tells) = (weight, tells);
        guest.rule.min_bytes = bounded.then_some(memory / 3 * MIB);
        guest.rule.max_bytes = bounded.then_some((memory - memory / 10).max(working) * MIB);
        guest
    });
    proptest::collection::vec(guest, 1..12)
}

proptest! {
    /// Bounds are checked at each decision.
    #[test]
    fn a_host_that_has_room_comes_to_rest(guests in guests(), spare in 0u64..4000) {
        let kept = |guest: &Guest| {
            let working = guest.working + guest.working / guest.rule.class.slack_part();
            let least = guest.rule.min_bytes.unwrap_or(0) / MIB;
            (working.max(least).max(48 + guest.memory / 64) + guest.memory / 32).min(guest.memory)
        };
        let needed: u64 = guests.iter().map(kept).sum();
        let mut host = Host::new((needed + spare) * 8 / 7 + 64, guests);
        host.run(400);
        host.count_anew();
        host.run(200);
        // A little comes back all the time without being missed.
        let tolerated = |guest: &Guest| guest.memory / guest.rule.class.refault_part();
        let tolerated: u64 = host.guests.iter().map(tolerated).sum();
        prop_assert!(host.refaulted <= 200 * tolerated, "{} MiB", host.refaulted);
        prop_assert!(host.available() >= host.memory / 20, "{} of {}", host.available(), host.memory);
        prop_assert!(host.turns.iter().all(|(turns, _)| *turns <= 2), "{:?}", host.turns);
        let turns = &host.compressed_turns;
        prop_assert!(turns.iter().all(|(turns, _)| *turns <= 2), "{turns:?}");
    }

    #[test]
    fn a_host_without_room_does_not_swing(guests in guests(), percent in 20u64..80) {
        let needed: u64 = guests.iter().map(|guest| guest.working + 300).sum();
        let mut host = Host::new((needed * percent / 100).max(1000), guests);
        host.run(600);
        host.count_anew();
        host.run(300);
        // While the host's stage is critical, a limit that is too low rests for 30 s, else for
        // minutes.
        prop_assert!(host.turns.iter().all(|(turns, _)| *turns <= 20), "{:?}", host.turns);
        // It grows once a minute at most.
        let turns = &host.compressed_turns;
        prop_assert!(turns.iter().all(|(turns, _)| *turns <= 10), "{turns:?}");
    }

    #[test]
    fn what_was_unplugged_comes_back_once_the_host_has_enough(
        guests in guests(),
        unplug in proptest::collection::vec(any::<bool>(), 12),
        percent in 50u64..100,
    ) {
        let guests = guests.into_iter().zip(unplug);
        let made = |(guest, unplugs): (Guest, bool)| match unplugs {
            true => guest.unplugging(),
            false => guest,
        };
        let guests: Vec<Guest> = guests.map(made).collect();
        let all: u64 = guests.iter().map(|guest| guest.memory).sum();
        let mut host = Host::new((all * percent / 100).max(1000), guests);
        host.run(600);
        host.count_anew();
        host.run(300);
        // A guest that got memory back rests for as long.
        let turns = &host.plugged_turns;
        prop_assert!(turns.iter().all(|(turns, _)| *turns <= 2), "{turns:?}");
        host.count_anew();
        host.memory = all * 3;
        host.run(300);
        let is_whole = |guest: &Guest| guest.plugged.now == guest.plugged.full;
        prop_assert!(host.guests.iter().all(is_whole), "{:?}", host.guests);
        let turns = &host.plugged_turns;
        prop_assert!(turns.iter().all(|(turns, _)| *turns <= 1), "{turns:?}");
    }
}

#[test]
fn guests_that_nothing_else_reaches_unplug_what_a_host_lacks() {
    let guest = Guest::new(Class::Normal, 4000, 1000, 3000).unplugging();
    let mut host = Host::new(15_000, vec![guest; 4]);
    host.run(120);
    assert!(host.available() >= host.memory / 20, "{} MiB", host.available());
    assert!(host.available() < host.memory / 8, "no more than it lacks: {}", host.available());
    let unplugged = |host: &Host| -> u64 {
        host.guests.iter().map(|guest| guest.plugged.full - guest.plugged.now).sum()
    };
    assert!(unplugged(&host) >= 1500, "{} MiB", unplugged(&host));
    // One of them needs what it had.
    let before = host.guests[0].plugged.now;
    host.guests[0].working = host.guests[0].size() - 100;
    host.run(60);
    assert!(host.guests[0].plugged.now > before, "{:?}", host.guests[0]);
}
