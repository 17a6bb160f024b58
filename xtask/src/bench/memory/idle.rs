//! The memory of Ebb's processes while guests do nothing.

use vmtest::Host;

use super::kib;
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;

/// VMs that run together: their processes share the program's pages.
const VMS: usize = 4;
/// Most KiB of an idle VM's process.
const GOAL_KIB: f64 = 2048.0;

/// Adds the rows. The guests have not begun, as they have not where an operator starts many at once.
///
/// # Errors
/// `/proc` does not tell.
pub fn rows(report: &mut Report, rounds: usize) -> anyhow::Result<()> {
    for mib in [64, 4096] {
        let (mut daemon, mut process) = (Rounds::default(), Rounds::default());
        for _ in 0..rounds {
            let host = Host::new();
            for vm in 0..VMS {
                host.ebb(&format!("run --name vm{vm} --memory {mib}M -- -S")).ok();
            }
            let of_daemon = host.daemon().ok_or_else(|| anyhow::anyhow!("no daemon runs"))?;
            daemon.push(own_kib(of_daemon)?);
            let servers = host.servers();
            anyhow::ensure!(servers.len() == VMS, "{} of {VMS} VMs are served", servers.len());
            let all: f64 = servers.iter().map(|pid| own_kib(*pid)).sum::<anyhow::Result<f64>>()?;
            process.push(all / VMS as f64);
        }
        let what = |what: &str| format!("{VMS} idle VMs of {mib} MiB: {what}");
        report.row(Row::new(what("the daemon, PSS"), "KiB", &daemon));
        let row = Row::new(what("a VM's process, PSS"), "KiB", &process);
        report.row(row.no_more_than(GOAL_KIB));
    }
    Ok(())
}

/// Memory of a process and its part of what it shares with others, without the guest's memory.
fn own_kib(pid: i32) -> anyhow::Result<f64> {
    Ok(kib(pid, "smaps_rollup", "Pss_Anon")? + kib(pid, "smaps_rollup", "Pss_File")?)
}
