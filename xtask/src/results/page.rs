//! `docs/benchmarks.md`: the results in a template that people write.

use std::fmt::Write;

use anyhow::{Context, ensure};

use super::Causes;
use super::taken::{Row, Taken};
use crate::bench::{Interval, short};

/// Line of the template that the summary replaces.
const PLACE: &str = "<!-- results -->\n";
const MIXED: &str =
    "These are of several commits or machines: compare no figure of one with another.\n\n";
const GOALS: &str =
    "| benchmark | what | ebb | against | ratio | goal |\n|---|---|---|---|---|---|\n";
const HEAD: &str = "| what | ebb | against | ratio | rounds | goal |\n|---|---|---|---|---|---|\n";

pub struct Page<'a> {
    pub template: &'a str,
    pub causes: &'a Causes,
    pub all: &'a [Taken],
    /// Names of all benchmarks, with a result or without.
    pub names: &'a [String],
    /// Whether the results are of several commits or machines.
    pub is_mixed: bool,
}

impl Page<'_> {
    /// Returns the page: a line for each goal, and what is missing.
    ///
    /// # Errors
    /// The template has no place for results, or a cause belongs to no row.
    pub fn text(&self) -> anyhow::Result<String> {
        let (before, after) = self.template.split_once(PLACE).context("no place for results")?;
        self.check_causes()?;
        Ok(format!("{before}{}{after}", self.summary()))
    }

    /// Returns a page for each benchmark that has a result: its name and text.
    pub fn details(&self) -> Vec<(String, String)> {
        self.all.iter().map(|taken| (taken.name.clone(), self.detail(taken))).collect()
    }

    fn summary(&self) -> String {
        if self.all.is_empty() {
            return "No results of this kind are here yet.\n".into();
        }
        let mut text = if self.is_mixed { MIXED.to_owned() } else { String::new() };
        for (machine, names) in self.machines() {
            let _ = writeln!(text, "- {}: {machine}", names.join(", "));
        }
        let goals: Vec<(&Taken, &Row)> = { self.all.iter() }
            .flat_map(|taken| taken.rows.iter().map(move |row| (taken, row)))
            .filter(|(_, row)| row.goal.is_some())
            .collect();
        let count = |met: Option<bool>| goals.iter().filter(|(_, row)| row.met == met).count();
        let _ = write!(
            text,
            "\n**{} goals: {} met, {} missed, {} undecided.**\n\n{GOALS}",
            goals.len(),
            count(Some(true)),
            count(Some(false)),
            count(None)
        );
        for (taken, row) in &goals {
            let [what, ebb, against, ratio, _, goal] = cells(row);
            let name = &taken.name;
            let _ = writeln!(
                text,
                "| [{name}](results/{name}.md) | {what} | {ebb} | {against} | {ratio} | {goal} |"
            );
        }
        let has = |name: &&String| self.all.iter().any(|taken| taken.name == **name);
        let without: Vec<String> =
            self.names.iter().filter(|name| !has(name)).map(|name| format!("`{name}`")).collect();
        if !without.is_empty() {
            let _ = write!(
                text,
                "\n{} of {} benchmarks have no result in this table yet: {}.\n",
                without.len(),
                self.names.len(),
                without.join(", ")
            );
        }
        text + "\n" + &self.misses()
    }

    /// Returns each origin of results, with the names of the benchmarks from there.
    fn machines(&self) -> Vec<(String, Vec<&str>)> {
        let mut found: Vec<(String, Vec<&str>)> = Vec::new();
        for taken in self.all {
            let origin = origin(taken);
            match found.iter_mut().find(|(other, _)| *other == origin) {
                Some((_, names)) => names.push(&taken.name),
                None => found.push((origin, vec![&taken.name])),
            }
        }
        found
    }

    /// Checks that each cause belongs to a row. One that does not is about something that has
    /// changed.
    fn check_causes(&self) -> anyhow::Result<()> {
        for taken in self.all {
            for begins in self.causes.get(&taken.name).into_iter().flatten().map(|(row, _)| row) {
                let is_there = taken.rows.iter().any(|row| row.what.starts_with(begins.as_str()));
                ensure!(is_there, "{}: there is a cause for `{begins}`, and no row", taken.name);
            }
        }
        Ok(())
    }

    fn detail(&self, taken: &Taken) -> String {
        let name = &taken.name;
        let mut text = format!(
            "# {name}\n\n`cargo xtask results` generates this page from [{name}.json]({name}.json). \
             [benchmarks.md](../benchmarks.md#results) explains the columns and how it was measured.\n\n\
             {} Seed {}.\n\n",
            origin(taken),
            taken.seed
        );
        if taken.has_picture {
            let _ = write!(text, "![{name}]({name}.svg)\n\n");
        }
        text += HEAD;
        // Rows with a goal come first. Rows that only chose the sides come last.
        let rank = |row: &&Row| match (row.goal.is_some(), row.what.starts_with("screening")) {
            (true, _) => 0,
            (_, false) => 1,
            (_, true) => 2,
        };
        let mut rows: Vec<&Row> = taken.rows.iter().collect();
        rows.sort_by_key(rank);
        for row in rows {
            let _ = writeln!(text, "| {} |", cells(row).join(" | "));
        }
        text += "\n";
        for note in &taken.notes {
            // A note is one line, and nothing in it may begin other Markdown.
            let _ = writeln!(text, "- {}", escape(note));
        }
        text
    }

    /// Returns each cause, with the goals that are not met because of it.
    fn misses(&self) -> String {
        let mut causes: Vec<(&str, Vec<String>)> = Vec::new();
        for taken in self.all {
            for row in taken.rows.iter().filter(|row| row.goal.is_some() && row.met != Some(true)) {
                let how = if row.met == Some(false) { "missed" } else { "undecided" };
                let line = format!("{}, *{}* ({how})", taken.name, escape(&row.what));
                let cause = self.cause(taken, row);
                match causes.iter_mut().find(|(other, _)| *other == cause) {
                    Some((_, lines)) => lines.push(line),
                    None => causes.push((cause, vec![line])),
                }
            }
        }
        let text =
            |(cause, lines): (&str, Vec<String>)| format!("- {}: {cause}\n", lines.join("; "));
        match causes.is_empty() {
            true => String::new(),
            false => {
                let lines: String = causes.into_iter().map(text).collect();
                format!("Why goals are not met:\n\n{lines}\n")
            }
        }
    }

    fn cause(&self, taken: &Taken, row: &Row) -> &str {
        let of = self.causes.get(&taken.name).into_iter().flatten();
        of.filter(|(begins, _)| row.what.starts_with(begins.as_str()))
            .max_by_key(|(begins, _)| begins.len())
            .map_or("the cause is not known yet", |(_, why)| why.as_str())
    }
}

/// Describes the origin of results: the machine, what ran on it, the commit and the date.
fn origin(taken: &Taken) -> String {
    let machine = &taken.identity.machine;
    format!(
        "{}, {} cores, {} GiB, Linux {}, {} under {}; commit {}, {}.",
        machine.cpu,
        machine.cores,
        machine.memory_gib,
        machine.kernel,
        taken.identity.qemu,
        machine.accelerator,
        taken.identity.commit,
        taken.date
    )
}

/// Returns the cells of a row: what, Ebb's figure, the other side, the ratio, the rounds, the goal.
fn cells(row: &Row) -> [String; 6] {
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
    [
        escape(&row.what),
        figure(row.ebb, row.ebb_ci),
        against,
        ratio.unwrap_or_default(),
        row.rounds.to_string(),
        goal.unwrap_or_default(),
    ]
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

    fn page(causes: &str) -> anyhow::Result<(String, Vec<(String, String)>)> {
        let causes: Causes = serde_json::from_str(causes).unwrap();
        let template = format!("before\n{PLACE}after\n");
        let names = ["x".to_owned(), "y".to_owned()];
        let (all, names) = (&[taken()], &names);
        let page = Page { template: &template, causes: &causes, all, names, is_mixed: false };
        Ok((page.text()?, page.details()))
    }

    #[test]
    fn each_goal_stands_on_the_page_with_why_it_is_not_met() {
        let (text, _) = page(r#"{"x": {"second": "slow"}, "not taken yet": {"y": "z"}}"#).unwrap();
        for part in [
            "before\n- x: a CPU, 2 cores, 24 GiB, Linux 6.18, QEMU 7 under TCG; commit c0ffee, \
             2026-11-24.\n",
            "**3 goals: 1 met, 1 missed, 1 undecided.**\n",
            "| [x](results/x.md) | first | 1.00 s (0.900 to 1.10) | a\\|b, 2.00 s | \
             0.500 (0.400 to 0.700) | <= 0.6: undecided |\n",
            "<= 0.6: **missed** |",
            "1 of 2 benchmarks have no result in this table yet: `y`.\n",
            "- x, *first* (undecided): the cause is not known yet\n- x, *second one* (missed): slow\n",
            "\nafter\n",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("*third*"));
    }

    #[test]
    fn a_benchmarks_own_page_has_all_rows_and_notes() {
        let (_, details) = page("{}").unwrap();
        let [(name, text)] = &details[..] else { panic!("{details:?}") };
        assert_eq!(name, "x");
        for part in
            ["# x\n", " Seed 7.\n", "| third | 1.00 s", "| 5 | <= 0.6: met |", "- one two\n"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains(".svg"));
    }

    #[test]
    fn a_cause_of_no_row_is_an_error() {
        let error = page(r#"{"x": {"fourth": "slow"}}"#).unwrap_err().to_string();
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
