//! How long a guest waits for its evicted memory while a process of Ebb's ends.

use std::time::Duration;

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use vmtest::{Guest, Host, Vm, until};

use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;

/// VMs whose processes are killed in turn.
const VMS: usize = 3;
/// A process that is killed sooner after the one before is followed by the next one only after a
/// pause.
const APART: Duration = Duration::from_secs(31);
/// How long a guest is watched while nothing happens, and after an end.
const WATCHED: Duration = Duration::from_secs(3);
/// Most milliseconds that a guest waits.
const GOAL_MS: f64 = 100.0;

/// Adds the rows. A guest reads and writes its memory at random, of which a part is always evicted.
///
/// # Errors
/// A process cannot be killed.
pub fn rows(report: &mut Report, rounds: usize) -> anyhow::Result<()> {
    let host = Host::new();
    let vms: Vec<Vm> = (0..VMS).map(|_| limited(&host)).collect();
    let (mut calm, mut process, mut daemon) =
        (Rounds::default(), Rounds::default(), Rounds::default());
    for _ in 0..rounds {
        std::thread::sleep(APART - WATCHED * VMS as u32);
        for vm in &vms {
            calm.push(longest_ms(vm, || Ok(()))?);
            let server = host.server(vm.name()).context("the VM is not served")?;
            process.push(longest_ms(vm, || {
                kill(server)?;
                until("the next process", || host.server(vm.name()).filter(|next| *next != server));
                Ok(())
            })?);
        }
        daemon.push(longest_ms(&vms[0], || {
            host.kill_daemon();
            host.start();
            Ok(())
        })?);
    }
    for vm in &vms {
        let told = vm.guest("accessstop a");
        anyhow::ensure!(told.ends_with(" 0"), "wrong bytes: {told}");
    }
    report.note(format!(
        "A guest's longest wait is that of 256 accesses of memory of which a part is evicted. {VMS} \
         guests run at once. Each figure is the greatest of all rounds."
    ));
    let greatest = |rounds: &Rounds| [rounds.max()].into_iter().collect::<Rounds>();
    let what = "a guest's longest wait";
    report.row(Row::new(format!("{what}: nothing happens"), "ms", &greatest(&calm)));
    let row = Row::new(format!("{what}: kill -9 of its process"), "ms", &greatest(&process));
    // No round is above it, so this one figure decides.
    report.row(row.no_more_than(GOAL_MS).exact());
    let row = Row::new(format!("{what}: ebbd ends and starts"), "ms", &greatest(&daemon));
    report.row(row.against("nothing happens", &greatest(&calm)));
    Ok(())
}

/// A VM that always has something evicted, and whose guest uses all of its memory.
fn limited(host: &Host) -> Vm {
    let vm = host.run(Guest::debian("6.1-cloud").memory("256M").backing("small").cpus(1));
    vm.guest("access a 100M hot 0 25600");
    vm.ebb("limit 120M").ok();
    vm.guest("accesson a 100000");
    vm
}

/// Returns the longest time of some accesses while something happens, and after it.
fn longest_ms(vm: &Vm, happens: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    vm.guest("accesslongest a");
    happens()?;
    std::thread::sleep(WATCHED);
    vm.guest("accesson a 1024");
    let us: f64 = vm.guest("accesslongest a").trim().parse()?;
    Ok(us / 1000.0)
}

fn kill(pid: i32) -> anyhow::Result<()> {
    Ok(kill_process(Pid::from_raw(pid).context("no process")?, Signal::KILL)?)
}
