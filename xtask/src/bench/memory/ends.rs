//! How long a guest waits for its evicted memory while a process of Ebb's ends.

use std::time::{Duration, Instant};

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

/// Adds the rows. One guest at a time reads and writes its memory at random, of which a part is
/// always evicted. The processes of three VMs are killed in turn.
///
/// # Errors
/// A process cannot be killed, or a guest finds wrong bytes.
pub fn rows(report: &mut Report, rounds: usize) -> anyhow::Result<()> {
    let host = Host::new();
    let mut vms: Vec<Limited> = (0..VMS).map(|_| Limited::start(&host)).collect();
    let (mut calm, mut process, mut daemon) =
        (Rounds::default(), Rounds::default(), Rounds::default());
    for _ in 0..rounds {
        for limited in &mut vms {
            let pause =
                limited.killed.map_or(Duration::ZERO, |at| APART.saturating_sub(at.elapsed()));
            std::thread::sleep(pause);
            limited.use_memory(|vm| {
                calm.push(longest_ms(vm, || Ok(()))?);
                process.push(longest_ms(vm, || kill_process_of(&host, vm))?);
                Ok(())
            })?;
            limited.killed = Some(Instant::now());
        }
        vms[0].use_memory(|vm| {
            daemon.push(longest_ms(vm, || {
                host.kill_daemon();
                host.start();
                Ok(())
            })?);
            Ok(())
        })?;
    }
    report.note(
        "A guest's longest wait is that of 256 accesses of memory of which a part is evicted. \
         Nothing else runs meanwhile. Each figure is the greatest of all rounds.",
    );
    let greatest = |rounds: &Rounds| [rounds.max()].into_iter().collect::<Rounds>();
    let what = "a guest's longest wait";
    report.row(Row::new(format!("{what}: nothing happens"), "ms", &greatest(&calm)));
    let row = Row::new(format!("{what}: kill -9 of its process"), "ms", &greatest(&process));
    // No round is above it, so this one figure decides.
    report.row(row.no_more_than(GOAL_MS).exact());
    let row = Row::new(format!("{what}: ebbd ends and starts"), "ms", &greatest(&daemon));
    report.row(row.against("nothing happens", &greatest(&calm)));
    report.row(Row::new(format!("{what}: kill -9 of its process, median"), "ms", &process));
    Ok(())
}

/// A VM whose limit is below what its guest uses while it uses its memory.
struct Limited {
    vm: Vm,
    /// When its process was last killed.
    killed: Option<Instant>,
}

impl Limited {
    fn start(host: &Host) -> Limited {
        let vm = host.run(Guest::debian("6.1-cloud").memory("256M").backing("small").cpus(1));
        Limited { vm, killed: None }
    }

    /// Has the guest read and write its memory meanwhile, and checks every byte at the end.
    fn use_memory(
        &self,
        mut meanwhile: impl FnMut(&Vm) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.vm.guest("access a 100M hot 0 25600");
        self.vm.ebb("limit 120M").ok();
        self.vm.guest("accesson a 100000");
        meanwhile(&self.vm)?;
        let stopped = self.vm.guest("accessstop a");
        anyhow::ensure!(stopped.ends_with(" 0"), "wrong bytes: {stopped}");
        Ok(())
    }
}

/// Kills the VM's process, and waits for the next one.
fn kill_process_of(host: &Host, vm: &Vm) -> anyhow::Result<()> {
    let server = host.server(vm.name()).context("the VM is not served")?;
    kill_process(Pid::from_raw(server).context("no process")?, Signal::KILL)?;
    until("the next process", || host.server(vm.name()).filter(|next| *next != server));
    Ok(())
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
