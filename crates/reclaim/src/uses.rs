//! In which turns of its window a frame was used.

use std::fmt;

/// One bit for each turn: the highest for the current turn, the next for the one before it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Uses(u8);

const NOW: u8 = 1 << 7;
const BEFORE: u8 = 1 << 6;
/// Weight of a use, from the oldest turn to the current one. A use in the current turn counts as
/// much as uses in all four turns before it.
const WEIGHTS: [u32; 8] = [1, 2, 3, 4, 6, 8, 12, 30];
/// Least likelihood: a frame that was not used in any of these turns may still be used.
const LEAST: u32 = 2;
/// Greatest likelihood.
const MOST: u32 = 64;

impl Uses {
    /// Used in the current turn.
    pub const NOW: Uses = Uses(NOW);
    /// Used in the turn before the current one.
    pub const BEFORE: Uses = Uses(BEFORE);
    /// Used in the current turn and in the one before it.
    pub const OFTEN: Uses = Uses(NOW | BEFORE);

    /// Used once, `turns` turns before [`Uses::BEFORE`].
    pub const fn unused_for(turns: u32) -> Uses {
        match BEFORE.checked_shr(turns) {
            Some(bit) => Uses(bit),
            None => Uses(0),
        }
    }

    /// Notes a use in the current turn.
    pub fn see(&mut self) {
        self.0 |= NOW;
    }

    /// Ends the current turn. A use eight turns ago is forgotten.
    pub fn end_turn(&mut self) {
        self.0 >>= 1;
    }

    /// Notes that the frame is evicted, so that the current turn says nothing. What comes back soon
    /// was in use, except page cache, which is mostly used once.
    pub fn go(&mut self, is_cache: bool) {
        self.0 &= !NOW;
        if is_cache {
            self.forget_before();
        }
    }

    /// Forgets a use in the turn before the current one.
    pub fn forget_before(&mut self) {
        self.0 &= !BEFORE;
    }

    /// Leaves out the current turn, which took no time yet, unless a use was seen in it.
    pub fn without_now(self) -> Uses {
        match self.is_now() {
            true => self,
            false => Uses(self.0 << 1),
        }
    }

    /// Whether it was used in the current turn.
    pub fn is_now(self) -> bool {
        self.0 & NOW != 0
    }

    /// Whether it was used in the current turn, or in the one before it.
    pub fn is_active(self) -> bool {
        self.0 & (NOW | BEFORE) != 0
    }

    /// Whether it was used in both the current turn and the one before it.
    pub fn is_often(self) -> bool {
        self.0 & (NOW | BEFORE) == NOW | BEFORE
    }

    /// Turns between the last use before the current turn and the current turn: 7 if no use is
    /// known.
    pub fn turns_at_rest(self) -> u32 {
        (self.0 & !NOW).leading_zeros() - 1
    }

    /// How likely it is to be used before long, in 64ths, if each use counts `times` times.
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
        assert_eq!(in_turns(&[true, false, false, false]), Uses::unused_for(2));
        for turns in 0..10 {
            assert_eq!(Uses::unused_for(turns).turns_at_rest(), turns.min(7));
        }
        assert_eq!(in_turns(&[true; 20]), Uses(0xff));
        assert_eq!(in_turns(&[[true; 8], [false; 8]].concat()), Uses(0));
    }

    #[test]
    fn more_or_later_uses_make_the_next_use_likelier() {
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
