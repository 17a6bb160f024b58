//! `docs/benchmarks.md`: the results in a template that people write.

use std::collections::BTreeSet;
use std::fmt::Write;

use anyhow::{Context, ensure};

use super::Causes;
use super::taken::{Row, Taken};
use crate::bench::{Interval, short};

/// Where the results go.
const PLACE: &str = "<!-- results -->\n";
const MIXED: &str =
    "These are of several commits or machines: compare no figure of one with another.\n\n";
const HEAD: &str = "| what | ebb | against | ratio | rounds | goal |\n|---|---|---|---|---|---|\n";

pub struct Page<'a> {
    pub template: &'a str,
    pub causes: &'a Causes,
    pub all: &'a [Taken],
    /// Of several commits or machines.
    pub is_mixed: bool,
}

impl Page<'_> {
    /// All of it.
    ///
    /// # Errors
    /// The template has no place for results, or a cause is of no row.
    pub fn text(&self) -> anyhow::Result<String> {
        let (before, after) = self.template.split_once(PLACE).context("no place for results")?;
        self.check_causes()?;
        let results: String = self.all.iter().map(|taken| self.section(taken)).collect();
        let none = "No results of this kind are here yet.\n";
        let mixed = if self.is_mixed { MIXED } else { "" };
        Ok(format!("{before}{mixed}{}{after}", if results.is_empty() { none } else { &results }))
    }

    /// A cause that is of nothing is of something that has changed.
    fn check_causes(&self) -> anyhow::Result<()> {
        for taken in self.all {
            for begins in self.causes.get(&taken.name).into_iter().flatten().map(|(row, _)| row) {
                let is_there = taken.rows.iter().any(|row| row.what.starts_with(begins.as_str()));
                ensure!(is_there, "{}: there is a cause for `{begins}`, and no row", taken.name);
            }
        }
        Ok(())
    }

    fn section(&self, taken: &Taken) -> String {
        let machine = &taken.identity.machine;
        let mut text = format!(
            "### {}\n\n{}, {} cores, {} GiB, Linux {}, {} under {}; commit {}, {}; seed {}.\n\n{HEAD}",
            taken.name,
            machine.cpu,
            machine.cores,
            machine.memory_gib,
            machine.kernel,
            taken.identity.qemu,
            machine.accelerator,
            taken.identity.commit,
            taken.date,
            taken.seed
        );
        for row in &taken.rows {
            text += &line(row);
        }
        text += "\n";
        for note in &taken.notes {
            // A sentence of a benchmark is a line: nothing in it is to begin anything.
            let _ = writeln!(text, "- {}", escape(note));
        }
        if !taken.notes.is_empty() {
            text += "\n";
        }
        text + &self.misses(taken)
    }

    /// Each goal that is not met, with why.
    fn misses(&self, taken: &Taken) -> String {
        let causes = self.causes.get(&taken.name);
        let cause = |row: &Row| {
            let of = causes.into_iter().flatten();
            of.filter(|(begins, _)| row.what.starts_with(begins.as_str()))
                .max_by_key(|(begins, _)| begins.len())
                .map_or("the cause is not known yet", |(_, why)| why.as_str())
        };
        let missed = taken.rows.iter().filter(|row| row.goal.is_some() && row.met != Some(true));
        let lines: BTreeSet<String> = missed
            .map(|row| {
                let how = if row.met == Some(false) { "missed" } else { "undecided" };
                format!("- *{}*: {how}: {}\n", escape(&row.what), cause(row))
            })
            .collect();
        match lines.is_empty() {
            true => String::new(),
            false => format!("Goals not met:\n\n{}\n", lines.into_iter().collect::<String>()),
        }
    }
}

fn line(row: &Row) -> String {
    let unit = if row.unit.is_empty() { String::new() } else { format!(" {}", row.unit) };
    let figure = |figure: Option<f64>, interval: Option<Interval>| match figure {
        Some(figure) => format!("{}{unit}{}", short(figure), between(interval)),
        None => "-".into(),
    };
    let against = row.against.as_ref().map_or_else(String::new, |against| {
        format!("{}, {}", escape(against), figure(row.other, row.other_ci))
    });
    let ratio = row.ratio.map(|ratio| format!("{}{}", short(ratio), between(row.ratio_ci)));
    let goal = row.goal.as_ref().map(|goal| match row.met {
        Some(true) => format!("{goal}: met"),
        Some(false) => format!("{goal}: **missed**"),
        None => format!("{goal}: undecided"),
    });
    format!(
        "| {} | {} | {against} | {} | {} | {} |\n",
        escape(&row.what),
        figure(row.ebb, row.ebb_ci),
        ratio.unwrap_or_default(),
        row.rounds,
        goal.unwrap_or_default()
    )
}

fn between(interval: Option<Interval>) -> String {
    interval.map_or_else(String::new, |[low, high]| format!(" ({} to {})", short(low), short(high)))
}

fn escape(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken() -> Taken {
        let row = |what: &str, met: Option<bool>| {
            serde_json::json!({
                "what": what, "unit": "s", "ebb": 1.0, "other": 2.0, "against": "a|b",
                "ratio": 0.5, "goal": "<= 0.6", "met": met, "ebb_ci": [0.9, 1.1],
                "other_ci": null, "ratio_ci": [0.4, 0.7], "rounds": 5, "undecided": met.is_none()
            })
        };
        let json = serde_json::json!({
            "name": "x", "commit": "c0ffee", "qemu": "QEMU 7", "programs": "0", "quick": false,
            "machine": {
                "cpu": "a CPU", "kernel": "6.18", "cores": 2, "memory_gib": 24, "accelerator": "TCG"
            },
            "date": "2026-11-24", "seed": 7, "notes": ["one\ntwo"],
            "rows": [row("first", None), row("second one", Some(false)), row("third", Some(true))]
        });
        Taken::parse(&json.to_string()).unwrap()
    }

    fn text(causes: &str) -> anyhow::Result<String> {
        let causes: Causes = serde_json::from_str(causes).unwrap();
        let template = format!("before\n{PLACE}after\n");
        Page { template: &template, causes: &causes, all: &[taken()], is_mixed: false }.text()
    }

    #[test]
    fn results_stand_in_the_template_with_each_miss_and_its_cause() {
        let text = text(r#"{"x": {"second": "slow"}, "not taken yet": {"y": "z"}}"#).unwrap();
        for part in [
            "before\n### x\n",
            "a CPU, 2 cores, 24 GiB, Linux 6.18, QEMU 7 under TCG; commit c0ffee, 2026-11-24; seed 7.",
            "| first | 1.00 s (0.900 to 1.10) | a\\|b, 2.00 s | 0.500 (0.400 to 0.700) | 5 | \
             <= 0.6: undecided |",
            "<= 0.6: **missed** |",
            "- one two\n",
            "- *first*: undecided: the cause is not known yet\n- *second one*: missed: slow\n",
            "\nafter\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("*third*"));
    }

    #[test]
    fn a_cause_of_no_row_is_an_error() {
        let error = text(r#"{"x": {"fourth": "slow"}}"#).unwrap_err().to_string();
        assert!(error.contains("fourth"), "{error}");
    }

    #[test]
    fn quick_runs_and_changed_trees_are_no_results() {
        assert!(taken().is_result().is_ok());
        let mut quick = taken();
        quick.identity.quick = true;
        assert!(quick.is_result().is_err());
        let mut changed = taken();
        changed.identity.commit += "+";
        assert!(changed.is_result().is_err());
    }
}
