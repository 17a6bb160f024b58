//! Which frames in use have rested longest.
//!
//! A frame counts as touched while the VMM has it mapped: every so often all is
//! taken out of the VMM's page table, and what is mapped again at the next look
//! was used in between. That needs nothing of the guest and sees devices too.

use ebb_inspect::PageKind;
use ebb_units::{FrameRange, Gfn};

/// Ranks of candidates, best first.
const RANKS: usize = 10;
/// From this rank on, what goes is likely to be at work.
const AT_WORK: usize = 6;
/// How hot a frame can be, besides: from 0, not used, up.
pub const HEATS: usize = 4;
/// Rounds at rest from which on a frame counts as old: page cache, which is not written
/// anywhere when it goes,
const OLD_CACHE: u8 = 2;
/// and everything else.
const OLD: u8 = 3;
/// From which on the kernel's own memory is taken for something that it never uses again.
const FORGOTTEN: u8 = 8;

/// How long each frame of a VM has rested.
pub struct Aging {
    /// Rounds at rest; frames from 0 up.
    ages: Vec<u8>,
    /// Mapped since the last round began.
    mapped: Vec<bool>,
    /// What the guest uses it for; `None`: not known.
    kinds: Vec<Option<PageKind>>,
    /// Where the next choice begins, so that equals take turns.
    hand: u64,
}

/// What is to go, those that cost least first.
pub struct Choice {
    /// The frames.
    pub frames: Vec<Gfn>,
    /// So many of them, the first, have rested; the others are likely to be missed.
    pub at_rest: usize,
}

impl Aging {
    /// For frames below `end`; nothing is known yet.
    pub fn new(end: Gfn) -> Aging {
        let count = usize::try_from(end.0).unwrap_or(0);
        Aging {
            ages: vec![1; count],
            mapped: vec![false; count],
            kinds: vec![None; count],
            hand: 0,
        }
    }

    /// Forgets what was seen mapped, before a new look.
    pub fn look_anew(&mut self) {
        self.mapped.fill(false);
    }

    /// The VMM has these frames mapped.
    pub fn saw_mapped(&mut self, frames: FrameRange) {
        part(&mut self.mapped, frames).fill(true);
    }

    /// A round ends: all is taken out of the VMM's page table after this.
    pub fn next_round(&mut self) {
        for (age, mapped) in self.ages.iter_mut().zip(&self.mapped) {
            *age = if *mapped { 0 } else { age.saturating_add(1) };
        }
    }

    /// Frames that were used in the round before this one, or in this one up to the last
    /// look: what is at work, also where some of it was evicted since.
    pub fn active_frames(&self) -> u64 {
        let each = self.ages.iter().zip(&self.mapped);
        each.filter(|(age, mapped)| **age == 0 || **mapped).count() as u64
    }

    /// Forgets what the frames are used for.
    pub fn forget_kinds(&mut self) {
        self.kinds.fill(None);
    }

    /// What the guest uses the frames for.
    pub fn saw_kind(&mut self, frames: FrameRange, kind: PageKind) {
        part(&mut self.kinds, frames).fill(Some(kind));
    }

    /// Frames that the guest's kernel has for itself, by what it was seen to use them for.
    pub fn kernel_frames(&self) -> u64 {
        use PageKind::{Hugetlb, Other, Slab, Table};
        let is_kernel =
            |kind: &&Option<PageKind>| matches!(kind, Some(Table | Slab | Hugetlb | Other));
        self.kinds.iter().filter(is_kernel).count() as u64
    }

    /// About `want` frames to evict, those that cost least first, in units of so
    /// many frames that go whole, of frames that `may_go` (asked for candidates
    /// only). Among those that cost the same the coldest go first, by their `heat`, below
    /// [`HEATS`].
    pub fn choose(
        &mut self,
        want: usize,
        unit: u64,
        may_go: impl Fn(Gfn) -> bool,
        heat: impl Fn(Gfn) -> usize,
    ) -> Choice {
        let mut ranks: [Vec<Gfn>; RANKS * HEATS] = [const { Vec::new() }; RANKS * HEATS];
        let rank = |gfn| Some(self.rank(gfn)? * HEATS + heat(gfn).min(HEATS - 1));
        let count = self.ages.len() as u64 / unit;
        let hand = (self.hand / unit).min(count);
        for first in (hand..count).chain(0..hand).map(|index| Gfn(index * unit)) {
            let frames = FrameRange::new(first, unit);
            // A unit is as dear as its dearest frame.
            let dearest = frames.frames().try_fold(0, |most, gfn| Some(most.max(rank(gfn)?)));
            let Some(rank) = dearest.and_then(|rank| ranks.get_mut(rank)) else { continue };
            if rank.len() < want && frames.frames().all(&may_go) {
                rank.extend(frames.frames());
            }
        }
        let wanted = want.next_multiple_of(unit as usize);
        let at_rest = ranks.iter().take(AT_WORK * HEATS).map(Vec::len).sum::<usize>().min(wanted);
        let frames: Vec<Gfn> = ranks.into_iter().flatten().take(wanted).collect();
        self.hand = frames.last().map_or(self.hand, |gfn| gfn.0 + 1);
        Choice { frames, at_rest }
    }

    /// Free frames first, then the page cache, which mostly equals a disk, then the
    /// rest; among them what has rested. Page cache that is used round after round stays
    /// as long as anonymous memory does. Page tables never.
    fn rank(&self, gfn: Gfn) -> Option<usize> {
        let index = usize::try_from(gfn.0).ok()?;
        let (mapped, age) = (*self.mapped.get(index)?, *self.ages.get(index)?);
        let (old, [at_rest, this_round, last_round, both_rounds, at_rest_for_long]) =
            match self.kinds.get(index)? {
                Some(PageKind::Free { .. }) => (0, [0; 5]),
                Some(PageKind::File) => (OLD_CACHE, [2, 4, 2, 7, 1]),
                Some(PageKind::Anonymous) | None => (OLD, [5, 7, 6, 8, 3]),
                Some(PageKind::Table) => return None,
                Some(_) => (OLD, [7, 8, 8, 9, if age < FORGOTTEN { 6 } else { 3 }]),
            };
        Some(match (mapped, age) {
            (true, 0) => both_rounds,
            (true, _) => this_round,
            (false, 0) => last_round,
            (false, age) if age < old => at_rest,
            _ => at_rest_for_long,
        })
    }
}

fn part<T>(all: &mut [T], frames: FrameRange) -> &mut [T] {
    let (start, end) = (frames.start.0 as usize, frames.end().0 as usize);
    let end = end.min(all.len());
    all.get_mut(start.min(end)..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cold(_: Gfn) -> usize {
        0
    }

    fn frame(gfn: u64) -> FrameRange {
        FrameRange::new(Gfn(gfn), 1)
    }

    #[test]
    fn what_costs_least_goes_first() {
        let mut aging = Aging::new(Gfn(6));
        for (gfn, kind) in [
            (0, PageKind::Anonymous),
            (1, PageKind::File),
            (2, PageKind::Free { order: 0 }),
            (3, PageKind::Table),
            (4, PageKind::Slab),
            (5, PageKind::File),
        ] {
            aging.saw_kind(frame(gfn), kind);
        }
        assert_eq!(aging.kernel_frames(), 2);
        aging.saw_mapped(frame(5));
        let mut order = Vec::new();
        while let [gfn] = aging.choose(1, 1, |gfn| !order.contains(&gfn), cold).frames[..] {
            order.push(gfn);
        }
        assert_eq!(order, [2, 1, 5, 0, 4].map(Gfn));
    }

    #[test]
    fn a_touch_makes_young() {
        let mut aging = Aging::new(Gfn(3));
        for round in 0..6 {
            aging.look_anew();
            aging.saw_mapped(frame(0));
            if round == 5 {
                aging.saw_mapped(frame(1));
            }
            aging.next_round();
        }
        aging.look_anew();
        assert_eq!(aging.choose(1, 1, |_| true, cold).frames, [Gfn(2)]);
        assert_eq!(aging.ages, [0, 0, 7]);
        assert_eq!(aging.active_frames(), 2);
    }

    #[test]
    fn what_is_used_round_after_round_is_at_work() {
        let mut aging = Aging::new(Gfn(4));
        let kinds = [PageKind::Anonymous, PageKind::File, PageKind::File, PageKind::Anonymous];
        (0..4).zip(kinds).for_each(|(gfn, kind)| aging.saw_kind(frame(gfn), kind));
        for _ in 0..2 {
            aging.look_anew();
            aging.saw_mapped(frame(0));
            aging.saw_mapped(frame(1));
            aging.next_round();
        }
        // Of the page cache, 2 was read for the first time just now.
        aging.saw_mapped(frame(2));
        let choice = aging.choose(4, 1, |_| true, cold);
        assert_eq!((choice.frames, choice.at_rest), ([3, 2, 1, 0].map(Gfn).into(), 2));
    }

    #[test]
    fn what_the_kernel_forgot_goes_with_what_processes_did() {
        let mut aging = Aging::new(Gfn(3));
        let kinds = [PageKind::Anonymous, PageKind::Other, PageKind::Anonymous];
        (0..).zip(kinds).for_each(|(gfn, kind)| aging.saw_kind(frame(gfn), kind));
        let next = |aging: &mut Aging| {
            aging.look_anew();
            aging.saw_mapped(frame(2));
            aging.next_round();
        };
        (0..4).for_each(|_| next(&mut aging));
        assert_eq!(aging.choose(3, 1, |_| true, cold).frames, [0, 1, 2].map(Gfn));
        (0..4).for_each(|_| next(&mut aging));
        // The one whose turn it is.
        assert_eq!(aging.choose(3, 1, |_| true, cold).frames, [0, 1, 2].map(Gfn));
        assert_eq!(aging.rank(Gfn(0)), aging.rank(Gfn(1)));
    }

    #[test]
    fn among_equals_the_coldest_goes_first() {
        let mut aging = Aging::new(Gfn(5));
        aging.saw_kind(frame(0), PageKind::File);
        let heat = |gfn: Gfn| [3, 2, 0, 9, 1][gfn.0 as usize];
        // Page cache goes before, however hot; a heat beyond the last is the last.
        assert_eq!(aging.choose(5, 1, |_| true, heat).frames, [0, 2, 4, 1, 3].map(Gfn));
        // A unit is as hot as its hottest frame.
        assert_eq!(aging.choose(2, 2, |_| true, heat).frames, [0, 1].map(Gfn));
        aging.saw_mapped(frame(2));
        // What was used just now comes after all that rests.
        assert_eq!(aging.choose(5, 1, |_| true, heat).frames.last(), Some(&Gfn(2)));
    }

    #[test]
    fn equals_take_turns() {
        let mut aging = Aging::new(Gfn(4));
        let turns: Vec<_> =
            (0..4).flat_map(|_| aging.choose(2, 1, |_| true, cold).frames).collect();
        assert_eq!(turns, [0, 1, 2, 3, 0, 1, 2, 3].map(Gfn));
    }

    #[test]
    fn frames_beyond_the_end_are_ignored() {
        let mut aging = Aging::new(Gfn(2));
        aging.saw_mapped(FrameRange::new(Gfn(1), 9));
        aging.saw_kind(FrameRange::new(Gfn(5), 9), PageKind::Slab);
        assert_eq!(aging.choose(9, 1, |_| true, cold).frames, [0, 1].map(Gfn));
    }

    #[test]
    fn units_go_whole_or_not_at_all() {
        let mut aging = Aging::new(Gfn(9));
        aging.saw_kind(frame(1), PageKind::Table);
        let chosen = aging.choose(1, 4, |gfn| gfn.0 != 9, cold);
        assert_eq!(chosen.frames, [4, 5, 6, 7].map(Gfn));
        assert_eq!(aging.choose(9, 4, |gfn| gfn != Gfn(6), cold).frames, []);
    }
}
