//! What a benchmark found: a table on the screen, and JSON.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::identity::Identity;
use super::row::Row;
use super::session::Session;
use super::sweep;
use crate::plot::{self, Figure};

const ONE_AFTER_THE_OTHER: &str = "Rounds are one after the other, of one VM or process where nothing \
    else is said: their intervals tell nothing of another one.";

/// Results of a benchmark, in the form that `docs/benchmarks.md` describes.
#[derive(Serialize)]
pub struct Report {
    name: &'static str,
    #[serde(flatten)]
    identity: Option<Identity>,
    date: Option<String>,
    seed: Option<u64>,
    /// Sentences on how it was measured.
    notes: Vec<String>,
    rows: Vec<Row>,
    /// SVG picture, saved beside the JSON.
    #[serde(skip)]
    picture: RefCell<Option<Vec<u8>>>,
}

impl Report {
    pub fn new(name: &'static str) -> Report {
        Report {
            name,
            identity: None,
            date: None,
            seed: None,
            notes: Vec::new(),
            rows: Vec::new(),
            picture: RefCell::default(),
        }
    }

    pub fn row(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Adds a sentence on how it was measured.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Returns the notes so far.
    #[cfg(test)]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Notes that the blocks were begun with another seed than this session's.
    pub fn seeded(&mut self, seed: u64) {
        self.seed = Some(seed);
    }

    /// Draws a picture.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn plot(&self, figure: &Figure) -> anyhow::Result<()> {
        let directory = sweep::scratch()?;
        let path = directory.path().join("figure.svg");
        plot::draw(&path, figure)?;
        *self.picture.borrow_mut() = Some(fs::read(path)?);
        Ok(())
    }

    /// Completes the report: decides the goals, and adds the identity, seed and date.
    pub fn finish(&mut self, session: &Session) {
        if self.seed.is_none() {
            self.note(ONE_AFTER_THE_OTHER);
        }
        self.identity = Some(session.identity.clone());
        self.seed = self.seed.or(Some(session.seed));
        self.date = Some(today());
        self.rows.iter_mut().for_each(|row| row.decide(!session.identity.quick));
    }

    pub fn print(&self) {
        let head = ["what", "unit", "ebb", "other", "against", "ratio", "goal"].map(String::from);
        let table: Vec<_> = std::iter::once(head).chain(self.rows.iter().map(Row::cells)).collect();
        let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max();
        let widths: [usize; 7] = std::array::from_fn(|column| width(column).unwrap_or(0));
        for note in &self.notes {
            println!("{note}");
        }
        println!(
            "Medians of rounds, with (least..greatest); a ratio is ebb / other, of VMs their geometric \
             mean, with its interval of nominally 95 %."
        );
        for row in &table {
            let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
            println!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
        }
    }

    /// Writes JSON and picture. Returns the path of the JSON.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn save(&self, directory: &Path) -> anyhow::Result<PathBuf> {
        fs::create_dir_all(directory)?;
        if let Some(picture) = &*self.picture.borrow() {
            fs::write(directory.join(format!("{}.svg", self.name)), picture)?;
        }
        let path = directory.join(format!("{}.json", self.name));
        // The file is renamed into place, because a later session takes a whole file for a finished
        // benchmark.
        let new = path.with_extension("json.new");
        fs::write(&new, serde_json::to_vec_pretty(self)?)?;
        fs::rename(&new, &path)?;
        Ok(path)
    }
}

/// Returns today's date in UTC, as in `2026-11-24`.
fn today() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    date(now.map_or(0, |now| now.as_secs() / 86_400))
}

/// Returns the date that is `days` days after 1970-01-01. Years begin in March here, so that a leap
/// day is their last day.
fn date(days: u64) -> String {
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let in_month = day - (153 * month + 2) / 5 + 1;
    let number = if month < 10 { month + 3 } else { month - 9 };
    format!("{}-{number:02}-{in_month:02}", era * 400 + year + u64::from(number <= 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates() {
        let days = [0, 11_016, 11_017, 19_782, 20_781];
        let dates = ["1970-01-01", "2000-02-29", "2000-03-01", "2024-02-29", "2026-11-24"];
        assert_eq!(days.map(date), dates);
    }
}
