//! Random accesses of uneven frequency, against lists that see each of them.

use std::time::{Duration, Instant};

use ebb_inspect::PageKind::{Anonymous, File, Slab};
use ebb_reclaim::hand::Hand;
use ebb_units::Gfn;

use crate::guest::{Figures, Guest, Program, Random};
use crate::layout::{Layout, MIB};
use crate::lists::Lists;

const ACCESSES: u64 = 3_000_000;
/// Percent of the accesses that go to the memory that is hot at the time.
const HOT_PERCENT: usize = 90;

/// How often a frame is used.
#[derive(Clone, Copy, Debug)]
enum Law {
    /// Less often with each rank, by Zipf's law.
    Zipf,
    /// A fifth of the frames is hot, and another fifth after this many seconds.
    Phases(u64),
}

struct Work {
    law: Law,
    /// In the order of their ranks.
    frames: Vec<usize>,
    /// Sums of 1 / rank, up to each rank.
    sums: Vec<f64>,
    began: Instant,
}

impl Work {
    fn new(law: Law, frames: &[usize], began: Instant) -> Work {
        let (mut frames, mut random) = (frames.to_vec(), Random(77));
        for at in (1..frames.len()).rev() {
            frames.swap(at, random.below(at + 1));
        }
        let mut sum = 0.0;
        let add = |rank: usize| {
            sum += 1.0 / rank as f64;
            sum
        };
        let sums = (1..=frames.len()).map(add).collect();
        Work { law, frames, sums, began }
    }
}

impl Program for Work {
    fn next(&mut self, random: &mut Random, now: Instant) -> usize {
        let (count, hot) = (self.frames.len(), self.frames.len() / 5);
        let rank = match self.law {
            Law::Zipf => {
                let fraction = random.below(1 << 40) as f64 / (1u64 << 40) as f64;
                let sum = fraction * self.sums[count - 1];
                self.sums.partition_point(|&to| to < sum).min(count - 1)
            }
            Law::Phases(seconds) if random.below(100) < HOT_PERCENT => {
                let phase = (now.duration_since(self.began).as_secs() / seconds) as usize;
                (phase * hot + random.below(hot)) % count
            }
            Law::Phases(_) => random.below(count),
        };
        self.frames[rank]
    }
}

/// What a guest does with lists, and with a hand. It has 200 MiB, of which 100 were used once.
fn compare(law: Law) -> (Figures, Figures) {
    let mut layout = Layout::new(512 * MIB, 100);
    let frames = layout.take(320 * MIB, Anonymous);
    let once = [layout.take(60 * MIB, Slab), layout.take(40 * MIB, File)].concat();
    let guest = || {
        let mut guest = Guest::new(layout.pages.clone(), 200 * MIB);
        (guest.think, guest.cluster) = (Duration::from_micros(3), 1);
        for &at in &once {
            (guest.there[at], guest.mapped[at]) = (true, true);
        }
        guest.resident = once.len();
        guest
    };
    let work = |guest: &Guest| Work::new(law, &frames, guest.now);
    let count = layout.pages.len();
    let (with_lists, with_hand) = (guest(), guest());
    let (for_lists, for_hand) = (work(&with_lists), work(&with_hand));
    let lists = with_lists.run(for_lists, Lists::new(count), ACCESSES);
    let hand = with_hand.run(for_hand, Hand::new(Gfn(count as u64)), ACCESSES);
    eprintln!("{law:?} lists: {lists}\n{law:?} hand:  {hand}");
    (lists, hand)
}

#[test]
fn frames_that_are_used_more_often_stay() {
    for law in [Law::Zipf, Law::Phases(3)] {
        let (lists, hand) = compare(law);
        assert!(hand.major * 100 <= lists.major * 105, "{} and {}", hand.major, lists.major);
        assert!(hand.seconds <= lists.seconds * 1.05);
    }
}
