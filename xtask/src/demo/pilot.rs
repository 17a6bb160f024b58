//! Three VMs under the pilot: what it takes from whom, what it gives back, and why.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ebb_api::PilotStatus;
use ebb_units::Bytes;
use tempfile::TempDir;
use vmtest::{Guest, Host, Vm, assets};

use super::dashboard::Dashboard;
use super::round::KERNEL;
use super::table::{self, Line, Table};
use super::workload::wrong_bytes;
use crate::guard::{guard, reason};
use crate::interrupt;

const MEMORY: &str = "384M";
const MIB: u64 = 1 << 20;
/// How long the pilot takes what the guests do not use.
const TAKES: Duration = Duration::from_secs(16);
/// How long the picture stays after the guests have needed everything.
const RESTS: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Pause of the guest that works, between two checks.
const PAUSE: Duration = Duration::from_millis(300);
/// Decisions in the picture.
const DECISIONS: usize = 4;

/// What a VM is for.
struct Part {
    class: &'static str,
    /// What its guest does first.
    first: &'static [&'static str],
    kept_mib: u64,
    says: &'static str,
}

const PARTS: [Part; 3] = [
    Part {
        class: "latency",
        first: &["fill kept 120M"],
        kept_mib: 120,
        says: "uses 120 MiB all the time",
    },
    Part {
        class: "normal",
        first: &["fill kept 200M"],
        kept_mib: 200,
        says: "has 200 MiB, and rests",
    },
    Part {
        class: "batch",
        first: &["fill freed 180M", "fill kept 60M", "free freed"],
        kept_mib: 60,
        says: "has freed 180 MiB, and rests with 60",
    },
];

/// What was done so far.
#[derive(Clone, Default)]
struct State {
    stage: &'static str,
    checked_bytes: u64,
    wrong_bytes: u64,
}

/// The three VMs, and what the demo knows of them.
struct Stage {
    vms: Vec<Vm>,
    began: Instant,
    state: Mutex<State>,
}

/// Runs it, and prints what came of it. Then the VMs stay up for whoever sits at a terminal.
///
/// # Errors
/// A VM does not start, the pilot takes nothing, a byte is wrong, or the user interrupts.
pub fn run(table: &mut Table) -> anyhow::Result<()> {
    let ended = guard(|| {
        // What is evicted is to be on a disk, so that the host has the memory.
        let swap = TempDir::new_in(assets::target_directory()).context("a place to swap to")?;
        let host = Host::in_memory().unwrap_or_default();
        host.set("EBB_SWAP_DIR", swap.path());
        let ended = on(&host, table);
        // Whatever uses the directory ends before it goes.
        drop(host);
        ended
    });
    interrupt::check()?;
    ended
}

fn on(host: &Host, table: &mut Table) -> anyhow::Result<()> {
    let dashboard = Dashboard::at_terminal(host)?;
    let vms = boot(host)?;
    let before = resident(&vms);
    host.ebb("pilot on --reserve 90%").ok();
    let stage = Stage { vms, began: Instant::now(), state: Mutex::default() };
    let mut least = before;
    thread::scope(|scope| {
        let work = scope.spawn(|| stage.play());
        while !work.is_finished() {
            least = least.min(resident(&stage.vms));
            stage.show(host, table)?;
            thread::sleep(LOOK_EVERY);
        }
        work.join().unwrap_or_else(|panic| Err(reason(panic.as_ref())))
    })?;
    stage.show(host, table)?;
    table.end();
    let State { checked_bytes, wrong_bytes, .. } = stage.state().clone();
    ensure!(wrong_bytes == 0, "{wrong_bytes} bytes were not what the guests had written");
    let taken = before.saturating_sub(least);
    if taken == 0 {
        bail!("the pilot has taken nothing: {}", host.ebb("pilot").stdout);
    }
    println!(
        "\nThe pilot took {} of {} from three VMs, and gave back what they missed.\n\
         The guests checked every byte of {}: 0 wrong.\n",
        Bytes(taken / MIB * MIB),
        Bytes(before / MIB * MIB),
        Bytes(checked_bytes),
    );
    dashboard.map_or(Ok(()), |dashboard| dashboard.show())
}

/// Boots all at once, and has the guests take their memory.
fn boot(host: &Host) -> anyhow::Result<Vec<Vm>> {
    // The first one starts the daemon.
    host.start();
    thread::scope(|scope| {
        let boot = |part: &'static Part| {
            scope.spawn(move || {
                guard(|| {
                    let vm = host.run(Guest::debian(KERNEL).memory(MEMORY).cpus(1));
                    vm.wait_trusted();
                    vm.ebb(&format!("rule --class {}", part.class)).ok();
                    part.first.iter().for_each(|request| drop(vm.guest(request)));
                    Ok(vm)
                })
            })
        };
        let booting: Vec<_> = PARTS.iter().map(boot).collect();
        let booted = booting.into_iter().map(|vm| vm.join());
        booted.map(|vm| vm.unwrap_or_else(|panic| Err(reason(panic.as_ref())))).collect()
    })
}

fn resident(vms: &[Vm]) -> u64 {
    vms.iter().map(Vm::host_bytes).sum()
}

impl Stage {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has one guest work while the others rest, and then all need what they have.
    fn play(&self) -> anyhow::Result<()> {
        self.state().stage = "the pilot takes what the guests do not use";
        while self.began.elapsed() < TAKES {
            interrupt::check()?;
            self.check(0)?;
            thread::sleep(PAUSE);
        }
        self.state().stage = "all guests need all of their memory now";
        (0..self.vms.len()).try_for_each(|place| self.check(place))?;
        let end = Instant::now() + RESTS;
        while Instant::now() < end {
            interrupt::check()?;
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn check(&self, place: usize) -> anyhow::Result<()> {
        let answer = self.vms[place].guest("check kept");
        let mut state = self.state();
        state.checked_bytes += PARTS[place].kept_mib * MIB;
        state.wrong_bytes += wrong_bytes(&answer)?;
        Ok(())
    }

    fn show(&self, host: &Host, table: &mut Table) -> anyhow::Result<()> {
        let ran = host.ebb("pilot --json");
        let pilot: PilotStatus = serde_json::from_str(&ran.stdout)
            .with_context(|| format!("ebb pilot: {}", ran.stderr.trim_end()))?;
        let lines = self.vms.iter().zip(&PARTS).map(|(vm, part)| {
            let seen = pilot.vms.iter().find(|seen| seen.name.as_str() == vm.name());
            Line {
                name: vm.name().to_owned(),
                class: part.class,
                says: part.says,
                memory_bytes: seen.map_or(0, |seen| seen.memory_bytes),
                resident_bytes: vm.host_bytes(),
                limit_bytes: seen.and_then(|seen| seen.limit_bytes),
            }
        });
        let decisions = pilot.decisions.iter().filter(|decision| decision.outcome.is_some());
        let decisions: Vec<String> = decisions.take(DECISIONS).map(table::decision).collect();
        let stage = self.state().stage;
        table.show(self.began.elapsed(), stage, &lines.collect::<Vec<_>>(), &decisions);
        Ok(())
    }
}
