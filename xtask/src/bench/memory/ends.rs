//! How long a guest waits for its evicted memory while a process of Ebb's ends.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use vmtest::{AccessTimes, Guest, Host, Vm, assets, until};

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
/// How long there is no `ebbd` during an upgrade. A fault that needed one would wait for 100 ms or
/// longer, unless it came in the last tenth of that time.
const AWAY: Duration = Duration::from_secs(1);
/// Most milliseconds that a guest waits.
const GOAL_MS: f64 = 100.0;

/// Adds the rows. One guest at a time reads and writes its memory at random, of which a part is
/// always evicted. The processes of three VMs are killed in turn.
///
/// # Errors
/// A process cannot be killed, `ebbd` cannot be replaced, or a guest finds wrong bytes.
pub fn rows(report: &mut Report, rounds: usize) -> anyhow::Result<()> {
    let host = Host::new();
    let mut programs = Programs::new(&host)?;
    let mut vms: Vec<Limited> = (0..VMS).map(|_| Limited::start(&host)).collect();
    let mut figures = Figures::default();
    for _ in 0..rounds {
        for limited in &mut vms {
            let pause =
                limited.killed.map_or(Duration::ZERO, |at| APART.saturating_sub(at.elapsed()));
            thread::sleep(pause);
            limited.use_memory(|vm| {
                figures.calm.push(longest_ms(times(vm, || Ok(()))?));
                figures.process.push(longest_ms(times(vm, || kill_process_of(&host, vm))?));
                Ok(())
            })?;
            limited.killed = Some(Instant::now());
        }
        vms[0].use_memory(|vm| {
            let times = times(vm, || programs.upgrade(&host))?;
            figures.daemon.push(longest_ms(times));
            figures.unserved += times.slow;
            Ok(())
        })?;
    }
    figures.rows(report);
    Ok(())
}

#[derive(Default)]
struct Figures {
    /// The longest time of each round.
    calm: Rounds,
    process: Rounds,
    daemon: Rounds,
    /// Accesses in all rounds that took 100 ms or longer while `ebbd` was replaced, 256 at a time.
    unserved: u64,
}

impl Figures {
    fn rows(&self, report: &mut Report) {
        report.note(
            "A guest's longest wait is that of 256 accesses of memory of which a part is evicted. \
             Nothing else runs meanwhile. Each figure is the greatest of all rounds.",
        );
        let greatest = |rounds: &Rounds| [rounds.max()].into_iter().collect::<Rounds>();
        let what = "a guest's longest wait";
        let calm = greatest(&self.calm);
        report.row(Row::new(format!("{what}: nothing happens"), "ms", &calm));
        let ends = format!("{what}: kill -9 of its process");
        let count = self.process.figures().len();
        let most = format!("{ends}, p99 at most (greatest of {count})");
        // No round is above it, so this one figure decides.
        let row = Row::new(most, "ms", &greatest(&self.process));
        report.row(row.no_more_than(GOAL_MS).exact());
        report.row(Row::new(format!("{ends}, median"), "ms", &self.process));
        let row = Row::new(format!("{what}: ebbd is upgraded"), "ms", &greatest(&self.daemon));
        report.row(row.against("nothing happens", &calm));
        let unserved: Rounds = [self.unserved as f64].into_iter().collect();
        let what = "faults not served within 100 ms while ebbd is upgraded, at most";
        report.row(Row::new(what, "", &unserved).no_more_than(0.0).exact());
    }
}

/// The programs at two places: an upgrade goes from one to the other.
struct Programs {
    running: PathBuf,
    next: PathBuf,
}

impl Programs {
    fn new(host: &Host) -> anyhow::Result<Programs> {
        let (running, next) = (assets::program_directory(), host.directory().join("upgraded"));
        fs::create_dir(&next)?;
        for program in ["ebb", "ebbd"] {
            fs::copy(running.join(program), next.join(program)).context(program)?;
        }
        Ok(Programs { running, next })
    }

    /// Ends the daemon as systemd does, and starts that of the other place.
    fn upgrade(&mut self, host: &Host) -> anyhow::Result<()> {
        let daemon = host.daemon().context("no daemon runs")?;
        kill_process(Pid::from_raw(daemon).context("no process")?, Signal::TERM)?;
        until("the daemon to end", || host.daemon().is_none().then_some(()));
        thread::sleep(AWAY);
        std::mem::swap(&mut self.running, &mut self.next);
        let usual = host.command("ebb");
        let mut command = Command::new(self.running.join("ebb"));
        command.args(usual.get_args()).arg("list");
        for (name, value) in usual.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let ran = command.output()?;
        anyhow::ensure!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        host.start();
        Ok(())
    }
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

/// Returns how long accesses take while something happens, and after it.
fn times(vm: &Vm, happens: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<AccessTimes> {
    vm.access_times("a");
    happens()?;
    thread::sleep(WATCHED);
    vm.guest("accesson a 1024");
    Ok(vm.access_times("a"))
}

fn longest_ms(times: AccessTimes) -> f64 {
    times.longest_us as f64 / 1000.0
}
