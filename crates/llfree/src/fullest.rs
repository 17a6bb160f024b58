//! The fullest of some trees, or of a tree's areas.

use crate::layout::TREE_AREAS;

/// Most candidates that are kept. All areas of a tree fit.
const KEPT: usize = TREE_AREAS;

/// Returns the indices of those candidates that have the fewest free frames, 8 at most, the fullest
/// first. A candidate is a number of free frames and an index. Among equals, the order is theirs.
pub(crate) fn fullest_first(
    candidates: impl Iterator<Item = (u32, usize)>,
) -> impl Iterator<Item = usize> {
    let mut kept = [(0, 0); KEPT];
    let mut count = 0;
    for (free, index) in candidates {
        let place = kept[..count].partition_point(|&(other, _)| other <= free);
        if place < KEPT {
            // The last one of too many gives its place to the new one.
            count = KEPT.min(count + 1);
            kept[place..count].rotate_right(1);
            kept[place] = (free, index);
        }
    }
    kept.into_iter().take(count).map(|(_, index)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_come_first_and_equals_as_they_came() {
        let candidates = [(300, 7), (16, 3), (512, 1), (16, 9), (300, 2)];
        assert!(fullest_first(candidates.into_iter()).eq([3, 9, 7, 2, 1_usize]));
        assert_eq!(fullest_first(core::iter::empty()).next(), None);
    }

    #[test]
    fn the_emptiest_of_too_many_are_left_out() {
        let falling = (0..100_usize).map(|index| (1000 - index as u32, index));
        assert!(fullest_first(falling).eq((92..100_usize).rev()));
        let rising = (0..100_usize).map(|index| (index as u32, index));
        assert!(fullest_first(rising).eq(0..8_usize));
    }
}
