//! What a benchmark found: a table on the screen, and JSON.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde::Serialize;

use super::rounds::Rounds;
use crate::cargo;
use crate::plot::{self, Figure};

/// All benchmarks' one shape: `docs/benchmarks.md`.
#[derive(Serialize)]
pub struct Report {
    name: &'static str,
    commit: String,
    machine: Machine,
    rows: Vec<Row>,
    /// Said before the table.
    #[serde(skip)]
    notes: Vec<String>,
}

#[derive(Serialize)]
struct Machine {
    cpu: String,
    kernel: String,
    cores: usize,
}

/// One comparison.
#[derive(Serialize)]
pub struct Row {
    what: String,
    unit: &'static str,
    ebb: f64,
    other: Option<f64>,
    against: Option<String>,
    /// `ebb / other`.
    ratio: Option<f64>,
    goal: Option<String>,
    met: Option<bool>,
    /// `ebb` and `other` with the least and the greatest of their rounds.
    #[serde(skip)]
    shown: [String; 2],
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
            shown: [with_noise(ebb), String::new()],
        }
    }

    pub fn against(mut self, against: impl Into<String>, other: &Rounds) -> Row {
        self.other = Some(other.median());
        self.against = Some(against.into());
        // Nothing was measured where that is not finite.
        self.ratio = Some(self.ebb / other.median()).filter(|ratio| ratio.is_finite());
        self.shown[1] = with_noise(other);
        self
    }

    /// The ratio is to be no more than this.
    pub fn at_most(self, limit: f64) -> Row {
        let met = self.ratio.map(|ratio| ratio <= limit);
        Row { goal: Some(format!("<= {limit:?}")), met, ..self }
    }

    /// The ratio is to be no less than this.
    pub fn at_least(self, limit: f64) -> Row {
        let met = self.ratio.map(|ratio| ratio >= limit);
        Row { goal: Some(format!(">= {limit:?}")), met, ..self }
    }

    /// The ratio is to be 1, with `off` to either side.
    pub fn within(self, off: f64) -> Row {
        let met = self.ratio.map(|ratio| (ratio - 1.0).abs() <= off);
        Row { goal: Some(format!("1 +- {off:?}")), met, ..self }
    }

    /// The figure itself is to be no more than this.
    pub fn no_more_than(self, limit: f64) -> Row {
        let met = Some(self.ebb <= limit);
        Row { goal: Some(format!("no more than {limit}")), met, ..self }
    }

    /// The figure itself is to be no less than this.
    pub fn not_less_than(self, limit: f64) -> Row {
        let met = Some(self.ebb >= limit);
        Row { goal: Some(format!("no less than {limit}")), met, ..self }
    }

    fn cells(&self) -> [String; 7] {
        [
            self.what.clone(),
            self.unit.into(),
            self.shown[0].clone(),
            self.shown[1].clone(),
            self.against.clone().unwrap_or_default(),
            self.ratio.map(short).unwrap_or_default(),
            match (&self.goal, self.met) {
                (Some(goal), Some(true)) => format!("{goal}: met"),
                (Some(goal), _) => format!("{goal}: MISSED"),
                _ => String::new(),
            },
        ]
    }
}

impl Report {
    pub fn new(name: &'static str) -> Report {
        let machine = Machine {
            cpu: cpu_model(),
            kernel: rustix::system::uname().release().to_string_lossy().into(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        };
        println!("{name}: {}, Linux {}, {} cores", machine.cpu, machine.kernel, machine.cores);
        Report { name, commit: commit(), machine, rows: Vec::new(), notes: Vec::new() }
    }

    pub fn row(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// A sentence on how it was measured.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// A picture of it, beside the JSON.
    ///
    /// # Errors
    /// As the file system's.
    pub fn plot(&self, figure: &Figure) -> anyhow::Result<PathBuf> {
        let path = directory()?.join(format!("{}.svg", self.name));
        plot::draw(&path, figure)?;
        Ok(path)
    }

    pub fn print(&self) {
        let head = ["what", "unit", "ebb", "other", "against", "ratio", "goal"].map(String::from);
        let table: Vec<_> = std::iter::once(head).chain(self.rows.iter().map(Row::cells)).collect();
        let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max();
        let widths: [usize; 7] = std::array::from_fn(|column| width(column).unwrap_or(0));
        for note in &self.notes {
            println!("{note}");
        }
        println!("Medians of rounds, with (least..greatest); a ratio is ebb / other.");
        for row in &table {
            let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
            println!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
        }
    }

    /// Writes the JSON; where it is.
    ///
    /// # Errors
    /// As the file system's.
    pub fn save(&self) -> anyhow::Result<PathBuf> {
        let path = directory()?.join(format!("{}.json", self.name));
        fs::write(&path, serde_json::to_vec_pretty(self)?)?;
        Ok(path)
    }
}

/// Where the results go.
fn directory() -> anyhow::Result<PathBuf> {
    let directory = vmtest::assets::target_directory().join("bench");
    fs::create_dir_all(&directory)?;
    Ok(directory)
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

/// Three digits that count, or all before the point.
fn short(figure: f64) -> String {
    let before = figure.abs().max(1e-6).log10().floor() as i32 + 1;
    format!("{figure:.*}", (3 - before).clamp(0, 6) as usize)
}

fn cpu_model() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model.map_or_else(|| "unknown CPU".into(), |(_, model)| model.to_owned())
}

/// With a `+` where the tree is not what was committed.
fn commit() -> String {
    let git = |words: &[&str]| {
        let output =
            Command::new("git").args(words).current_dir(cargo::workspace()).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(text)
    };
    let Some(hash) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "unknown".into() };
    match git(&["status", "--porcelain", "--untracked-files=no"]) {
        Some(changes) if changes.is_empty() => hash,
        _ => hash + "+",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ebb: f64, other: f64) -> Row {
        let one = |figure| [figure].into_iter().collect::<Rounds>();
        Row::new("x", "us", &one(ebb)).against("y", &one(other))
    }

    #[test]
    fn goals_are_met_or_missed() {
        assert_eq!(row(2.0, 1.0).at_most(2.0).met, Some(true));
        assert_eq!(row(2.1, 1.0).at_most(2.0).met, Some(false));
        assert_eq!(row(0.994, 1.0).at_least(0.995).met, Some(false));
        assert_eq!(row(0.98, 1.0).within(0.03).met, Some(true));
        assert_eq!(row(1.04, 1.0).within(0.03).met, Some(false));
        assert_eq!(row(1.0, 1.0).met, None);
    }

    #[test]
    fn json_has_the_one_shape() {
        let json = serde_json::to_value(row(3.0, 2.0).at_most(1.3)).unwrap();
        let expected = serde_json::json!({
            "what": "x", "unit": "us", "ebb": 3.0, "other": 2.0, "against": "y",
            "ratio": 1.5, "goal": "<= 1.3", "met": false
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn figures_are_short() {
        let shown = [0.0123, 0.5, 1.0, 12.34, 1234.5, 0.0].map(short);
        assert_eq!(shown, ["0.0123", "0.500", "1.00", "12.3", "1234", "0.000000"]);
    }
}
