//! Chance from a seed: the same choices again for the same seed.

use std::time::Duration;

/// A stream of random numbers: splitmix64.
pub struct Chance(u64);

impl Chance {
    /// Returns the stream of this number. Streams of one seed have nothing in common.
    pub fn new(seed: u64, stream: u64) -> Chance {
        let mut chance = Chance(seed ^ stream.wrapping_mul(0xa076_1d64_78bd_642f));
        chance.next();
        chance
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Returns a number from `least` to `most`.
    pub fn within(&mut self, least: u64, most: u64) -> u64 {
        least + self.next() % (most.saturating_sub(least) + 1)
    }

    /// Whether something is to happen that happens once in `count` times.
    pub fn once_in(&mut self, count: u64) -> bool {
        self.next().is_multiple_of(count.max(1))
    }

    /// Returns one of these, each of which has a weight.
    ///
    /// # Panics
    /// No weight is above 0.
    pub fn weighted<T: Copy>(&mut self, choices: &[(u64, T)]) -> T {
        let sum = choices.iter().map(|choice| choice.0).sum::<u64>();
        let mut left = self.within(1, sum);
        let chosen = choices.iter().find(|(weight, _)| match left > *weight {
            true => {
                left -= weight;
                false
            }
            false => true,
        });
        chosen.expect("a choice with a weight").1
    }

    /// Returns one of these.
    ///
    /// # Panics
    /// There is none.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.within(0, choices.len() as u64 - 1) as usize]
    }

    /// Returns a time between these, in milliseconds.
    pub fn pause(&mut self, least_ms: u64, most_ms: u64) -> Duration {
        Duration::from_millis(self.within(least_ms, most_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_choices_again_and_a_stream_others() {
        let draw = |seed, stream| {
            let mut chance = Chance::new(seed, stream);
            (0..20).map(|_| chance.within(3, 1000)).collect::<Vec<u64>>()
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
        assert!(draw(7, 0).iter().all(|number| (3..=1000).contains(number)));
    }

    #[test]
    fn weights_count_and_what_has_none_is_never_chosen() {
        let mut chance = Chance::new(5, 0);
        let mut counts = [0; 3];
        for _ in 0..4000 {
            counts[chance.weighted(&[(1, 0), (0, 1), (3, 2)])] += 1;
        }
        assert!((800..1200).contains(&counts[0]) && counts[1] == 0, "{counts:?}");
    }
}
