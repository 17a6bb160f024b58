//! A benchmark's results, as in its JSON.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::row::Row;
use crate::bench::Identity;

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

    /// Describes the machine, and what ran on it.
    pub fn machine(&self) -> String {
        let Identity { machine, qemu, .. } = &self.identity;
        format!(
            "{}, {} cores, {} GiB, Linux {}, {qemu} under {}",
            machine.cpu, machine.cores, machine.memory_gib, machine.kernel, machine.accelerator
        )
    }

    /// Describes the origin of the results: the machine, what ran on it, the commit and the date.
    pub fn origin(&self) -> String {
        format!("{}; commit {}, {}.", self.machine(), self.identity.commit, self.date)
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
pub mod tests {
    use super::*;
    use crate::bench::tests::written;

    /// Returns results of a benchmark `x` against `a|b`, with a row of each verdict.
    pub fn example() -> Taken {
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

    #[test]
    fn quick_runs_and_changed_trees_are_no_results() {
        assert!(example().is_result().is_ok());
        let mut quick = example();
        quick.identity.quick = true;
        assert!(quick.is_result().is_err());
        let mut changed = example();
        changed.identity.commit += "+";
        assert!(changed.is_result().is_err());
    }
}
