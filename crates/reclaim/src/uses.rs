//! In which turns of its window a frame was used.

use std::fmt;

/// A bit for each turn: the highest for the one that is on its way, the next for the one before it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Uses(u8);

const NOW: u8 = 1 << 7;
const BEFORE: u8 = 1 << 6;
/// How much a use counts, from the oldest turn to the one on its way. A use in that one counts as much as
/// uses in all of the four turns before it.
const WEIGHTS: [u32; 8] = [1, 2, 3, 4, 6, 8, 12, 30];
/// What was not used in any of these turns may be used yet,
const LEAST: u32 = 2;
/// and nothing is likelier than that.
const MOST: u32 = 64;

impl Uses {
    /// In the turn that is on its way.
    pub const NOW: Uses = Uses(NOW);
    /// In the one before it.
    pub const BEFORE: Uses = Uses(BEFORE);
    /// In both.
    pub const OFTEN: Uses = Uses(NOW | BEFORE);

    /// Once: so many turns before [`Uses::BEFORE`].
    pub const fn rests(turns: u32) -> Uses {
        match BEFORE.checked_shr(turns) {
            Some(bit) => Uses(bit),
            None => Uses(0),
        }
    }

    /// It is used now.
    pub fn see(&mut self) {
        self.0 |= NOW;
    }

    /// A turn ends. What was used eight turns ago is forgotten.
    pub fn end_turn(&mut self) {
        self.0 >>= 1;
    }

    /// Its content leaves memory, so the turn on its way tells nothing. What comes back soon was at
    /// work, but for page cache, which is mostly used once.
    pub fn go(&mut self, is_cache: bool) {
        self.0 &= !NOW;
        if is_cache {
            self.forget_before();
        }
    }

    /// It was not used in the turn before.
    pub fn forget_before(&mut self) {
        self.0 &= !BEFORE;
    }

    /// What it was before the turn on its way began, which took no time yet, with what is known of that.
    pub fn without_now(self) -> Uses {
        match self.is_now() {
            true => self,
            false => Uses(self.0 << 1),
        }
    }

    /// In the turn on its way.
    pub fn is_now(self) -> bool {
        self.0 & NOW != 0
    }

    /// In the turn on its way, or in the one before it.
    pub fn is_active(self) -> bool {
        self.0 & (NOW | BEFORE) != 0
    }

    /// In both.
    pub fn is_often(self) -> bool {
        self.0 & (NOW | BEFORE) == NOW | BEFORE
    }

    /// Turns between the last use before the one on its way, and that: 7 where no use is known.
    pub fn turns_at_rest(self) -> u32 {
        (self.0 & !NOW).leading_zeros() - 1
    }

    /// How likely it is used before long, in 64ths, where a use counts so many times.
    pub fn likelihood(self, times: u32) -> u32 {
        let used = WEIGHTS.iter().enumerate().filter(|(turn, _)| self.0 >> turn & 1 != 0);
        (times * used.map(|(_, weight)| weight).sum::<u32>()).clamp(LEAST, MOST)
    }
}

impl fmt::Debug for Uses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Uses({:#010b})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_turns(turns: &[bool]) -> Uses {
        let mut uses = Uses(0);
        for &is_used in turns {
            uses.end_turn();
            if is_used {
                uses.see();
            }
        }
        uses
    }

    #[test]
    fn a_turn_is_a_bit() {
        assert_eq!(in_turns(&[true]), Uses::NOW);
        assert_eq!(in_turns(&[true, false]), Uses::BEFORE);
        assert_eq!(in_turns(&[true, true]), Uses::OFTEN);
        assert_eq!(in_turns(&[true, false, false, false]), Uses::rests(2));
        for turns in 0..10 {
            assert_eq!(Uses::rests(turns).turns_at_rest(), turns.min(7));
        }
        assert_eq!(in_turns(&[true; 20]), Uses(0xff));
        assert_eq!(in_turns(&[[true; 8], [false; 8]].concat()), Uses(0));
    }

    #[test]
    fn what_was_used_more_often_or_later_is_likelier() {
        let likelihood = |turns: &[bool]| in_turns(turns).likelihood(1);
        let once = |ago: usize| likelihood(&[&[true][..], &vec![false; ago]].concat());
        assert!((0..7).all(|ago| once(ago) >= once(ago + 1)));
        let often = likelihood(&[true, false, true, true, false, false]);
        assert!(often > once(2) && often < once(0), "{often}");
        assert_eq!((likelihood(&[true; 8]), likelihood(&[false])), (MOST, LEAST));
        assert_eq!(Uses::BEFORE.likelihood(2), 2 * Uses::BEFORE.likelihood(1));
    }

    #[test]
    fn a_turn_that_took_no_time_is_none() {
        for uses in [[true, true, false, true], [false, true, true, true], [true; 4]] {
            let (uses, mut next) = (in_turns(&uses), in_turns(&uses));
            next.end_turn();
            assert_eq!(next.without_now(), uses);
            next.see();
            assert!(next.without_now().is_often());
        }
    }

    #[test]
    fn page_cache_that_went_was_used_once() {
        for (is_cache, is_often) in [(false, true), (true, false)] {
            let mut uses = Uses::OFTEN;
            uses.go(is_cache);
            uses.see();
            assert_eq!(uses.is_often(), is_often);
        }
    }
}
