//! Shows a round while it runs: a picture that is redrawn in place, or a line a second.

use std::env;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use ebb_units::Bytes;
use rustix::termios::tcgetwinsize;

use super::curve::gib;
use super::round::{Record, Rounds};
use super::workload;

const CHART_COLUMNS: usize = 66;
const CHART_ROWS: u64 = 12;
const BAR_COLUMNS: u64 = 40;
/// Columns and rows that the picture needs.
const SCREEN: (u16, u16) = (80, 26);
const LINE_EVERY: Duration = Duration::from_secs(1);

const USED: &str = "\x1b[38;5;33m";
pub const RESIDENT: &str = "\x1b[38;5;214m";
const RESIDENT_BEHIND: &str = "\x1b[48;5;214m";
const NON_RESIDENT: &str = "\x1b[38;5;71m";
pub const FAINT: &str = "\x1b[38;5;245m";
pub const BOLD: &str = "\x1b[1m";
pub const RESET: &str = "\x1b[0m";
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Where and how a round is shown.
pub enum View {
    /// A picture in a terminal, with the number of lines drawn so far.
    Screen(usize),
    /// Lines of text, with the time when the next one is due.
    Lines(Duration),
}

impl View {
    /// Returns a picture if standard output is a terminal that can be drawn on, else lines.
    pub fn new() -> View {
        if is_picture() { View::Screen(0) } else { View::Lines(Duration::ZERO) }
    }

    /// Shows the state of the round.
    pub fn show(&mut self, record: &Record) {
        if record.guest.used.is_empty() {
            return;
        }
        let text = match self {
            View::Screen(_) if !fits() => return,
            View::Screen(lines) => {
                let picture = picture(record);
                let up = if *lines > 0 { format!("\x1b[{lines}A\r") } else { String::new() };
                *lines = picture.lines().count();
                up + &picture.replace('\n', "\x1b[K\n")
            }
            View::Lines(due) if record.time < *due => return,
            View::Lines(due) => {
                *due = record.time + LINE_EVERY;
                line(record)
            }
        };
        // A closed pipe must not end the round before its VM is taken down.
        let mut out = io::stdout().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    /// Leaves what was shown. The next round is shown below it.
    pub fn end(&mut self) {
        *self = match self {
            View::Screen(_) => View::Screen(0),
            View::Lines(_) => View::Lines(Duration::ZERO),
        };
    }
}

/// Whether standard output is a terminal that can be drawn on, and large enough.
pub fn is_picture() -> bool {
    let is_dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
    let colourless = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    io::stdout().is_terminal() && !is_dumb && !colourless && fits()
}

fn fits() -> bool {
    tcgetwinsize(io::stdout()).is_ok_and(|size| size.ws_col >= SCREEN.0 && size.ws_row >= SCREEN.1)
}

/// The last measurement of each kind.
struct Now {
    stage: &'static str,
    used_bytes: u64,
    resident_bytes: u64,
}

fn now(record: &Record) -> Now {
    let last = |points: &[(Duration, u64)]| points.last().map_or(0, |point| point.1);
    Now {
        stage: record.guest.stages.last().map_or("", |stage| stage.1),
        used_bytes: last(&record.guest.used),
        resident_bytes: last(&record.resident),
    }
}

fn line(record: &Record) -> String {
    let Now { stage, used_bytes, resident_bytes } = now(record);
    let ebb = match &record.ebb {
        Some(rounds) => {
            format!("  non-resident {:4.2}  {}", gib(rounds.status.emptied_bytes), last(rounds))
        }
        None => String::new(),
    };
    format!(
        "{:<11} {:5.1} s  {stage:<13}  GiB: guest uses {:4.2}  resident {:4.2}  limit {:4.2}{ebb}\n",
        record.keeper.label(),
        record.time.as_secs_f64(),
        gib(used_bytes),
        gib(resident_bytes),
        gib(record.vm.memory_bytes),
    )
}

fn last(rounds: &Rounds) -> String {
    let Some((at, report)) = &rounds.last else {
        return "Ebb: nothing reclaimed yet".into();
    };
    let (size, ms) = (Bytes(report.bytes), report.duration_ns as f64 / 1e6);
    format!("Ebb: reclaimed {size} in {ms:.1} ms at {:.1} s", at.as_secs_f64())
}

fn picture(record: &Record) -> String {
    let now = now(record);
    let memory_bytes = record.vm.memory_bytes;
    let mut text = format!(
        "{BOLD}{:<14}{RESET}{:>5.1} s   the guest's work: {BOLD}{}{RESET}\n\n",
        record.keeper.label(),
        record.time.as_secs_f64(),
        now.stage,
    );
    text += &chart(record);
    let mut bar = |name: &str, colour, bytes| text += &bar(name, colour, bytes, memory_bytes);
    bar("guest uses", USED, now.used_bytes);
    bar("resident", RESIDENT, now.resident_bytes);
    if let Some(rounds) = &record.ebb {
        bar("non-resident", NON_RESIDENT, rounds.status.emptied_bytes);
    }
    bar("limit", FAINT, memory_bytes);
    text += &match &record.ebb {
        Some(rounds) => rounds_text(rounds),
        None => format!("  {FAINT}Nobody reclaims what the guest has freed.{RESET}\n"),
    };
    text
}

fn rounds_text(rounds: &Rounds) -> String {
    let status = &rounds.status;
    let free = status.guest_free_bytes.map_or("unknown".into(), |bytes| Bytes(bytes).to_string());
    format!(
        "  {}; {} in all\n  Free in the guest, as Ebb reads it from outside: {free}\n",
        last(rounds),
        Bytes(status.reclaimed_total_bytes),
    )
}

fn bar(name: &str, colour: &str, bytes: u64, of_bytes: u64) -> String {
    let filled = (bytes.min(of_bytes) * BAR_COLUMNS / of_bytes.max(1)) as usize;
    let (full, empty) = ("━".repeat(filled), "─".repeat(BAR_COLUMNS as usize - filled));
    format!("  {name:<14}{colour}{full}{FAINT}{empty}{RESET} {:5.2} GiB\n", gib(bytes))
}

/// Draws memory over time: below, what the guest uses; above it, what it has freed and the host
/// still gives.
fn chart(record: &Record) -> String {
    let columns = columns(record);
    let top_gib = gib(record.vm.memory_bytes);
    let mut text = String::new();
    for row in (0..CHART_ROWS).rev() {
        let level = (row + 1) as f64 / CHART_ROWS as f64 * top_gib;
        let label = if (row + 1) % 3 == 0 { format!("{level:.1} GiB") } else { String::new() };
        let _ = write!(text, "{FAINT}{label:>9} │{RESET}");
        text.extend(columns.iter().map(|&(used, resident)| cell(row, used, resident)));
        text.push('\n');
    }
    let axis = "─".repeat(CHART_COLUMNS);
    let key = format!(
        "{USED}█{RESET} the guest uses it  {RESIDENT}█{RESET} the guest has freed it, the host still gives it"
    );
    text + &format!("{FAINT}{:>9} └{axis}{RESET}\n{:>11}{key}\n\n", "0", "")
}

/// Returns used and resident memory of each column, in eighths of a row. Once not all columns fit,
/// the newest is at the right end.
fn columns(record: &Record) -> Vec<(u64, u64)> {
    let column = workload::lasts() / (CHART_COLUMNS - 2) as u32;
    let eighths = |bytes: u64| {
        let whole = u128::from(record.vm.memory_bytes.max(1));
        (u128::from(bytes) * u128::from(CHART_ROWS) * 8 / whole) as u64
    };
    let count = (record.time.as_nanos() / column.as_nanos().max(1)) as usize + 1;
    let first = count.saturating_sub(CHART_COLUMNS);
    let level = |points: &[(Duration, u64)], end: Duration| {
        let until = points.partition_point(|point| point.0 < end);
        until.checked_sub(1).map_or(0, |last| eighths(points[last].1))
    };
    (first..count)
        .map(|index| column * (index as u32 + 1))
        .map(|end| (level(&record.guest.used, end), level(&record.resident, end)))
        .collect()
}

fn cell(row: u64, used: u64, resident: u64) -> String {
    let part = |eighths: u64| eighths.saturating_sub(row * 8).min(8) as usize;
    let (used, resident) = (part(used), part(resident));
    match (used, resident) {
        (0, 0) => " ".into(),
        (0, _) => format!("{RESIDENT}{}{RESET}", EIGHTHS[resident]),
        // A character has only two colours, so the space above shows what most of it is.
        (1..8, _) if resident * 2 > used + 8 => {
            format!("{USED}{RESIDENT_BEHIND}{}{RESET}", EIGHTHS[used])
        }
        _ => format!("{USED}{}{RESET}", EIGHTHS[used]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_shows_its_own_eight_eighths() {
        assert_eq!(cell(0, 0, 0), " ");
        assert_eq!(cell(1, 8, 11), format!("{RESIDENT}▃{RESET}"));
        assert_eq!(cell(1, 12, 40), format!("{USED}{RESIDENT_BEHIND}▄{RESET}"));
        assert_eq!(cell(1, 12, 12), format!("{USED}▄{RESET}"));
        assert_eq!(cell(0, 40, 40), format!("{USED}█{RESET}"));
    }

    #[test]
    fn bars_stay_within_their_width() {
        for bytes in [0, 1, 1 << 30, 2 << 30, u64::MAX >> 10] {
            let text = bar("x", USED, bytes, 2 << 30);
            let count = text.chars().filter(|c| matches!(c, '━' | '─')).count();
            assert_eq!(count as u64, BAR_COLUMNS, "{bytes}");
        }
    }
}
