//! Moving pages between the nodes of a guest that has two, as in tables 4 to 6 of the vTMM paper:
//! by several threads against one call, and what that costs the program that uses the pages.
//!
//! The guest is translated, and its nodes are equally fast, so figures can only be compared with
//! others of the same run.

use std::collections::BTreeMap;

use vmtest::{Guest, Host};

use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::session::Session;

/// Kernel of the guest. A kernel before 6.3 flushes TLBs for each page that it moves, and threads
/// that move pages wait for each other.
const KERNEL: &str = "6.12";
const MIB: u64 = 128;
/// Goal: this many times as fast as one thread.
const SPEED_GOAL: f64 = 2.0;

/// Measures table 4.
///
/// # Errors
/// None. Failures panic, as in tests.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("vtmm-tab4");
    let guest = Guest::debian(KERNEL).memory("512M").slow_node("512M");
    let vm = Host::new().qemu(guest);
    let rounds = if quick { 1 } else { 5 };
    // One call at a time: a guest must answer before it is taken for dead.
    let each = (0..rounds).map(|_| vm.guest(&format!("sh /bin/tiers bench {MIB}M 1")));
    let answer = each.collect::<Vec<_>>().join("\n");
    let figures = figures(&answer);
    let of = |name: &str| figures.get(name).cloned().unwrap_or_default();
    report.note(format!(
        "A guest with Linux {KERNEL} and two translated processors, its second node without any: {MIB} MiB of a memfd \
         that two processes have mapped go there and back, by {} threads in batches, and by one \
         thread in one call. Both processors are the workload's and the threads' alike.",
        of("workers").median()
    ));
    let row = |what: &str, unit, name: &str| {
        let other = of(&format!("serial-{name}"));
        Row::new(what, unit, &of(&format!("parallel-{name}"))).against("one thread", &other)
    };
    report.row(row("pages at rest", "MiB/s", "rest-mib-s").at_least(SPEED_GOAL));
    report.row(row("pages at work", "MiB/s", "work-mib-s"));
    report.row(row("pages at work that were moved", "%", "work-moved-percent"));
    report.row(row("speed of the workload meanwhile", "% of alone", "work-speed-percent"));
    report.row(row("its time lost by it", "ms", "work-lost-ms"));
    report.row(row("its faults meanwhile", "% of pages moved", "work-faults-percent"));
    for (what, name) in [
        ("faults after the move, pages at rest", "parallel-rest-faults"),
        ("faults after the move, pages at work", "parallel-work-faults-after"),
    ] {
        report.row(Row::new(what, "a round", &of(name)).no_more_than(0.0));
    }
    Ok(report)
}

/// Parses lines of `NAME FIGURE`.
fn figures(answer: &str) -> BTreeMap<String, Rounds> {
    let mut figures: BTreeMap<String, Rounds> = BTreeMap::new();
    for line in answer.lines() {
        if let Some((name, figure)) = line.split_once(' ')
            && let Ok(figure) = figure.trim().parse()
        {
            figures.entry(name.to_owned()).or_default().push(figure);
        }
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_gathered_by_name() {
        let found = figures("a 1\nb 2.5\na 3\nnoise\nc x\n");
        assert_eq!(found.len(), 2);
        assert_eq!((found["a"].median(), found["b"].median()), (2.0, 2.5));
    }
}
