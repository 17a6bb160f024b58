//! What Ebb itself costs: the memory of its processes, and how long a guest waits when one of them
//! ends.

mod ends;
mod idle;

use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::Context;
use vmtest::{Host, Vm};

use super::report::Report;
use super::rounds::Rounds;
use super::row::Row;
use super::session::Session;
use super::vm as vms;

/// Memory of the daemon and of the VM's process, if there is one, in KiB.
#[derive(Clone, Copy, Default)]
struct Held {
    /// Their heaps and stacks.
    anonymous: f64,
    /// Page tables, because they map the guest's memory.
    tables: f64,
    /// The ledger's blocks, in the run directory.
    ledger: f64,
}

impl Held {
    /// Measures what the daemon of this host holds now.
    fn now(host: &Host, vm: Option<&Vm>) -> anyhow::Result<Held> {
        let pids = host.ebbds();
        let ledger = match vm {
            Some(vm) => {
                let path = host.run_directory().join("vms").join(vm.name()).join("ledger");
                fs::metadata(path)?.blocks() as f64 / 2.0
            }
            None => 0.0,
        };
        Ok(Held { anonymous: of_all(&pids, "RssAnon")?, tables: of_all(&pids, "VmPTE")?, ledger })
    }

    fn sum(self) -> f64 {
        self.anonymous + self.tables + self.ledger
    }
}

fn of_all(pids: &[i32], key: &str) -> anyhow::Result<f64> {
    pids.iter().map(|pid| kib(*pid, "status", key)).sum()
}

fn kib(pid: i32, file: &str, key: &str) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/{file}");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let number = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok());
    number.with_context(|| format!("{path} has no {key}"))
}

/// Runs the benchmark.
///
/// # Errors
/// `/proc` does not tell.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("memory");
    report.note(
        "KiB: anonymous memory, page tables and the ledger's blocks. The guest's own memory, \
         which the daemon maps too, is not among it.",
    );
    let rounds = if quick { 1 } else { 5 };
    for gib in [1, 4] {
        for mode in ["release", "strict"] {
            let mut figures = Figures::default();
            for _ in 0..rounds {
                figures.round(gib, mode)?;
            }
            figures.rows(&mut report, gib, mode);
        }
    }
    idle::rows(&mut report, rounds)?;
    ends::rows(&mut report, if quick { 1 } else { 10 })?;
    Ok(report)
}

#[derive(Default)]
struct Figures {
    /// The daemon without any VM.
    alone: Rounds,
    all: Rounds,
    anonymous: Rounds,
    tables: Rounds,
    ledger: Rounds,
    /// Growth of QEMU's page tables.
    qemu: Rounds,
    /// Growth of the daemon's own memory, for each GiB that an eviction saves.
    evicted: Rounds,
}

impl Figures {
    fn round(&mut self, gib: u64, mode: &str) -> anyhow::Result<()> {
        let host = Host::new();
        host.start();
        let alone = Held::now(&host, None)?;
        let vm = host.run(vms::guest(gib).mode(mode));
        vm.guest(&format!("fill a {}M", gib * 768));
        vm.guest("free a");
        vm.wait_trusted();
        let qemu_before = kib(vm.pid(), "status", "VmPTE")?;
        vm.reclaim();
        let held = Held::now(&host, Some(&vm))?;
        let per_gib = |now: f64, before: f64| (now - before) / gib as f64;
        self.alone.push(alone.sum());
        self.all.push(per_gib(held.sum(), alone.sum()));
        self.anonymous.push(per_gib(held.anonymous, alone.anonymous));
        self.tables.push(per_gib(held.tables, alone.tables));
        self.ledger.push(per_gib(held.ledger, alone.ledger));
        self.qemu.push(per_gib(kib(vm.pid(), "status", "VmPTE")?, qemu_before));
        vm.guest(&format!("fill b {}M", gib * 512));
        let before = Held::now(&host, Some(&vm))?;
        vm.ebb(&format!("evict --bytes {}", gib << 28)).ok();
        let saved = vm.status().limit.saved_bytes as f64 / (1 << 30) as f64;
        anyhow::ensure!(saved > 0.0, "nothing was saved");
        let evicted = Held::now(&host, Some(&vm))?;
        self.evicted.push((evicted.anonymous - before.anonymous) / saved);
        Ok(())
    }

    fn rows(&self, report: &mut Report, gib: u64, mode: &str) {
        let mut row = |what: &str, unit, figures| {
            report.row(Row::new(format!("{gib} GiB, {mode}: {what}"), unit, figures));
        };
        row("the daemon without a VM", "KiB", &self.alone);
        row("more with it, after a reclaim", "KiB/GiB", &self.all);
        row("of that anonymous", "KiB/GiB", &self.anonymous);
        row("of that page tables", "KiB/GiB", &self.tables);
        row("of that the ledger", "KiB/GiB", &self.ledger);
        row("QEMU's page tables grow by", "KiB/GiB", &self.qemu);
        row("more anonymous after an eviction", "KiB/GiB saved", &self.evicted);
    }
}
