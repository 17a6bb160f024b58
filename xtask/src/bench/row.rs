//! One comparison of a benchmark, and whether its goal is met.

use serde::Serialize;

use super::rounds::Rounds;
use super::stats::{self, Interval, geometric_mean, median, pick};

/// Begins the end of a row's name if Ebb failed in a round.
pub const FAILED: &str = "Ebb failed";

/// One row of a benchmark, as `docs/benchmarks.md` describes it.
#[derive(Serialize)]
pub struct Row {
    what: String,
    unit: &'static str,
    ebb: f64,
    other: Option<f64>,
    against: Option<String>,
    ratio: Option<f64>,
    goal: Option<String>,
    met: Option<bool>,
    ebb_ci: Option<Interval>,
    other_ci: Option<Interval>,
    ratio_ci: Option<Interval>,
    rounds: usize,
    undecided: bool,
    /// `ebb` and `other`, each with the least and the greatest of its rounds.
    #[serde(skip)]
    shown: [String; 2],
    #[serde(skip)]
    rounds_of: [Rounds; 2],
    #[serde(skip)]
    bounds: Option<Bounds>,
    /// Number of further rounds in which Ebb failed.
    #[serde(skip)]
    failed: usize,
}

/// Bounds of a goal, for the ratio or for Ebb's figure.
#[derive(Clone, Copy)]
enum Bounds {
    Ratio(Interval),
    Figure(Interval),
}

/// Which of several baselines is the best.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Better {
    Less,
    More,
}

impl Row {
    pub fn new(what: impl Into<String>, unit: &'static str, ebb: &Rounds) -> Row {
        Row {
            what: what.into(),
            unit,
            ebb: ebb.median(),
            other: None,
            against: None,
            ratio: None,
            goal: None,
            met: None,
            ebb_ci: median_interval(ebb),
            other_ci: None,
            ratio_ci: None,
            rounds: ebb.figures().len(),
            undecided: false,
            shown: [with_noise(ebb), String::new()],
            rounds_of: [ebb.clone(), Rounds::default()],
            bounds: None,
            failed: 0,
        }
    }

    /// Compares with another side. Rounds of both sides with the same number are pairs.
    pub fn against(self, against: impl Into<String>, other: &Rounds) -> Row {
        let row = self.beside(against.into(), other);
        let (a, b) = (row.rounds_of[0].figures(), other.figures());
        let ratio = row.ebb / other.median();
        let ratio_ci = paired(a, b, |a, b| median(a) / median(b));
        Row { ratio: finite(ratio), ratio_ci, ..row }
    }

    /// Does what [`Row::against`] does for rounds that each have their own VMs: the ratio is that
    /// of the geometric means.
    pub fn against_vms(self, against: impl Into<String>, other: &Rounds) -> Row {
        let row = self.beside(against.into(), other);
        let (a, b) = (row.rounds_of[0].figures(), other.figures());
        let of = |a: &[f64], b: &[f64]| geometric_mean(a) / geometric_mean(b);
        let (ratio, ratio_ci) = (of(a, b), paired(a, b, of));
        Row { ratio: finite(ratio), ratio_ci, ..row }
    }

    /// Compares with the best of several sides. The interval is of Ebb against the best side of the
    /// drawn rounds, so it accounts for the fact that the same figures chose the best side.
    pub fn against_best(self, others: &[(String, Rounds)], better: Better) -> Row {
        let of = |figures: &[f64]| geometric_mean(figures);
        let is_better = |one: f64, than: f64| match better {
            Better::Less => one < than,
            Better::More => one > than,
        };
        let best = others.iter().reduce(|best, other| {
            if is_better(of(other.1.figures()), of(best.1.figures())) { other } else { best }
        });
        let Some((name, best)) = best else { return self };
        let row = self.beside(format!("{name}, best of {}", others.len()), best);
        let ebb = row.rounds_of[0].figures();
        let count = ebb.len();
        let are_pairs = others.iter().all(|(_, other)| other.figures().len() == count);
        let ratio_ci = are_pairs.then(|| {
            stats::interval(&[count], |drawn| {
                let each = others.iter().map(|(_, other)| of(&pick(other.figures(), &drawn[0])));
                let best = each.reduce(|best, one| if is_better(one, best) { one } else { best });
                of(&pick(ebb, &drawn[0])) / best.unwrap_or(f64::NAN)
            })
        });
        Row { ratio: finite(of(ebb) / of(best.figures())), ratio_ci: ratio_ci.flatten(), ..row }
    }

    fn beside(self, against: String, other: &Rounds) -> Row {
        Row {
            other: Some(other.median()),
            against: Some(against),
            other_ci: median_interval(other),
            rounds: self.rounds.min(other.figures().len()),
            shown: [self.shown[0].clone(), with_noise(other)],
            rounds_of: [self.rounds_of[0].clone(), other.clone()],
            ..self
        }
    }

    /// Marks the figure as a count that is the same in every round, so that one round decides.
    pub fn exact(self) -> Row {
        let point = |figure: f64| Some([figure, figure]);
        let ratio_ci = self.ratio.and_then(point);
        Row { ebb_ci: point(self.ebb), ratio_ci, ..self }
    }

    /// Notes that Ebb failed in `failed` more rounds than it has figures of. Such a round takes for
    /// ever, so the goal is missed if there is one.
    pub fn failed(self, failed: usize) -> Row {
        let of = self.rounds_of[0].figures().len() + failed;
        let what = match failed {
            0 => self.what,
            _ => format!("{}; {FAILED} {failed} of {of} times", self.what),
        };
        Row { what, failed, ..self }
    }

    /// Sets the goal: the ratio must be no more than this.
    pub fn at_most(self, limit: f64) -> Row {
        self.bound(format!("<= {limit:?}"), Bounds::Ratio([f64::NEG_INFINITY, limit]))
    }

    /// Sets the goal: the ratio must be no less than this.
    pub fn at_least(self, limit: f64) -> Row {
        self.bound(format!(">= {limit:?}"), Bounds::Ratio([limit, f64::INFINITY]))
    }

    /// Sets the goal: the ratio must be 1, with `off` to either side.
    pub fn within(self, off: f64) -> Row {
        self.bound(format!("1 +- {off:?}"), Bounds::Ratio([1.0 - off, 1.0 + off]))
    }

    /// Sets the goal: the figure itself must be no more than this.
    pub fn no_more_than(self, limit: f64) -> Row {
        self.bound(format!("no more than {limit}"), Bounds::Figure([f64::NEG_INFINITY, limit]))
    }

    /// Sets the goal: the figure itself must be no less than this.
    pub fn not_less_than(self, limit: f64) -> Row {
        self.bound(format!("no less than {limit}"), Bounds::Figure([limit, f64::INFINITY]))
    }

    fn bound(self, goal: String, bounds: Bounds) -> Row {
        Row { goal: Some(goal), bounds: Some(bounds), ..self }
    }

    /// Decides whether the goal is met. If `may_be` is false, it stays undecided.
    pub fn decide(&mut self, may_be: bool) {
        let Some(bounds) = self.bounds else { return };
        let (found, [least, most]) = match bounds {
            Bounds::Ratio(bounds) => (self.ratio_ci, bounds),
            Bounds::Figure(bounds) => (self.ebb_ci, bounds),
        };
        if may_be && self.failed > 0 {
            (self.met, self.undecided) = (Some(false), false);
            return;
        }
        self.met = found.filter(|_| may_be).and_then(|[low, high]| {
            match (least <= low && high <= most, high < least || most < low) {
                (true, _) => Some(true),
                (_, true) => Some(false),
                _ => None,
            }
        });
        self.undecided = self.met.is_none();
    }

    pub fn cells(&self) -> [String; 7] {
        let ratio = self.ratio.map(|ratio| match self.ratio_ci {
            Some([low, high]) => format!("{} [{}, {}]", short(ratio), short(low), short(high)),
            None => short(ratio),
        });
        [
            self.what.clone(),
            self.unit.into(),
            self.shown[0].clone(),
            self.shown[1].clone(),
            self.against.clone().unwrap_or_default(),
            ratio.unwrap_or_default(),
            match (&self.goal, self.met) {
                (Some(goal), Some(true)) => format!("{goal}: met"),
                (Some(goal), Some(false)) => format!("{goal}: MISSED"),
                (Some(goal), None) => format!("{goal}: undecided"),
                _ => String::new(),
            },
        ]
    }
}

/// Returns `None` for a ratio that is not finite: then nothing was measured.
fn finite(ratio: f64) -> Option<f64> {
    Some(ratio).filter(|ratio| ratio.is_finite())
}

fn median_interval(rounds: &Rounds) -> Option<Interval> {
    let figures = rounds.figures();
    stats::interval(&[figures.len()], |drawn| median(&pick(figures, &drawn[0])))
}

/// Returns the interval of `of`. If both sides have as many rounds, those with the same number are
/// drawn together, otherwise each side on its own.
fn paired(a: &[f64], b: &[f64], of: impl Fn(&[f64], &[f64]) -> f64) -> Option<Interval> {
    if a.len() == b.len() {
        return stats::interval(&[a.len()], |drawn| of(&pick(a, &drawn[0]), &pick(b, &drawn[0])));
    }
    stats::interval(&[a.len(), b.len()], |drawn| of(&pick(a, &drawn[0]), &pick(b, &drawn[1])))
}

fn with_noise(rounds: &Rounds) -> String {
    match rounds.min() == rounds.max() {
        _ if rounds.median().is_nan() => "-".into(),
        true => short(rounds.median()),
        false => {
            let [middle, min, max] = [rounds.median(), rounds.min(), rounds.max()].map(short);
            format!("{middle} ({min}..{max})")
        }
    }
}

/// Formats a figure with three significant digits, or with all digits before the point.
pub fn short(figure: f64) -> String {
    if !figure.is_finite() {
        return "-".into();
    }
    if figure == 0.0 {
        return "0".into();
    }
    let before = figure.abs().max(1e-6).log10().floor() as i32 + 1;
    format!("{figure:.*}", (3 - before).clamp(0, 6) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(figures: &[f64]) -> Rounds {
        figures.iter().copied().collect()
    }

    fn row(ebb: &[f64], other: &[f64]) -> Row {
        Row::new("x", "us", &rounds(ebb)).against("y", &rounds(other))
    }

    fn decided(mut row: Row) -> (Option<bool>, bool) {
        row.decide(true);
        (row.met, row.undecided)
    }

    #[test]
    fn goals_are_met_missed_or_undecided() {
        let sure = |ratio: f64| row(&[ratio; 5], &[1.0; 5]);
        assert_eq!(decided(sure(2.0).at_most(2.0)), (Some(true), false));
        assert_eq!(decided(sure(2.1).at_most(2.0)), (Some(false), false));
        assert_eq!(decided(sure(0.994).at_least(0.995)), (Some(false), false));
        assert_eq!(decided(sure(0.98).within(0.03)), (Some(true), false));
        assert_eq!(decided(sure(1.04).within(0.03)), (Some(false), false));
        assert_eq!(decided(sure(1.0)), (None, false));
        let noisy = || row(&[0.8, 0.9, 1.0, 1.1, 1.2], &[1.0; 5]);
        assert_eq!(decided(noisy().at_most(1.0)), (None, true));
        assert_eq!(decided(noisy().at_most(2.0)), (Some(true), false));
        assert_eq!(decided(noisy().no_more_than(0.5)), (Some(false), false));
    }

    #[test]
    fn a_side_that_fails_misses_its_goal() {
        let good = || row(&[1.0; 5], &[2.0; 5]).at_most(1.0);
        assert_eq!(decided(good().failed(0)), (Some(true), false));
        assert_eq!(decided(good().failed(1)), (Some(false), false));
        assert!(good().failed(1).what.ends_with("Ebb failed 1 of 6 times"));
        assert_eq!(decided(row(&[], &[]).at_most(1.0).failed(5)), (Some(false), false));
        assert_eq!(decided(row(&[], &[]).failed(5)), (None, false));
        let mut quick = good().failed(1);
        quick.decide(false);
        assert_eq!((quick.met, quick.undecided), (None, true));
    }

    #[test]
    fn one_round_or_a_quick_run_decides_nothing() {
        assert_eq!(decided(row(&[1.0], &[2.0]).at_most(1.0)), (None, true));
        assert_eq!(decided(row(&[1.0], &[2.0]).exact().at_most(1.0)), (Some(true), false));
        let mut quick = row(&[1.0; 5], &[2.0; 5]).at_most(1.0);
        quick.decide(false);
        assert_eq!((quick.met, quick.undecided), (None, true));
    }

    #[test]
    fn of_several_vms_the_ratio_is_the_geometric_mean() {
        let (ebb, other) = (rounds(&[1.0, 4.0, 1.0]), rounds(&[2.0, 2.0, 2.0]));
        let row = Row::new("x", "s", &ebb).against_vms("y", &other);
        assert!((row.ratio.unwrap() - 4.0_f64.cbrt() / 2.0).abs() < 1e-9);
        assert_eq!((row.ebb, row.other), (1.0, Some(2.0)));
    }

    /// The two baselines are the same but for noise. The better one of each draw is better than
    /// either, and the interval accounts for that.
    #[test]
    fn the_best_baseline_is_chosen_in_every_draw() {
        let ebb = rounds(&[1.0; 5]);
        let others = [
            ("a".to_owned(), rounds(&[1.0, 1.2, 0.8, 1.1, 0.9])),
            ("b".to_owned(), rounds(&[0.9, 0.8, 1.2, 1.0, 1.15])),
        ];
        let best = Row::new("x", "s", &ebb).against_best(&others, Better::Less);
        assert!(best.against.as_deref().unwrap().ends_with(", best of 2"));
        let alone = |(name, other): &(String, Rounds)| {
            Row::new("x", "s", &ebb).against_vms(name, other).ratio_ci.unwrap()
        };
        let (a, b) = (alone(&others[0]), alone(&others[1]));
        let [low, high] = best.ratio_ci.unwrap();
        assert!(low >= a[0].max(b[0]) - 1e-9 && high >= a[1].max(b[1]) - 1e-9);
        let [one, other] = others.clone();
        let turned = Row::new("x", "s", &ebb).against_best(&[other, one], Better::Less);
        assert_eq!(turned.ratio_ci, best.ratio_ci);
        let more = Row::new("x", "s", &ebb).against_best(&others, Better::More);
        assert!(more.ratio.unwrap() <= best.ratio.unwrap());
    }

    #[test]
    fn json_has_the_one_shape() {
        let mut row = row(&[3.0; 5], &[2.0; 5]).at_most(1.3);
        row.decide(true);
        let json = serde_json::to_value(row).unwrap();
        let expected = serde_json::json!({
            "what": "x", "unit": "us", "ebb": 3.0, "other": 2.0, "against": "y",
            "ratio": 1.5, "goal": "<= 1.3", "met": false, "ebb_ci": [3.0, 3.0],
            "other_ci": [2.0, 2.0], "ratio_ci": [1.5, 1.5], "rounds": 5, "undecided": false
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn figures_are_short() {
        let shown = [0.0123, 0.5, 1.0, 12.34, 1234.5, 0.0].map(short);
        assert_eq!(shown, ["0.0123", "0.500", "1.00", "12.3", "1234", "0"]);
    }
}
