//! A benchmark's results, as in its JSON.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use crate::bench::{Identity, Interval};

/// Results of a benchmark. `docs/benchmarks.md` explains them.
#[derive(Serialize, Deserialize)]
pub struct Taken {
    pub name: String,
    #[serde(flatten)]
    pub identity: Identity,
    pub date: String,
    pub seed: u64,
    pub notes: Vec<String>,
    pub rows: Vec<Row>,
    /// Whether there is a picture beside the JSON.
    #[serde(skip)]
    pub has_picture: bool,
}

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

impl Taken {
    /// Parses the JSON of a benchmark.
    ///
    /// # Errors
    /// The text has another shape.
    pub fn parse(text: &str) -> serde_json::Result<Taken> {
        serde_json::from_str(text)
    }

    /// Returns the JSON as it is stored in the documents: only the fields that are read.
    ///
    /// # Errors
    /// None, because the value was parsed from JSON.
    pub fn normal(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Checks that the results may stand in the documents.
    ///
    /// # Errors
    /// The run was quick, or its tree was not committed.
    pub fn is_result(&self) -> anyhow::Result<()> {
        ensure!(!self.identity.quick, "it is of a quick run");
        let commit = &self.identity.commit;
        ensure!(!commit.ends_with('+'), "it is of a tree that was not committed, {commit}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::tests::written;

    /// Whatever a benchmark writes can be read, also missing figures and figures that are no
    /// number.
    #[test]
    fn rows_without_a_ratio_are_read_again() {
        let cases = [(3.0, 0.0), (0.0, 3.0), (0.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY)];
        for (ebb, other) in cases {
            let taken = Taken::parse(&written(&[ebb; 5], &[other; 5]));
            let taken = taken.unwrap_or_else(|error| panic!("{ebb} and {other}: {error}"));
            assert_eq!(taken.rows.len(), 3);
            assert!(taken.rows.iter().all(|row| row.rounds == 5));
            let again = Taken::parse(&taken.normal().unwrap()).unwrap();
            assert_eq!(again.normal().unwrap(), taken.normal().unwrap());
        }
        let sometimes = written(&[1.0, 2.0, 3.0, 1.0, 2.0], &[0.0, 0.0, 1.0, 0.0, 0.0]);
        assert_eq!(Taken::parse(&sometimes).unwrap().rows[0].ratio_ci, None);
    }
}
