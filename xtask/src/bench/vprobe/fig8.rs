//! Figure 8: the time to reclaim and to return 2 MiB, while the guest is idle and while it keeps all
//! its processors busy; and what Ebb remembers of each reclaimed range.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ebb_units::HUGE_BYTES;
use ebb_vm::Qmp;
use serde_json::json;
use vmtest::{Host, Vm};

use super::api;
use super::side::{self, MIB, Setup, Side};
use crate::bench::held::Holders;
use crate::bench::hyperalloc::fig7;
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::rounds::us;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::taken::Taken;
use crate::bench::vm as vms;
use crate::interrupt;
use crate::plot::{Figure, Panel, Series};

const NAME: &str = "vprobe-fig8";
const SIDES: [Side; 4] = [Side::VProbe, Side::Balloon, Side::Iopf, Side::Reporting];
const MEMORY_MIB: u64 = 1024;
const CPUS: u32 = 2;
/// VMs of each side: in a quick run, and in a full one.
const BLOCKS: [usize; 2] = [1, 5];
/// Repetitions in each VM, as in the paper.
const TIMES: usize = 10;
/// Repetitions of free page reporting: the guest's kernel waits two seconds each time.
const REPORTS: usize = 3;
/// Memory that the guest frees at once, of which free page reporting reports a part.
const FREED_MIB: u64 = 64;
/// Ranges that are reclaimed at once and whose memory is counted. More are reclaimed before: what
/// the guest has never used goes first, and buffers grow to their size.
const RANGES: u64 = 100;
const RANGES_BEFORE: u64 = 60;
/// Most requests for one that counts.
const TRIES: usize = 5;
/// Goal: greatest part of the balloon's time under load. It is 60 times as fast.
const GOAL: f64 = 0.0166;
/// Goal: longest time of the daemon's work, in microseconds.
const GOAL_US: f64 = 90.0;
/// Goal: most bytes that Ebb remembers of each range.
const GOAL_BYTES: f64 = 64.0;
/// Time between two looks at the host's memory.
const LOOK_EVERY: Duration = Duration::from_micros(200);
/// Number of looks for each question to QEMU.
const LOOKS_A_QUESTION: u32 = 10;
/// Time between two questions to QEMU.
const ASK_EVERY: Duration = Duration::from_millis(1);
const DEADLINE: Duration = Duration::from_secs(60);

/// What the guest does.
const STATES: [State; 2] =
    [State { name: "idle", is_busy: false }, State { name: "sysbench cpu", is_busy: true }];

#[derive(Clone, Copy)]
struct State {
    name: &'static str,
    is_busy: bool,
}

impl State {
    fn figure(self, what: &str) -> String {
        format!("{what}, {}", self.name)
    }
}

/// Names of figures, in microseconds. *Seen* is what the caller waits for, *inside* the part of it
/// that the daemon's work takes.
const SEEN: &str = "reclaim 2 MiB, seen by the caller";
const INSIDE: &str = "reclaim 2 MiB, inside the daemon";
const RETURNED: &str = "return 2 MiB";
/// The part of *inside* that reading the guest's free lists takes.
const SCAN: &str = "of that the scan";
const MANY: &str = "reclaim of 200 MiB at once, inside the daemon, for each 2 MiB";
const RANGE: &str = "Ebb's memory for each reclaimed range";
/// The part of *Ebb's memory* that is the ledger's file.
const LEDGER: &str = "Ebb's memory for each reclaimed range, of that the ledger";

/// Runs the benchmark.
///
/// # Errors
/// There is no Debian to run.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let (mut report, mut blocks) = side::begin(session, NAME)?;
    let count = BLOCKS[usize::from(!session.identity.quick)];
    report.note(format!(
        "A guest of {MEMORY_MIB} MiB with {CPUS} vCPUs; {TIMES} requests of 2 MiB in each VM and state, \
         medians; {count} VMs of each side."
    ));
    report.note(
        "V-Probe takes whole buddy blocks, so a request for 2 MiB may give 4 MiB. The return is that of each \
         2 MiB: the median fault's time, times the faults, by the huge frames that came back. The balloon's \
         ends when its driver says so. Free page reporting returns nothing by itself.",
    );
    let ground = Host::new();
    let image = fig7::image(&ground)?;
    let sides = (&SIDES[..], |side: Side| side.name().to_owned());
    let taken = blocks.take(&mut report, "2 MiB", sides, count, |side| one(side, image.image()))?;
    rows(&mut report, &taken);
    plot(&report, &taken)?;
    Ok(report)
}

fn one(side: Side, image: &Path) -> anyhow::Result<Figures> {
    let setup = Setup { memory_mib: MEMORY_MIB, cpus: CPUS, image: Some(image), forwarded: None };
    let vm = side.start(&setup)?;
    let mut figures = Figures::new();
    side::use_all(&vm)?;
    if side == Side::VProbe {
        many_at_once(&vm, &mut figures)?;
    }
    for state in STATES {
        if state.is_busy {
            keep_busy(&vm);
        }
        match side {
            Side::VProbe | Side::Iopf => by_ebb(side, &vm, state, &mut figures)?,
            Side::Balloon => by_balloon(&vm, state, &mut figures)?,
            Side::Reporting => by_reports(&vm, state, &mut figures)?,
            Side::Nobody => {}
        }
    }
    Ok(figures)
}

/// Starts `sysbench cpu` on all of the guest's processors, and waits until all its threads run.
fn keep_busy(vm: &Vm) {
    vm.guest(&format!(
        "sh chroot /mnt /usr/bin/sysbench cpu --threads={CPUS} --time=0 run >/dev/null 2>&1 </dev/null &"
    ));
    vmtest::until("sysbench's threads", || {
        let threads = vm.try_guest("sh ls /proc/$(pidof sysbench)/task | wc -l").ok()?;
        (threads.trim().parse::<u32>().ok()? > CPUS).then_some(())
    });
}

/// Reclaims many ranges at once. Counts what Ebb remembers of them: memory of its processes, and
/// blocks of the ledger.
fn many_at_once(vm: &Vm, figures: &mut Figures) -> anyhow::Result<()> {
    api::reclaim(vm, RANGES_BEFORE * HUGE_BYTES)?;
    let before = Remembered::by(vm)?;
    let report = api::reclaim(vm, RANGES * HUGE_BYTES)?.0;
    ensure!(report.bytes >= RANGES * HUGE_BYTES, "only {} bytes reclaimed", report.bytes);
    let now = Remembered::by(vm)?;
    let ranges = (report.bytes / HUGE_BYTES) as f64;
    add(figures, RANGE, now.bytes().saturating_sub(before.bytes()) as f64 / ranges);
    add(figures, LEDGER, now.ledger.saturating_sub(before.ledger) as f64 / ranges);
    add(figures, MANY, report.duration_ns as f64 / 1e3 / ranges);
    side::use_all(vm)
}

/// What Ebb remembers of a VM, in bytes.
struct Remembered {
    /// Memory of its processes.
    processes: u64,
    /// Memory of the ledger's file.
    ledger: u64,
}

impl Remembered {
    fn by(vm: &Vm) -> anyhow::Result<Remembered> {
        use std::os::unix::fs::MetadataExt;
        let ledger = vm.host().run_directory().join("vms").join(vm.name()).join("ledger");
        let ledger = fs::metadata(&ledger).with_context(|| ledger.display().to_string())?;
        let processes = Holders::of(vm.host()).bytes();
        Ok(Remembered { processes, ledger: ledger.blocks() * 512 })
    }

    fn bytes(&self) -> u64 {
        self.processes + self.ledger
    }
}

fn by_ebb(side: Side, vm: &Vm, state: State, figures: &mut Figures) -> anyhow::Result<()> {
    // The daemon's counters begin at zero then.
    vms::restart_daemon(vm);
    let (mut counted, mut tries) = (0, 0);
    while counted < TIMES {
        interrupt::check()?;
        ensure!(tries < TRIES * TIMES, "{}: the host gets nothing", side.name());
        tries += 1;
        let before = vm.host_bytes();
        let (inside_ns, scan_ns, seen) = match side {
            Side::VProbe => {
                let (report, seen) = api::reclaim(vm, HUGE_BYTES)?;
                (report.duration_ns, report.scan_ns, seen)
            }
            _ => {
                let (report, seen) = api::evict(vm, HUGE_BYTES)?;
                (report.duration_ns, 0, seen)
            }
        };
        // A request for memory that the guest has never used gives the host nothing.
        if before.saturating_sub(vm.host_bytes()) >= HUGE_BYTES / 2 {
            counted += 1;
            add(figures, &state.figure(SEEN), us(seen));
            add(figures, &state.figure(INSIDE), inside_ns as f64 / 1e3);
            add(figures, &state.figure(SCAN), scan_ns as f64 / 1e3);
        }
    }
    side::use_all(vm)?;
    let status = vm.status();
    let (faults, bytes) = match side {
        Side::VProbe => (status.faults.metadata, status.returned_total_bytes),
        _ => {
            let limit = &status.limit;
            (status.faults.missing, limit.refilled_total_bytes + limit.ahead_total_bytes)
        }
    };
    let p50_us = status.fault_ns.p50.context("no fault")? as f64 / 1e3;
    let per_huge = p50_us * faults as f64 * HUGE_BYTES as f64 / bytes.max(1) as f64;
    add(figures, &state.figure(RETURNED), per_huge);
    Ok(())
}

fn by_balloon(vm: &Vm, state: State, figures: &mut Figures) -> anyhow::Result<()> {
    let mut qmp = vm.open_qmp();
    let whole = MEMORY_MIB * MIB;
    for number in 1..=TIMES as u64 {
        let (before, wanted) = (vm.host_bytes(), whole - number * HUGE_BYTES);
        let (begun, mut looks) = (Instant::now(), 0);
        resize(&mut qmp, wanted)?;
        // The host's memory tells first. Of memory that the guest never used it tells nothing. QEMU
        // is seldom asked, since it answers in the thread that also serves its devices.
        let took = time(begun, LOOK_EVERY, || {
            looks += 1;
            let is_taken = vm.host_bytes() + HUGE_BYTES <= before;
            Ok(is_taken || looks % LOOKS_A_QUESTION == 0 && actual(&mut qmp)? == wanted)
        })?;
        add(figures, &state.figure(SEEN), us(took));
        time(begun, ASK_EVERY, || Ok(actual(&mut qmp)? == wanted))?;
    }
    for number in (0..TIMES as u64).rev() {
        let wanted = whole - number * HUGE_BYTES;
        let begun = Instant::now();
        resize(&mut qmp, wanted)?;
        let took = time(begun, ASK_EVERY, || Ok(actual(&mut qmp)? == wanted))?;
        add(figures, &state.figure(RETURNED), us(took));
    }
    Ok(())
}

fn resize(qmp: &mut Qmp, bytes: u64) -> anyhow::Result<()> {
    qmp.execute("balloon", json!({ "value": bytes })).map(drop).context("balloon")
}

fn actual(qmp: &mut Qmp) -> anyhow::Result<u64> {
    let answer = qmp.execute("query-balloon", json!({})).context("query-balloon")?;
    answer["actual"].as_u64().context("no size")
}

fn by_reports(vm: &Vm, state: State, figures: &mut Figures) -> anyhow::Result<()> {
    for _ in 0..REPORTS {
        vm.guest(&format!("fill b {FREED_MIB}M"));
        side::settle(vm)?;
        let before = vm.host_bytes();
        let begun = Instant::now();
        vm.guest("free b");
        let took = time(begun, LOOK_EVERY, || Ok(vm.host_bytes() + HUGE_BYTES <= before))?;
        add(figures, &state.figure(SEEN), us(took));
    }
    Ok(())
}

/// Returns the time from `begun` until `is_done`, which is asked at once and then after each `pause`.
fn time(
    begun: Instant,
    pause: Duration,
    mut is_done: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<Duration> {
    while !is_done()? {
        interrupt::check()?;
        ensure!(begun.elapsed() < DEADLINE, "not done within {DEADLINE:?}");
        thread::sleep(pause);
    }
    Ok(begun.elapsed())
}

fn rows(report: &mut Report, taken: &Taken) {
    let ebb = Side::VProbe;
    for state in STATES {
        let of = |side: Side, what: &str| taken.rounds(side.name(), &state.figure(what));
        let row =
            |what: &str| Row::new(state.figure(what), "us", &of(ebb, what)).failed(taken.failed());
        report.row(row(INSIDE).no_more_than(GOAL_US));
        report.row(row(SCAN));
        for other in [Side::Balloon, Side::Iopf, Side::Reporting] {
            let against = |row: Row, what| row.against_vms(other.name(), &of(other, what));
            for what in [INSIDE, SEEN] {
                let there = if other == Side::Iopf { what } else { SEEN };
                let row = against(row(what), there);
                let is_goal = other == Side::Balloon && state.is_busy;
                report.row(if is_goal { row.at_most(GOAL) } else { row });
            }
            if other != Side::Reporting {
                report.row(against(row(RETURNED), RETURNED));
            }
        }
    }
    let many = Row::new(MANY, "us", &taken.rounds(ebb.name(), MANY));
    report.row(many.failed(taken.failed()));
    let bytes = |what: &str| Row::new(what, "bytes", &taken.rounds(ebb.name(), what));
    report.row(bytes(RANGE).failed(taken.failed()).no_more_than(GOAL_BYTES));
    report.row(bytes(LEDGER).failed(taken.failed()));
}

/// Draws the last block.
fn plot(report: &Report, taken: &Taken) -> anyhow::Result<()> {
    let panel = |state: State, what: &str| {
        let series = taken.names().map(|name| Series {
            name: name.into(),
            points: (1..)
                .zip(taken.course(name, &state.figure(what)))
                .map(|(x, time)| (f64::from(x), time / 1e3))
                .collect(),
            is_bound: false,
        });
        // Reports take seconds, and would hide everything else.
        let series = series.filter(|series| series.name != Side::Reporting.name()).collect();
        Panel { title: state.figure(what), series, ..Panel::default() }
    };
    let panels = STATES.map(|state| panel(state, SEEN));
    let title = "Time to reclaim 2 MiB (V-Probe, fig. 8)";
    report.plot(&Figure { title, x_label: "request", y_label: "ms", panels: &panels })
}
