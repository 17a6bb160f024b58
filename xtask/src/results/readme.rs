//! The README's table: the few rows of benchmarks that people chose.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::{Context, ensure};
use serde::Deserialize;

use super::row::{Row, escape};
use super::taken::Taken;

/// Lines of the README between which the table is.
const BEGIN: &str = "<!-- results -->\n";
const END: &str = "<!-- /results -->\n";
const HEAD: &str = "| measured | Ebb | against | ratio | verdict |\n|---|---|---|---|---|\n";
/// How goals begin of which more is better.
const MORE: [&str; 2] = [">=", "no less"];

/// Which row of a benchmark is in the table, and what the table calls it. Less must be better in it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    benchmark: String,
    /// How the row's name begins.
    row: String,
    /// How the name of the other side begins. Without it, any row fits.
    #[serde(default)]
    against: String,
    /// What is measured, in plain words.
    says: String,
}

pub struct Readme<'a> {
    /// Text of the README as it is.
    pub old: &'a str,
    pub entries: &'a [Entry],
    pub all: &'a [Taken],
    /// Names of all benchmarks, with a result or without.
    pub names: &'a [String],
}

impl Readme<'_> {
    /// Returns the README with the table of these results.
    ///
    /// # Errors
    /// The README has no place for the table, or an entry is of no benchmark, of no row, or of a row
    /// in which more is better.
    pub fn text(&self) -> anyhow::Result<String> {
        let place = self.old.split_once(BEGIN);
        let place = place.and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
        let (before, after) = place.context(
            "README.md has no place for results: \
             it needs the lines `<!-- results -->` and `<!-- /results -->`",
        )?;
        Ok(format!("{before}{BEGIN}\n{}\n{END}{after}", self.table()?))
    }

    fn table(&self) -> anyhow::Result<String> {
        let mut text = HEAD.to_owned();
        let mut machines: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for entry in self.entries {
            let name = &entry.benchmark;
            ensure!(self.names.contains(name), "readme.json names `{name}`, which is no benchmark");
            let Some(taken) = self.all.iter().find(|taken| taken.name == *name) else { continue };
            let [ebb, against, ratio, verdict] = entry.row(taken)?.brief_cells();
            let says = escape(&entry.says);
            let _ = writeln!(
                text,
                "| [{says}](docs/results/{name}.md) | {ebb} | {against} | {ratio} | {verdict} |"
            );
            machines.entry(taken.machine()).or_default().insert(&taken.identity.commit);
        }
        if machines.is_empty() {
            return Ok("No results of this kind are here yet.\n".into());
        }
        text += "\n";
        for (machine, commits) in machines {
            let commits: Vec<&str> = commits.into_iter().collect();
            let _ = writeln!(text, "- {machine}; commit {}.", commits.join(", "));
        }
        Ok(text)
    }
}

impl Entry {
    /// Returns the first row that fits.
    fn row<'a>(&self, taken: &'a Taken) -> anyhow::Result<&'a Row> {
        let Entry { benchmark, row: begins, against, .. } = self;
        let fits = |row: &&Row| {
            let other = row.against.as_deref().unwrap_or_default();
            row.what.starts_with(begins.as_str()) && other.starts_with(against.as_str())
        };
        let row = taken.rows.iter().find(fits).with_context(|| {
            format!(
                "readme.json names `{begins}` against `{against}`, and {benchmark} has no such row: \
                 correct it there, or leave it out"
            )
        })?;
        let goal = row.goal.as_deref().unwrap_or_default();
        ensure!(
            !MORE.iter().any(|more| goal.starts_with(*more)),
            "readme.json names `{begins}` of {benchmark}, of which more is better: leave it out"
        );
        Ok(row)
    }
}

#[cfg(test)]
mod tests {
    use super::super::taken::tests::example;
    use super::*;

    const TEXT: &str = "before\n<!-- results -->\nold\n<!-- /results -->\nafter\n";

    fn made(old: &str, entries: &str) -> anyhow::Result<String> {
        let entries: Vec<Entry> = serde_json::from_str(entries).unwrap();
        let names = ["x".to_owned(), "y".to_owned()];
        Readme { old, entries: &entries, all: &[example()], names: &names }.text()
    }

    #[test]
    fn each_entry_with_a_result_is_a_row_of_the_readme() {
        let entries = r#"[
            {"benchmark": "y", "row": "not taken yet", "says": "never"},
            {"benchmark": "x", "row": "second", "against": "a|", "says": "Time | of it"}
        ]"#;
        let text = made(TEXT, entries).unwrap();
        let row = "| [Time \\| of it](docs/results/x.md) | 1.00 s | a\\|b: 2.00 s | \
                   0.500 (0.400 to 0.700) | Ebb is better; goal <= 0.6: **missed** |\n";
        let machine = "- a CPU, 2 cores, 24 GiB, Linux 6.18, QEMU 7 under TCG; commit c0ffee.\n";
        let table = format!("{HEAD}{row}\n{machine}");
        assert_eq!(text, format!("before\n{BEGIN}\n{table}\n{END}after\n"));
        assert_eq!(made(&text, entries).unwrap(), text);
    }

    #[test]
    fn without_a_result_the_readme_says_so() {
        let text = made(TEXT, r#"[{"benchmark": "y", "row": "r", "says": "s"}]"#).unwrap();
        assert!(text.contains("\nNo results of this kind are here yet.\n"), "{text}");
    }

    #[test]
    fn an_entry_of_nothing_is_an_error() {
        for (entries, part) in [
            (r#"[{"benchmark": "z", "row": "first", "says": "s"}]"#, "`z`, which is no benchmark"),
            (r#"[{"benchmark": "x", "row": "fourth", "says": "s"}]"#, "`fourth`"),
            (r#"[{"benchmark": "x", "row": "first", "against": "b", "says": "s"}]"#, "`b`"),
        ] {
            let error = made(TEXT, entries).unwrap_err().to_string();
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn a_row_in_which_more_is_better_is_an_error() {
        let mut taken = example();
        taken.rows[0].goal = Some(">= 0.9".into());
        let entry = r#"{"benchmark": "x", "row": "first", "says": "s"}"#;
        let entry: Entry = serde_json::from_str(entry).unwrap();
        assert!(entry.row(&taken).is_err());
        assert!(entry.row(&example()).is_ok());
    }

    #[test]
    fn a_readme_without_both_lines_is_an_error() {
        for text in ["before\n", "<!-- results -->\n", "<!-- /results -->\n<!-- results -->\n"] {
            assert!(made(text, "[]").is_err(), "{text}");
        }
    }
}
