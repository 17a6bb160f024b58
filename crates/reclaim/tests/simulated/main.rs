//! A hand against rounds over all of memory: what the guest pays for being looked at, how much is
//! looked at, and how much is evicted.

mod guest;
mod hands;
mod layout;
mod lists;
mod random;
mod rounds;

use std::time::Instant;

use ebb_inspect::Lru;
use ebb_inspect::PageKind::{self, Anonymous, File};
use ebb_reclaim::hand::Hand;
use ebb_units::Gfn;
use guest::{Figures, Guest, Program, Random};
use layout::{Layout, MIB};
use rounds::Rounds;

/// A guest and what it does. Sizes are in MiB, accesses in percent.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    memory: usize,
    limit: usize,
    /// Used again and again, each frame as likely as any other.
    hot: usize,
    hot_percent: usize,
    /// Accesses after which the part of the hot memory in use moves on; `None`: all of it is in
    /// use.
    moves_after: Option<usize>,
    /// Read from beginning to end, over and over.
    read: usize,
    read_percent: usize,
    read_kind: PageKind,
    /// Used now and then, by the remaining accesses.
    warm: usize,
    is_known: bool,
    /// Whether anonymous memory is on the guest's active list.
    is_active: bool,
    accesses: u64,
}

/// The working set fits, and a file that does not fit is read.
const STREAM: Case = Case {
    name: "stream",
    memory: 512,
    limit: 192,
    hot: 64,
    hot_percent: 85,
    moves_after: None,
    read: 256,
    read_percent: 5,
    read_kind: File,
    warm: 32,
    is_known: true,
    is_active: false,
    accesses: 4_000_000,
};

/// The working set does not fit.
const SCARCE: Case = Case {
    name: "scarce",
    memory: 256,
    limit: 96,
    hot: 40,
    hot_percent: 90,
    read: 0,
    read_percent: 0,
    warm: 80,
    accesses: 3_000_000,
    ..STREAM
};

struct Work {
    case: Case,
    hot: Vec<usize>,
    read: Vec<usize>,
    warm: Vec<usize>,
    reads: usize,
    count: usize,
}

impl Program for Work {
    fn next(&mut self, random: &mut Random, _: Instant) -> usize {
        self.count += 1;
        let dice = random.below(100);
        if dice >= self.case.hot_percent + self.case.read_percent {
            return self.warm[random.below(self.warm.len())];
        }
        if dice >= self.case.hot_percent {
            self.reads = (self.reads + 1) % self.read.len();
            return self.read[self.reads];
        }
        let Some(after) = self.case.moves_after else {
            return self.hot[random.below(self.hot.len())];
        };
        let part = self.hot.len() / 4;
        self.hot[(self.count / after * part / 2 + random.below(part)) % self.hot.len()]
    }
}

/// What the guest does with rounds, and with a hand.
fn compare(case: Case) -> (Figures, Figures) {
    let mut layout = Layout::new(case.memory * MIB, 100);
    let hot = layout.take(case.hot * MIB, Anonymous);
    let warm = layout.take(case.warm * MIB, Anonymous);
    let read = layout.take(case.read * MIB, case.read_kind);
    if !case.is_known {
        layout.pages.iter_mut().for_each(|page| page.kind = None);
    }
    if case.is_active {
        let anonymous = layout.pages.iter_mut().filter(|page| page.kind == Some(Anonymous));
        let lru = Lru { active: true, swap_backed: true, ..Lru::default() };
        anonymous.for_each(|page| page.lru = lru);
    }
    let frames = layout.pages.len();
    let work = || Work {
        case,
        hot: hot.clone(),
        read: read.clone(),
        warm: warm.clone(),
        reads: 0,
        count: 0,
    };
    let guest = || Guest::new(layout.pages.clone(), case.limit * MIB);
    let rounds = guest().run(work(), Rounds::new(frames), case.accesses);
    let hand = Hand::new(Gfn(frames as u64));
    let hand = guest().run(work(), hand, case.accesses);
    eprintln!("{0:8} rounds: {rounds}\n{0:8} hand:   {hand}", case.name);
    (rounds, hand)
}

/// Most frames to look at for each evicted frame.
const LOOKS: f64 = 40.0;

#[test]
fn a_guests_working_set_is_left_alone() {
    for case in [
        STREAM,
        Case { name: "slow", hot_percent: 90, read_percent: 1, accesses: 8_000_000, ..STREAM },
    ] {
        let (rounds, hand) = compare(case);
        assert!(hand.minor * 4 <= rounds.minor);
        assert!(hand.evicted * 10 <= rounds.evicted * 11);
        assert!(hand.looks() * 4.0 <= rounds.looks());
    }
}

#[test]
fn looking_does_not_grow_with_memory() {
    let large = Case {
        name: "large",
        memory: 4096,
        limit: 1024,
        hot: 256,
        warm: 256,
        read: 2048,
        accesses: 6_000_000,
        ..STREAM
    };
    let sparse = Case { name: "sparse", memory: 4096, read: 2048, ..STREAM };
    for case in [large, sparse] {
        let (rounds, hand) = compare(case);
        assert!(rounds.looks() > 200.0 && hand.looks() <= LOOKS);
        assert!(hand.minor * 4 <= rounds.minor);
        assert!(hand.evicted * 10 <= rounds.evicted * 11);
    }
}

#[test]
fn scarce_room_causes_no_more_evictions() {
    let scarcer =
        Case { name: "scarcer", memory: 512, hot: 80, hot_percent: 97, warm: 160, ..SCARCE };
    let scan = Case {
        name: "scan",
        hot_percent: 80,
        read: 120,
        read_percent: 15,
        read_kind: Anonymous,
        warm: 10,
        ..SCARCE
    };
    for case in [SCARCE, scarcer, scan] {
        let (rounds, hand) = compare(case);
        assert!(hand.seconds <= rounds.seconds * 0.9);
        assert!(hand.minor * 3 <= rounds.minor * 2);
        assert!(hand.evicted * 10 <= rounds.evicted * 11);
        assert!(hand.looks() <= LOOKS);
    }
}

/// Nobody says what the frames are.
#[test]
fn an_unknown_guest_is_looked_at_no_more_than_before() {
    let (rounds, hand) = compare(Case { name: "unknown", is_known: false, ..STREAM });
    assert!(hand.minor * 2 <= rounds.minor);
    assert!(hand.evicted * 10 <= rounds.evicted * 11);
    assert!(hand.looks() <= LOOKS);
}

/// When the hot memory moves on within seconds, older knowledge costs some more evictions.
#[test]
fn a_working_set_that_moves_is_followed() {
    let moving = Case {
        name: "moving",
        hot: 200,
        hot_percent: 97,
        warm: 20,
        moves_after: Some(1_000_000),
        accesses: 6_000_000,
        ..SCARCE
    };
    let (rounds, hand) = compare(moving);
    assert!(hand.evicted <= rounds.evicted * 3);
    assert!(hand.minor * 10 <= rounds.minor * 13);
    assert!(hand.looks() <= LOOKS);
}

#[test]
fn a_file_that_does_not_fit_is_read_no_more_often() {
    let file = Case {
        name: "file",
        limit: 128,
        hot: 20,
        hot_percent: 60,
        read: 200,
        read_percent: 35,
        warm: 20,
        ..STREAM
    };
    let (rounds, hand) = compare(file);
    assert!(hand.minor * 4 <= rounds.minor);
    assert!(hand.evicted <= rounds.evicted);
    assert!(hand.looks() <= LOOKS);
}

/// Memory that is used once differs from the rest only by two turns at rest.
#[test]
fn anonymous_memory_that_is_used_once_goes() {
    let slow = Case {
        name: "once",
        memory: 1024,
        hot_percent: 97,
        read: 400,
        read_percent: 1,
        read_kind: Anonymous,
        accesses: 8_000_000,
        ..STREAM
    };
    // Even if the guest has all of it on its active list.
    for case in [slow, Case { name: "active", is_active: true, ..slow }] {
        let (rounds, hand) = compare(case);
        assert!(hand.minor * 10 <= rounds.minor * 11);
        assert!(hand.major <= rounds.major);
        assert!(hand.evicted * 10 <= rounds.evicted * 11);
        assert!(hand.looks() * 10.0 <= rounds.looks());
    }
}
