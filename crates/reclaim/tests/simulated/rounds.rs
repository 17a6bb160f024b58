//! The reference: how a limit chose before it had a hand. All frames are looked at for each choice,
//! and all are forgotten in rounds of one to eight seconds.

use std::time::{Duration, Instant};

use ebb_inspect::PageKind;
use ebb_units::Gfn;

use crate::guest::{Chooser, Guest};

const ROUND_LEAST: Duration = Duration::from_secs(1);
const ROUND_MOST: Duration = Duration::from_secs(8);
const CHOICE: Duration = Duration::from_millis(500);
const CHOICE_FRAMES: usize = 16 << 10;
const RANKS: usize = 10;
const AT_WORK: usize = 6;

pub struct Rounds {
    ages: Vec<u8>,
    mapped: Vec<bool>,
    round: Option<Instant>,
    chosen: Vec<Gfn>,
    chosen_at: Option<Instant>,
    at_work: usize,
    at_work_goes: bool,
    hand: usize,
}

impl Rounds {
    pub fn new(frames: usize) -> Rounds {
        Rounds {
            ages: vec![1; frames],
            mapped: vec![false; frames],
            round: None,
            chosen: Vec::new(),
            chosen_at: None,
            at_work: 0,
            at_work_goes: false,
            hand: 0,
        }
    }

    fn choose(&mut self, guest: &mut Guest, now: Instant) {
        let count = self.ages.len();
        self.mapped.copy_from_slice(&guest.mapped);
        let least = if self.at_work_goes { ROUND_LEAST } else { ROUND_MOST };
        if self.round.is_none_or(|round| now.duration_since(round) >= least) {
            for (age, mapped) in self.ages.iter_mut().zip(&self.mapped) {
                *age = if *mapped { 0 } else { age.saturating_add(1) };
            }
            guest.mapped.fill(false);
            guest.figures.forgot += 1;
            (self.round, self.at_work_goes) = (Some(now), false);
        }
        guest.figures.looked += count as u64;
        guest.figures.entries += count as u64;
        let mut ranks: [Vec<Gfn>; RANKS] = [const { Vec::new() }; RANKS];
        for at in (self.hand..count).chain(0..self.hand) {
            let Some(rank) = self.rank(guest.pages[at].kind, at) else { continue };
            if guest.there[at] && ranks[rank].len() < CHOICE_FRAMES {
                ranks[rank].push(Gfn(at as u64));
            }
        }
        let at_rest = ranks.iter().take(AT_WORK).map(Vec::len).sum::<usize>().min(CHOICE_FRAMES);
        self.chosen = ranks.into_iter().flatten().take(CHOICE_FRAMES).collect();
        self.hand = self.chosen.last().map_or(self.hand, |gfn| gfn.0 as usize + 1);
        self.at_work = self.chosen.len() - at_rest;
        self.chosen.reverse();
        self.chosen_at = Some(now);
    }

    fn rank(&self, kind: Option<PageKind>, at: usize) -> Option<usize> {
        let (mapped, age) = (self.mapped[at], self.ages[at]);
        let (old, [at_rest, this_round, last_round, both_rounds, at_rest_for_long]) = match kind {
            Some(PageKind::Free { .. }) => (0, [0; 5]),
            Some(PageKind::File) => (2, [2, 4, 2, 7, 1]),
            Some(PageKind::Anonymous) | None => (3, [5, 7, 6, 8, 3]),
            Some(PageKind::Table) => return None,
            Some(_) => (3, [7, 8, 8, 9, if age < 8 { 6 } else { 3 }]),
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

impl Chooser for Rounds {
    fn take(&mut self, guest: &mut Guest, want: usize, now: Instant) -> Vec<Gfn> {
        if self.chosen.is_empty() || self.chosen_at.is_none_or(|at| now.duration_since(at) > CHOICE)
        {
            self.choose(guest, now);
        }
        let step = self.chosen.len().min(want);
        let frames = self.chosen.split_off(self.chosen.len() - step);
        self.at_work_goes |= self.chosen.len() < self.at_work;
        frames
    }
}
