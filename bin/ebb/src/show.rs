//! Answers as people read them: aligned, sizes with units, on one screen.

mod brief;
mod config;
mod job;
mod limit;
mod list;
mod observed;
mod pilot;
mod reach;
mod reclaim;
mod report;
mod size;
mod tier;
mod vm;

use std::fmt::Display;

use ebb_api::{FaultTimes, State};
use ebb_units::Bytes;

use crate::interval::readable;

pub use brief::brief;
pub use config::config;
pub use job::{begun, doing, ended, jobs};
pub use limit::{evicted, limit};
pub use list::list;
pub use observed::{discovered, observed};
pub use pilot::{pilot, simulated};
pub use reclaim::{auto, reclaimed};
pub use report::report;
pub use size::{resized, resizing};
pub use tier::{calibration, monitoring, pool, tier};
pub use vm::{detached, detaching, started, status};

/// Returns one labelled line. Control characters are replaced, because some of the text is the
/// guest's own.
pub fn row(label: &str, value: impl Display) -> String {
    let value = value.to_string().replace(char::is_control, "?");
    format!("  {label:<14}{value}\n")
}

/// Returns the word for what Ebb does with a VM. JSON keeps the names of earlier releases.
fn state_word(state: State) -> &'static str {
    match state {
        State::Managed => "managed",
        State::Recovering => "being recovered",
        State::NotRecovered => "not recovered",
    }
}

/// Returns a size, or `unknown`.
fn known(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".into(), |bytes| Bytes(bytes).to_string())
}

/// Returns a limit, or `none`.
fn limit_or_none(bytes: Option<u64>) -> String {
    bytes.map_or("none".into(), |bytes| Bytes(bytes).to_string())
}

/// Returns a size, and the part of `of_bytes` that it is.
pub fn with_percent(bytes: u64, of_bytes: u64) -> String {
    let percent = u128::from(bytes) * 100 / u128::from(of_bytes.max(1));
    format!("{:<12}{percent} %", Bytes(bytes).to_string())
}

/// Returns the median, and the time that one in a hundred exceeds.
fn times(times: FaultTimes) -> String {
    match times {
        FaultTimes { p50: Some(p50), p99: Some(p99) } => {
            format!("p50 {}, p99 {}", readable(p50), readable(p99))
        }
        _ => "none yet".into(),
    }
}

/// Returns aligned columns, two blanks apart.
fn table<const COLUMNS: usize>(lines: &[[String; COLUMNS]]) -> String {
    let widths: [usize; COLUMNS] =
        std::array::from_fn(|at| lines.iter().map(|line| line[at].len()).max().unwrap_or(0));
    let text = |line: &[String; COLUMNS]| {
        let cells = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    lines.iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let lines = [["a", "long"], ["wide", "b"]].map(|line| line.map(String::from));
        assert_eq!(table(&lines), "a     long\nwide  b\n");
    }

    #[test]
    fn a_guest_cannot_write_to_the_terminal() {
        assert_eq!(row("kernel", "6.1\x1b[2J\nmore"), "  kernel        6.1?[2J?more\n");
    }

    #[test]
    fn a_part_survives_empty_and_huge_totals() {
        assert_eq!(with_percent(0, 0), "0 B         0 %");
        assert_eq!(with_percent(1 << 60, 1 << 60).split_whitespace().last(), Some("%"));
    }
}
