//! What a soak has done and found so far.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use serde::Serialize;

/// Counts by name.
pub type Counts = BTreeMap<String, u64>;

/// Most failures that are kept in words.
const FAILURES_MOST: usize = 20;
/// Longest word of a failure, in bytes.
const FAILURE_BYTES_MOST: usize = 4000;

/// What a soak has done and found.
#[derive(Clone, Default, Debug, Serialize)]
pub struct Tally {
    /// The seed of all choices.
    pub seed: u64,
    /// Time since the first VM was started, in seconds.
    pub seconds: u64,
    /// Requests to Ebb, by kind.
    pub requests: Counts,
    /// Requests that were refused or failed, by the code of the API error. `no daemon`: nobody
    /// answered, since the daemon was killed.
    pub refusals: Counts,
    /// One sentence of each code.
    pub refused_as: BTreeMap<String, String>,
    /// What guests did, by kind.
    pub work: Counts,
    /// What guests could not do for want of memory or room.
    pub without_room: u64,
    /// Processes that were killed or stopped, by kind.
    pub kills: Counts,
    /// Errors of the swap disk and the run directory, by kind.
    pub disk_errors: Counts,
    /// VMs that were started, those included that took the place of a killed one.
    pub vms: u64,
    /// Bytes that guests have compared with what they had written.
    pub checked_bytes: u64,
    /// Rounds of loads whose every byte was compared.
    pub checked_rounds: u64,
    /// Bytes that were not what the guest had written.
    pub wrong_bytes: u64,
    /// The longest time in which a guest's 256 accesses to its memory were not done, in
    /// milliseconds.
    pub longest_stall_ms: u64,
    /// The longest time that Ebb took for an answer, in milliseconds, and of what.
    pub longest_answer_ms: u64,
    /// What took so long.
    pub longest_answer: String,
    /// What must not happen, in words; wrong bytes among them.
    pub failures: Vec<String>,
}

impl Tally {
    /// Notes something that must not happen.
    pub fn fail(&mut self, why: impl Into<String>) {
        if self.failures.len() < FAILURES_MOST {
            let mut why = why.into();
            let end = (0..=FAILURE_BYTES_MOST.min(why.len())).rev();
            let end = end.into_iter().find(|&end| why.is_char_boundary(end)).unwrap_or(0);
            why.truncate(end);
            self.failures.push(why);
        }
    }

    /// Notes an answer of Ebb's.
    pub fn answered(&mut self, what: &str, ms: u64) {
        count(&mut self.requests, what);
        if ms > self.longest_answer_ms {
            (self.longest_answer_ms, self.longest_answer) = (ms, what.to_owned());
        }
    }

    /// Notes a refusal.
    pub fn refused(&mut self, code: &str, why: &str) {
        count(&mut self.refusals, code);
        self.refused_as.entry(code.to_owned()).or_insert_with(|| why.to_owned());
    }

    /// Whether nothing happened that must not happen.
    pub fn is_good(&self) -> bool {
        self.failures.is_empty() && self.wrong_bytes == 0
    }
}

/// Counts one more.
pub fn count(counts: &mut Counts, what: &str) {
    *counts.entry(what.to_owned()).or_default() += 1;
}

fn sum(counts: &Counts) -> u64 {
    counts.values().sum()
}

fn list(counts: &Counts) -> String {
    let words: Vec<String> = counts.iter().map(|(what, count)| format!("{what} {count}")).collect();
    if words.is_empty() { "none".into() } else { words.join(", ") }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = self.checked_bytes as f64 / f64::from(1 << 30);
        let mut text = format!(
            "{} min {} s, seed {}, {} VMs\n",
            self.seconds / 60,
            self.seconds % 60,
            self.seed,
            self.vms
        );
        let mut line = |what: &str, words: String| {
            let _ = writeln!(text, "  {what:<13} {words}");
        };
        line("requests", format!("{}: {}", sum(&self.requests), list(&self.requests)));
        line("refusals", format!("{}: {}", sum(&self.refusals), list(&self.refusals)));
        line("guests", list(&self.work));
        line("kills", format!("{}: {}", sum(&self.kills), list(&self.kills)));
        line("disk errors", format!("{}: {}", sum(&self.disk_errors), list(&self.disk_errors)));
        line("checked", format!("{gib:.1} GiB, and {} rounds of loads", self.checked_rounds));
        line("wrong bytes", self.wrong_bytes.to_string());
        line(
            "longest",
            format!(
                "stall of a guest {} ms, answer of Ebb {} ms ({})",
                self.longest_stall_ms, self.longest_answer_ms, self.longest_answer
            ),
        );
        self.failures.iter().for_each(|why| line("FAILED", why.clone()));
        f.write_str(text.trim_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_tells_all_counts() {
        let mut tally = Tally { seed: 7, seconds: 61, checked_bytes: 3 << 29, ..Tally::default() };
        tally.answered("limit", 12);
        tally.answered("limit", 5);
        tally.refused("not_allowed", "it is smaller than that");
        count(&mut tally.kills, "daemon");
        assert!(tally.is_good());
        let text = tally.to_string();
        for part in [
            "1 min 1 s, seed 7",
            "requests      2: limit 2",
            "1: not_allowed 1",
            "1: daemon 1",
            "1.5 GiB",
            "12 ms (limit)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn failures_are_bounded() {
        let mut tally = Tally::default();
        (0..100).for_each(|_| tally.fail("é".repeat(10_000)));
        assert!(!tally.is_good() && tally.failures.len() == FAILURES_MOST);
        assert!(tally.failures.iter().all(|why| why.len() <= FAILURE_BYTES_MOST));
    }
}
