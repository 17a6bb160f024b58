//! Confidence of a figure: intervals of nominally 95 % by the bootstrap.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

/// Least and greatest value.
pub type Interval = [f64; 2];

const RESAMPLES: usize = 10_000;
/// Fewest rounds with an interval. With three rounds, even the range of all found values contains
/// the truth in only three of four cases.
const LEAST: usize = 5;
/// Seed of the bootstrap. It is fixed, so that the same figures always give the same interval.
const SEED: u64 = 0x00eb_b0eb_b0eb_b0eb;
/// Number of random orders, of which the most balanced one is taken.
const ORDERS: usize = 64;
/// Student's t at 97.5 %, from four degrees of freedom on.
const STUDENT: [f64; 27] = [
    2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
    2.042,
];

/// A random number generator, `SplitMix64`: the same seed gives the same numbers.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number less than `count`. `count` is so small compared with 2^64 that the bias is
    /// invisible.
    pub fn below(&mut self, count: usize) -> usize {
        (self.next() % count.max(1) as u64) as usize
    }

    /// Shuffles the items.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// Returns the random numbers for the order of a block's sides. Each block has its own.
pub fn order(seed: u64, block: &str) -> Random {
    let mut hasher = DefaultHasher::new();
    (seed, block).hash(&mut hasher);
    Random::new(hasher.finish())
}

/// Returns the order of a case's sides in its block number `number`, counted from one. Of some
/// random orders it is the one in which the fewest sides have a place that they had in an earlier
/// block.
pub fn balanced(random: Random, sides: usize, number: usize) -> Vec<usize> {
    let mut random = random;
    // How often each place had each side.
    let mut had = vec![vec![0; sides]; sides];
    let mut best: Vec<usize> = Vec::new();
    for _ in 0..number {
        let drawn = (0..ORDERS).map(|_| {
            let mut order: Vec<usize> = (0..sides).collect();
            random.shuffle(&mut order);
            order
        });
        let again = |order: &Vec<usize>| -> usize {
            order.iter().zip(&had).map(|(&side, place)| place[side]).sum()
        };
        best = drawn.min_by_key(again).unwrap_or_default();
        best.iter().zip(&mut had).for_each(|(&side, place)| place[side] += 1);
    }
    best
}

/// Returns the interval of a statistic of several sets of rounds, whose sizes are `counts`.
/// `statistic` gets the numbers of the rounds drawn from each set. Figures that belong together are
/// one set, so that pairs stay pairs.
///
/// Percentiles of the bootstrap are too narrow for few rounds, so they are taken further out, as
/// Student's t is wider than the normal distribution. Returns `None` if there are too few rounds,
/// or if an end is not a number or not finite, such as a ratio to zero.
pub fn interval(counts: &[usize], statistic: impl Fn(&[Vec<usize>]) -> f64) -> Option<Interval> {
    let fewest = counts.iter().copied().min().filter(|&count| count >= LEAST)?;
    let mut random = Random::new(SEED);
    let mut drawn: Vec<Vec<usize>> = counts.iter().map(|&count| vec![0; count]).collect();
    let mut found = Vec::with_capacity(RESAMPLES);
    for _ in 0..RESAMPLES {
        for set in &mut drawn {
            let count = set.len();
            set.iter_mut().for_each(|place| *place = random.below(count));
        }
        found.push(statistic(&drawn));
    }
    if found.iter().any(|figure| figure.is_nan()) {
        return None;
    }
    found.sort_unstable_by(f64::total_cmp);
    let at = (tail(fewest) * RESAMPLES as f64) as usize;
    Some([found[at], found[RESAMPLES - 1 - at]])
        .filter(|ends| ends.iter().all(|end| end.is_finite()))
}

/// Returns the part of the bootstrap distribution beyond either end.
fn tail(count: usize) -> f64 {
    let count = count as f64;
    let student = STUDENT.get(count as usize - LEAST).copied();
    let student = student.unwrap_or(1.96 + 2.4 / (count - 1.0));
    upper_normal(student * (count / (count - 1.0)).sqrt())
}

/// Returns the part of the normal distribution beyond `z` (Abramowitz and Stegun, 7.1.26).
fn upper_normal(z: f64) -> f64 {
    let x = z / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * x);
    let factors = [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    let sum = factors.iter().fold(0.0, |sum, factor| (sum + factor) * t);
    sum * (-x * x).exp() / 2.0
}

/// Returns the median, or NaN of no figures.
pub fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match (sorted.len() % 2, sorted.get(middle)) {
        (_, None) => f64::NAN,
        (1, Some(&figure)) => figure,
        (_, Some(&figure)) => (sorted[middle - 1] + figure) / 2.0,
    }
}

/// Returns the geometric mean, or NaN if there is no figure, or one is not positive.
pub fn geometric_mean(figures: &[f64]) -> f64 {
    (figures.iter().map(|figure| figure.ln()).sum::<f64>() / figures.len() as f64).exp()
}

/// Returns the figures at these places, in that order.
pub fn pick(figures: &[f64], places: &[usize]) -> Vec<f64> {
    places.iter().filter_map(|&place| figures.get(place).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_are_those_of_the_normal_law() {
        assert!((upper_normal(1.96) - 0.025).abs() < 1e-4);
        assert!((upper_normal(3.0) - 0.00135).abs() < 1e-5);
        assert!(tail(5) < 0.0015 && tail(1000) > 0.024);
    }

    #[test]
    fn few_rounds_tell_nothing_and_equal_ones_all() {
        let of =
            |figures: &[f64]| interval(&[figures.len()], |drawn| median(&pick(figures, &drawn[0])));
        assert_eq!(of(&[1.0, 2.0, 3.0, 4.0]), None);
        assert_eq!(of(&[2.0; 5]), Some([2.0, 2.0]));
        let [low, high] = of(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        assert!(low < 2.0 && high > 4.0, "{low} {high}");
    }

    /// Draws five figures from a distribution with a known mean. Nine of ten intervals contain the
    /// mean; unwidened percentiles of the bootstrap would in eight of ten.
    #[test]
    fn an_interval_of_few_has_the_truth_in_it() {
        let mut random = Random::new(7);
        let mut uniform = || random.next() as f64 / u64::MAX as f64;
        let mean = |figures: &[f64]| figures.iter().sum::<f64>() / figures.len() as f64;
        let mut hits = 0;
        for _ in 0..200 {
            let sample: Vec<f64> = (0..5).map(|_| (0..6).map(|_| uniform()).sum()).collect();
            let found = interval(&[5], |drawn| mean(&pick(&sample, &drawn[0])));
            hits += i32::from(found.is_some_and(|[low, high]| low <= 3.0 && 3.0 <= high));
        }
        assert!(hits >= 174, "{hits} of 200");
    }

    /// Both sides go up and down together: their ratio is certain, and only pairs show that.
    #[test]
    fn pairs_stay_pairs() {
        let other = [1.0, 2.0, 4.0, 8.0, 16.0];
        let ebb = other.map(|figure| figure * 0.5);
        let ratio = |a: &[usize], b: &[usize]| {
            geometric_mean(&pick(&ebb, a)) / geometric_mean(&pick(&other, b))
        };
        let [low, high] = interval(&[5], |drawn| ratio(&drawn[0], &drawn[0])).unwrap();
        assert!((low - 0.5).abs() < 1e-9 && (high - 0.5).abs() < 1e-9);
        let [low, high] = interval(&[5, 5], |drawn| ratio(&drawn[0], &drawn[1])).unwrap();
        assert!(low < 0.3 && high > 0.8);
    }

    #[test]
    fn sides_have_other_places_in_other_blocks() {
        for sides in 2..8 {
            let blocks: Vec<Vec<usize>> =
                (1..=5).map(|number| balanced(Random::new(3), sides, number)).collect();
            for side in 0..sides {
                let first = blocks.iter().filter(|order| order[0] == side).count();
                assert!(first <= 5_usize.div_ceil(sides) + 1, "{blocks:?}");
            }
            let mut sorted = blocks[4].clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..sides).collect::<Vec<_>>());
        }
        assert_ne!(balanced(Random::new(3), 7, 1), balanced(Random::new(4), 7, 1));
    }

    #[test]
    fn an_order_at_random_has_all_and_is_the_same_again() {
        let order = |seed| {
            let mut items: Vec<u32> = (0..10).collect();
            Random::new(seed).shuffle(&mut items);
            items
        };
        let mut sorted = order(1);
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
        sorted.sort_unstable();
        assert_eq!(sorted, (0..10).collect::<Vec<u32>>());
    }
}
