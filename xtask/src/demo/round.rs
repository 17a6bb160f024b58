//! One VM from its boot to its end: the guest works, and the demo measures.

use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_api::{ReclaimReport, VmStatus};
use vmtest::{Guest, Host, Vm};

use super::usage::Usage;
use super::view::View;
use super::workload::{Progress, State};
use crate::guard::{guard, reason};
use crate::interrupt;

/// Debian's kernel that the guest boots.
pub const KERNEL: &str = "6.1-cloud";
const MEMORY: &str = "2G";
/// Time from one measurement of the host's memory to the next.
const SAMPLE_EVERY: Duration = Duration::from_millis(200);
/// Time from one question to Ebb to the next: short enough to see each of its rounds, long enough
/// to delay none.
const ASK_EBB_EVERY: Duration = Duration::from_millis(450);

/// Who manages the VM's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Keeper {
    Nobody,
    Ebb,
}

/// Figures of one round.
pub struct Record {
    pub keeper: Keeper,
    pub vm: VmStatus,
    /// How long the work took, with its rests.
    pub time: Duration,
    /// Host memory of the guest's RAM in bytes, by time.
    pub resident: Vec<(Duration, u64)>,
    pub guest: State,
    /// Cost of QEMU during the work.
    pub vmm: Usage,
    /// Cost of the daemon during the work, with its answers to the demo's questions.
    pub daemon: Usage,
    pub ebb: Option<Rounds>,
}

/// What Ebb has done so far.
pub struct Rounds {
    pub status: VmStatus,
    pub count: u64,
    pub took: Duration,
    /// The last round that reclaimed something, and when the demo saw it.
    pub last: Option<(Duration, ReclaimReport)>,
}

impl Keeper {
    pub fn label(self) -> &'static str {
        match self {
            Keeper::Nobody => "without Ebb",
            Keeper::Ebb => "with Ebb",
        }
    }
}

/// Boots a VM, has its guest do the work, and measures meanwhile.
///
/// # Errors
/// The VM does not start, the guest fails, or the user interrupts.
pub fn run(keeper: Keeper, view: &mut View) -> anyhow::Result<Record> {
    let record = guard(|| {
        let host = Host::new();
        let vm = host.run(Guest::debian(KERNEL).memory(MEMORY));
        let status = prepare(keeper, &vm);
        interrupt::check()?;
        measure(keeper, &vm, status, view)
    });
    // A terminal's Ctrl-C reaches more than this program, so a failure after it is no news.
    interrupt::check()?;
    record
}

/// Brings the VM to its keeper. Both VMs are started by Ebb, so that accelerator and backing are
/// the same.
fn prepare(keeper: Keeper, vm: &Vm) -> VmStatus {
    let status = vm.wait_trusted();
    match keeper {
        Keeper::Nobody => drop(vm.detach()),
        Keeper::Ebb => drop(vm.ebb("auto on --interval 1s").ok()),
    }
    status
}

fn measure(keeper: Keeper, vm: &Vm, status: VmStatus, view: &mut View) -> anyhow::Result<Record> {
    // A VM that nobody manages has no process of Ebb's.
    let ebbds = vm.host().ebbds();
    let daemon = *ebbds.last().context("ebbd has ended")?;
    let before = (Usage::of(vm.pid())?, Usage::of(daemon)?);
    let progress = Progress::new(status.memory_bytes);
    let mut record = Record {
        keeper,
        time: Duration::ZERO,
        resident: Vec::new(),
        guest: State::default(),
        vmm: Usage::default(),
        daemon: Usage::default(),
        ebb: (keeper == Keeper::Ebb).then(|| Rounds::new(status.clone())),
        vm: status,
    };
    thread::scope(|scope| {
        let work = scope.spawn(|| progress.work(vm));
        watch(&mut record, vm, &progress, &work, view)?;
        work.join().unwrap_or_else(|panic| Err(reason(panic.as_ref())))
    })?;
    record.look(vm, &progress);
    record.vmm = Usage::of(vm.pid())? - before.0;
    record.daemon = Usage::of(daemon)? - before.1;
    view.show(&record);
    view.end();
    Ok(record)
}

fn watch<T>(
    record: &mut Record,
    vm: &Vm,
    progress: &Progress,
    work: &ScopedJoinHandle<T>,
    view: &mut View,
) -> anyhow::Result<()> {
    let mut ask_ebb_at = Instant::now();
    while !work.is_finished() {
        let start = Instant::now();
        record.look(vm, progress);
        if let Some(rounds) = record.ebb.as_mut().filter(|_| start >= ask_ebb_at) {
            rounds.ask(vm, record.time)?;
            ask_ebb_at = start + ASK_EBB_EVERY;
        }
        view.show(record);
        thread::sleep((start + SAMPLE_EVERY).saturating_duration_since(Instant::now()));
    }
    Ok(())
}

impl Record {
    fn look(&mut self, vm: &Vm, progress: &Progress) {
        let resident_bytes = vm.host_bytes();
        self.time = progress.time();
        self.resident.push((self.time, resident_bytes));
        self.guest = progress.state().clone();
    }
}

impl Rounds {
    fn new(status: VmStatus) -> Rounds {
        Rounds { status, count: 0, took: Duration::ZERO, last: None }
    }

    /// Asks Ebb for the VM's status. Rounds differ in their times in nanoseconds, so that two of
    /// them are distinguished.
    fn ask(&mut self, vm: &Vm, now: Duration) -> anyhow::Result<()> {
        let answer = vm.ebb("status --json");
        let status: VmStatus = serde_json::from_str(&answer.stdout)
            .with_context(|| format!("ebb {}: {}", answer.line, answer.stderr.trim_end()))?;
        if status.auto.last != self.status.auto.last
            && let Some(report) = &status.auto.last
        {
            self.count += 1;
            self.took += Duration::from_nanos(report.duration_ns);
            if report.bytes > 0 {
                self.last = Some((now, report.clone()));
            }
        }
        self.status = status;
        Ok(())
    }
}
