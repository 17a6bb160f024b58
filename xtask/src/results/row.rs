//! A row of a benchmark's results: as in its JSON, and as cells of a Markdown table.

use serde::{Deserialize, Serialize};

use crate::bench::{FAILED, Interval, short};

#[derive(Serialize, Deserialize)]
pub struct Row {
    pub what: String,
    pub unit: String,
    /// Ebb's figure; null if nothing was measured.
    pub ebb: Option<f64>,
    pub other: Option<f64>,
    pub against: Option<String>,
    pub ratio: Option<f64>,
    pub goal: Option<String>,
    pub met: Option<bool>,
    pub ebb_ci: Option<Interval>,
    pub other_ci: Option<Interval>,
    pub ratio_ci: Option<Interval>,
    pub rounds: usize,
    pub undecided: bool,
}

impl Row {
    /// Returns all cells: what, Ebb's figure, the other side, the ratio, the rounds, the goal.
    pub fn cells(&self) -> [String; 6] {
        let figure = |figure: Option<f64>, interval: Option<Interval>| {
            self.figure(figure) + &between(interval.filter(|_| figure.is_some()))
        };
        let against = self.against.as_ref().map_or_else(String::new, |against| {
            format!("{}, {}", escape(against), figure(self.other, self.other_ci))
        });
        let goal = self.goal.as_ref().map(|goal| match self.met {
            Some(true) => format!("{goal}: met"),
            Some(false) => format!("{goal}: **missed**"),
            None => format!("{goal}: undecided"),
        });
        [
            escape(&self.what),
            figure(self.ebb, self.ebb_ci),
            against,
            self.ratio(),
            self.rounds.to_string(),
            goal.unwrap_or_default(),
        ]
    }

    /// Returns the cells for a reader in a hurry: Ebb's figure, the other side, the ratio, the
    /// verdict. Only the ratio has its interval. Less must be better.
    pub fn brief_cells(&self) -> [String; 4] {
        let against = self.against.as_ref().map_or_else(String::new, |against| {
            format!("{}: {}", escape(against), self.figure(self.other))
        });
        [self.figure(self.ebb), against, self.ratio(), self.verdict()]
    }

    /// Says which side is better, if there are two, and whether the goal is met.
    fn verdict(&self) -> String {
        let compared = match (self.failure(), self.ratio, self.ratio_ci) {
            (Some(failure), ..) => Some(failure),
            (_, None, _) => None,
            (.., Some([_, high])) if high < 1.0 => Some("Ebb is better"),
            (.., Some([low, _])) if low > 1.0 => Some("Ebb is worse"),
            (.., Some(_)) => Some("no clear difference"),
            (.., None) => Some("too few rounds to compare"),
        };
        let goal = match (&self.goal, self.met) {
            (None, _) => "no goal".to_owned(),
            (Some(goal), Some(true)) => format!("goal {goal}: met"),
            (Some(goal), Some(false)) => format!("goal {goal}: **missed**"),
            (Some(goal), None) => format!("goal {goal}: undecided"),
        };
        match compared {
            Some(compared) => format!("{compared}; {goal}"),
            None => goal,
        }
    }

    /// Returns how often Ebb failed, as the row's name says it.
    fn failure(&self) -> Option<&str> {
        self.what.find(FAILED).map(|at| &self.what[at..])
    }

    fn figure(&self, figure: Option<f64>) -> String {
        match figure {
            Some(figure) if self.unit.is_empty() => short(figure),
            Some(figure) => format!("{} {}", short(figure), self.unit),
            None => "-".into(),
        }
    }

    fn ratio(&self) -> String {
        let ratio = self.ratio.map(|ratio| format!("{}{}", short(ratio), between(self.ratio_ci)));
        ratio.unwrap_or_default()
    }
}

fn between(interval: Option<Interval>) -> String {
    interval.map_or_else(String::new, |[low, high]| format!(" ({} to {})", short(low), short(high)))
}

/// Makes text stand in a cell or in a list: it stays in its line, and begins no column.
pub fn escape(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::super::taken::tests::example;
    use super::*;

    fn row(ratio_ci: Option<Interval>) -> Row {
        let mut rows = example().rows;
        Row { ratio_ci, ..rows.swap_remove(0) }
    }

    #[test]
    fn only_an_interval_on_one_side_of_1_says_who_is_better() {
        let verdict = |ratio_ci| row(ratio_ci).verdict();
        assert_eq!(verdict(Some([0.4, 0.7])), "Ebb is better; goal <= 0.6: undecided");
        assert_eq!(verdict(Some([1.1, 1.2])), "Ebb is worse; goal <= 0.6: undecided");
        assert_eq!(verdict(Some([0.9, 1.1])), "no clear difference; goal <= 0.6: undecided");
        assert_eq!(verdict(None), "too few rounds to compare; goal <= 0.6: undecided");
    }

    #[test]
    fn a_row_without_another_side_compares_nothing() {
        let alone = Row { against: None, other: None, ratio: None, goal: None, ..row(None) };
        assert_eq!(alone.brief_cells(), ["1.00 s", "", "", "no goal"]);
    }

    #[test]
    fn a_failure_of_ebbs_is_no_better_figure() {
        let what = format!("first; {FAILED} 1 of 6 times");
        let failed = Row { what, met: Some(false), ..row(Some([0.4, 0.5])) };
        assert_eq!(failed.verdict(), "Ebb failed 1 of 6 times; goal <= 0.6: **missed**");
    }
}
