//! Shows VMs under the pilot while they run: a table that is redrawn in place, or lines of text.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::Duration;

use ebb_api::PilotDecision;

use super::view::{BOLD, FAINT, RESET, RESIDENT, is_picture};

const BAR_COLUMNS: u64 = 32;
/// Longest line of a decision.
const DECISION_COLUMNS: usize = 76;
const LINE_EVERY: Duration = Duration::from_secs(2);
const MIB: u64 = 1 << 20;

/// A VM.
pub struct Line {
    pub name: String,
    pub class: &'static str,
    /// What its guest does.
    pub says: &'static str,
    pub memory_bytes: u64,
    pub resident_bytes: u64,
    /// The limit that the pilot has set.
    pub limit_bytes: Option<u64>,
}

/// Where and how VMs are shown.
pub enum Table {
    /// In place, with the number of lines drawn so far.
    Screen(usize),
    /// Lines of text, with the time when the next ones are due, and the last decision shown.
    Lines(Duration, String),
}

impl Table {
    /// Returns a table in place if standard output is a terminal that can be drawn on, else lines.
    pub fn new() -> Table {
        match is_picture() {
            true => Table::Screen(0),
            false => Table::Lines(Duration::ZERO, String::new()),
        }
    }

    /// Shows the VMs. The latest decision comes first.
    pub fn show(&mut self, time: Duration, stage: &str, lines: &[Line], decisions: &[String]) {
        let text = match self {
            Table::Screen(count) => {
                let picture = picture(time, stage, lines, decisions);
                let up = if *count > 0 { format!("\x1b[{count}A\r\x1b[J") } else { String::new() };
                *count = picture.lines().count();
                up + &picture
            }
            Table::Lines(due, _) if time < *due => return,
            Table::Lines(due, last) => {
                *due = time + LINE_EVERY;
                plain(time, lines, decisions, last)
            }
        };
        // A closed pipe must not end the demo before its VMs are taken down.
        let mut out = io::stdout().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    /// Leaves what was shown.
    pub fn end(&mut self) {
        *self = Table::new();
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes / MIB)
}

fn picture(time: Duration, stage: &str, lines: &[Line], decisions: &[String]) -> String {
    let mut text = format!(
        "{BOLD}under the pilot{RESET} {:>5.1} s   {BOLD}{stage}{RESET}\n\n",
        time.as_secs_f64()
    );
    for line in lines {
        let filled = line.resident_bytes.min(line.memory_bytes) * BAR_COLUMNS;
        let filled = (filled / line.memory_bytes.max(1)) as usize;
        let bar = ("━".repeat(filled), "─".repeat(BAR_COLUMNS as usize - filled));
        let limit =
            line.limit_bytes.map_or("no limit".into(), |bytes| format!("limit {}", mib(bytes)));
        let _ = write!(
            text,
            "  {:<5} {:<8}{RESIDENT}{}{FAINT}{}{RESET} {:>7}, {limit}\n  {FAINT}{:14}{}{RESET}\n",
            line.name,
            line.class,
            bar.0,
            bar.1,
            mib(line.resident_bytes),
            "",
            line.says,
        );
    }
    text.push('\n');
    for decision in decisions {
        let _ = writeln!(text, "  {}", short(decision));
    }
    text
}

/// Returns a line with what is resident, and the decisions since the last time.
fn plain(time: Duration, lines: &[Line], decisions: &[String], last: &mut String) -> String {
    let vms = lines.iter().map(|line| format!("{} {}", line.name, mib(line.resident_bytes)));
    let vms = vms.collect::<Vec<_>>().join("  ");
    let mut text = format!("under the pilot {:5.1} s  resident: {vms}\n", time.as_secs_f64());
    let new: Vec<&String> = decisions.iter().take_while(|decision| *decision != last).collect();
    for decision in new.into_iter().rev() {
        let _ = writeln!(text, "  {decision}");
    }
    if let Some(first) = decisions.first() {
        last.clone_from(first);
    }
    text
}

fn short(text: &str) -> String {
    let count = text.chars().count();
    if count <= DECISION_COLUMNS {
        return text.to_owned();
    }
    text.chars().take(DECISION_COLUMNS - 3).chain("...".chars()).collect()
}

/// Returns a decision in one line.
pub fn decision(decision: &PilotDecision) -> String {
    let PilotDecision { vm, action, why, .. } = decision;
    format!("{}: {action} ({why})", vm.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(resident_bytes: u64) -> Line {
        Line {
            name: "vm0".into(),
            class: "batch",
            says: "rests",
            memory_bytes: 400 * MIB,
            resident_bytes,
            limit_bytes: Some(300 * MIB),
        }
    }

    #[test]
    fn a_picture_has_all_vms_and_short_decisions() {
        let long = "x".repeat(200);
        let lines = [line(100 * MIB), line(u64::MAX >> 8)];
        let text = picture(Duration::ZERO, "now", &lines, std::slice::from_ref(&long));
        assert_eq!(text.matches("limit 300 MiB").count(), 2, "{text}");
        let bars = text.chars().filter(|c| matches!(c, '━' | '─')).count() as u64;
        assert_eq!(bars, 2 * BAR_COLUMNS);
        assert!(text.contains("...") && !text.contains(&long));
    }

    #[test]
    fn a_decision_is_told_once() {
        let mut last = String::new();
        let mut told = |decisions: &[&str]| {
            let decisions: Vec<String> = decisions.iter().map(|text| (*text).to_owned()).collect();
            plain(Duration::ZERO, &[line(MIB)], &decisions, &mut last).lines().count()
        };
        assert_eq!(told(&["a"]), 2);
        assert_eq!(told(&["c", "b", "a"]), 3);
        assert_eq!(told(&["c", "b", "a"]), 1);
    }
}
