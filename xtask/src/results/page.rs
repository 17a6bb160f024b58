//! `docs/benchmarks.md`: the results in a template that people write.

use std::fmt::Write;

use anyhow::{Context, ensure};

use super::Causes;
use super::row::{Row, escape};
use super::taken::Taken;

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
            let [what, ebb, against, ratio, _, goal] = row.cells();
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
            let origin = taken.origin();
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
            taken.origin(),
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
            let _ = writeln!(text, "| {} |", row.cells().join(" | "));
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

#[cfg(test)]
mod tests {
    use super::super::taken::tests::example;
    use super::*;

    fn page(causes: &str) -> anyhow::Result<(String, Vec<(String, String)>)> {
        let causes: Causes = serde_json::from_str(causes).unwrap();
        let template = format!("before\n{PLACE}after\n");
        let names = ["x".to_owned(), "y".to_owned()];
        let (all, names) = (&[example()], &names);
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
}
