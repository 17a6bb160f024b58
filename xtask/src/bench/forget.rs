//! What it costs to empty QEMU's page table again and again, as a limit needs it: by a ring in QEMU,
//! and by injected calls, for which a thread of QEMU stands still.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use vmtest::{Guest, Host, Vm, until};

use super::blocks::Blocks;
use super::cpu;
use super::kept::{Figures, add};
use super::report::Report;
use super::row::Row;
use super::session::Session;

const NAME: &str = "forget";
const SIDES: [Side; 2] = [Side::Ring, Side::Call];
/// VMs of each side: in a quick run, and in a full one.
const BLOCKS: [usize; 2] = [1, 5];
/// How long a guest is watched.
const WATCHED: Duration = Duration::from_secs(20);
/// Accesses before that: the limit has found its pace then.
const BEFORE: u32 = 200_000;
/// How the names of a ring's threads begin: of the one that polls, and of those that work.
const RING_THREADS: &str = "iou-";

const LONGEST: &str = "a guest's longest wait for 256 accesses";
const P99: &str = "256 accesses, p99";
const SPEED: &str = "accesses a second";
const CPU: &str = "processor time of Ebb, its helpers and the ring's threads, each second";

/// What empties QEMU's page table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Ring,
    Call,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Side::Ring => "ring",
            Side::Call => "injected calls",
        }
    }

    /// The value of `ebbd --forget-by`.
    fn setting(self) -> &'static str {
        match self {
            Side::Ring => "ring",
            Side::Call => "call",
        }
    }
}

/// Runs the benchmark.
///
/// # Errors
/// There is no Debian to run, or QEMU can have no ring.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let count = BLOCKS[usize::from(!session.identity.quick)];
    report.note(format!(
        "A guest of 256 MiB with one vCPU and a limit of 120 MiB accesses 100 MiB at random, so a part of it is \
         always evicted; {count} VMs of each side, {} s each.",
        WATCHED.as_secs()
    ));
    let sides = (&SIDES[..], |side: Side| side.name().to_owned());
    let taken = blocks.take(&mut report, "limit", sides, count, one)?;
    for (what, unit) in [(LONGEST, "ms"), (P99, "ms"), (SPEED, "1/s"), (CPU, "ms")] {
        let [ring, call] = SIDES.map(|side| taken.rounds(side.name(), what));
        let row = Row::new(what, unit, &ring).failed(taken.failed());
        report.row(row.against_vms(Side::Call.name(), &call));
    }
    Ok(report)
}

fn one(side: Side) -> anyhow::Result<Figures> {
    let host = Host::new();
    host.set("EBB_FORGET_BY", side.setting());
    let vm = host.run(Guest::debian("6.1-cloud").memory("256M").backing("small").cpus(1));
    vm.guest("access a 100M hot 0 25600");
    vm.ebb("limit 120M").ok();
    vm.guest(&format!("accesson a {BEFORE}"));
    if side == Side::Ring {
        until("a ring", || {
            let why =
                host.log().lines().find(|line| line.contains("injected calls")).map(String::from);
            assert!(why.is_none(), "{why:?}");
            cpu::threads(vm.pid()).iter().any(is_of_ring).then_some(())
        });
    }
    let server = host.server(vm.name()).context("the VM is not served")?;
    vm.access_times("a");
    let daemon = host.daemon().context("no daemon runs")?;
    let spent = || spent(&vm, [server, daemon]);
    let (began, cpu_before) = (Instant::now(), spent());
    thread::sleep(WATCHED);
    let (times, took) = (vm.access_times("a"), began.elapsed());
    let spent = spent().saturating_sub(cpu_before);
    let stopped = vm.guest("accessstop a");
    ensure!(stopped.ends_with(" 0"), "wrong bytes: {stopped}");
    let mut figures = Figures::new();
    add(&mut figures, LONGEST, times.longest_us as f64 / 1e3);
    add(&mut figures, P99, times.p99_us as f64 / 1e3);
    add(&mut figures, SPEED, times.count as f64 * 256.0 / took.as_secs_f64());
    add(&mut figures, CPU, spent.as_secs_f64() * 1e3 / took.as_secs_f64());
    Ok(figures)
}

fn is_of_ring(thread: &cpu::Thread) -> bool {
    thread.name.starts_with(RING_THREADS)
}

/// Returns the processor time of Ebb's processes and of their helpers, and that of the ring's threads
/// in QEMU.
fn spent(vm: &Vm, processes: [i32; 2]) -> Duration {
    let threads = cpu::threads(vm.pid());
    let ring: Duration =
        threads.iter().filter(|thread| is_of_ring(thread)).map(cpu::Thread::ran).sum();
    processes.into_iter().map(cpu::with_children).sum::<Duration>() + ring
}
