//! Reading a guest's page metadata: how long it takes, and what the guest notices.

use std::hint::black_box;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::Context;
use ebb_inspect::{Guest, GuestMemory, PAGE_BYTES};
use ebb_ledger::{Ledger, Tables};
use ebb_pager::View;
use ebb_store::{Protection, SwapFile};
use ebb_sys::process::Process;
use ebb_units::{FRAME_BYTES, FRAMES_PER_HUGE};
use ebb_vm::{Qmp, Ram, layout};
use vmtest::{Host, Vm};

use super::report::Report;
use super::rounds::{Rounds, us};
use super::row::Row;
use super::session::Session;
use super::sweep;
use super::{cpu, vm as vms};

const GUEST_GIB: u64 = 4;
/// Bytes written before a cold scan: several times as much as one processor caches.
const SWEEP_BYTES: usize = 512 << 20;
/// Goal: the guest's speed is at least this part of its undisturbed speed.
const SPEED_LIMIT: f64 = 0.995;

/// What a scan looks at.
#[derive(Clone, Copy)]
enum Scan {
    /// The heads of 2 MiB blocks.
    Heads,
    /// Every frame, except those inside free blocks.
    Frames,
    /// The kind of every frame.
    Kinds,
}

/// Scans, and their times in the trial before this project, in microseconds per GiB: least and
/// greatest, warm and cold.
const SCANS: [(Scan, &str, [[f64; 2]; 2]); 3] = [
    (Scan::Heads, "heads of 2 MiB blocks", [[1.0, 2.0], [14.0, 17.0]]),
    (Scan::Frames, "every frame", [[14.0, 165.0], [46.0, 335.0]]),
    (Scan::Kinds, "full classification", [[93.0, 378.0], [119.0, 541.0]]),
];

/// Runs the benchmark.
///
/// # Errors
/// The guest's memory cannot be accessed, or its kernel is not trusted.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("scan");
    let vm = Host::new().qemu(vms::guest(GUEST_GIB));
    for (state, (name, prepare)) in
        [("free guest", None), ("full guest", Some("fill a 3G"))].into_iter().enumerate()
    {
        prepare.map(|request| vm.guest(request));
        let figures = vm.stopped(|| paused(&vm, if quick { 5 } else { 21 }))?;
        for (scan, figures) in SCANS.iter().zip(&figures) {
            rows(&mut report, name, state, scan, figures);
        }
    }
    drop(vm);
    noticed(&mut report, quick)?;
    Ok(report)
}

/// Times of one scan and of plain reads, warm and cold, in microseconds per GiB.
#[derive(Default)]
struct Figures {
    ebb: [Rounds; 2],
    plain: [Rounds; 2],
}

fn rows(
    report: &mut Report,
    guest: &str,
    state: usize,
    (scan, what, trial): &(Scan, &str, [[f64; 2]; 2]),
    figures: &Figures,
) {
    let plain = match scan {
        Scan::Heads => "plain read of the heads",
        _ => "plain read of all metadata",
    };
    for (cold, temperature) in ["warm", "cold"].into_iter().enumerate() {
        let row = || {
            let what = format!("{what}, {guest}, {temperature}");
            Row::new(what, "us/GiB", &figures.ebb[cold])
        };
        report.row(row().against(plain, &figures.plain[cold]));
        let bound = ["least", "most"][state];
        let trial = [trial[cold][state]].into_iter().collect();
        report.row(row().against(format!("trial, its {bound}"), &trial));
    }
}

/// A VM's memory as the daemon reads it.
struct Seen {
    ram: Ram,
    ledger: Ledger,
    store: SwapFile,
}

impl Seen {
    fn new(vm: &Vm) -> anyhow::Result<Seen> {
        let mut qmp = Qmp::connect(&vm.own_qmp_socket())?;
        let ram = layout::discover(&Process::open(vm.pid())?, &mut qmp)?;
        let directory = sweep::scratch()?;
        let ledger =
            Ledger::create(&directory.path().join("ledger"), ram.end(), Tables::WhenSplit)?;
        let (run, frames) = (directory.path(), ram.bytes() / FRAME_BYTES);
        let store = SwapFile::open(&run.join("swap"), run, frames, Protection::Encrypted)?;
        Ok(Seen { ram, ledger, store })
    }

    fn view(&self) -> View<'_> {
        View { ram: &self.ram, ledger: &self.ledger, store: &self.store }
    }
}

/// Measures with the guest's processors stopped.
fn paused(vm: &Vm, rounds: usize) -> anyhow::Result<Vec<Figures>> {
    let seen = Seen::new(vm)?;
    let view = seen.view();
    let guest = Guest::inspect(&view, &[]).context("the guest is not trusted")?;
    let mut sweep = vec![1u8; SWEEP_BYTES];
    let gib = guest.memmap().frames() as f64 * FRAME_BYTES as f64 / vms::GIB as f64;
    let mut time = |cold: bool, work: &dyn Fn() -> u64| {
        if cold {
            sweep.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(1));
        } else {
            black_box(work());
        }
        let start = Instant::now();
        black_box(work());
        us(start.elapsed()) / gib
    };
    let mut all: Vec<Figures> = SCANS.iter().map(|_| Figures::default()).collect();
    for _ in 0..rounds {
        for ((scan, ..), figures) in SCANS.iter().zip(&mut all) {
            for (index, cold) in [false, true].into_iter().enumerate() {
                figures.ebb[index].push(time(cold, &|| scan.run(&guest, &view)));
                figures.plain[index].push(time(cold, &|| scan.read(&guest, &seen.ram)));
            }
        }
    }
    Ok(all)
}

impl Scan {
    fn run(self, guest: &Guest, mem: &dyn GuestMemory) -> u64 {
        let least_order = match self {
            Scan::Heads => 9,
            Scan::Frames => 0,
            Scan::Kinds => return guest.counts(mem).free_frames(),
        };
        let mut frames = 0;
        let memmap = guest.memmap();
        memmap.free_blocks(mem, guest.layout(), least_order, |_, order| frames += 1u64 << order);
        frames
    }

    /// Reads the same bytes without looking at them.
    fn read(self, guest: &Guest, ram: &Ram) -> u64 {
        let runs = guest.memmap().runs().iter();
        let words =
            runs.filter_map(|run| ram.words(run.metadata, (run.frames * PAGE_BYTES / 8) as usize));
        let page_words = (PAGE_BYTES / 8) as usize;
        match self {
            Scan::Heads => {
                let heads = words.flat_map(|all| all.chunks(page_words * FRAMES_PER_HUGE as usize));
                heads
                    .flat_map(|part| part.iter().take(page_words))
                    .map(|w| w.load(Relaxed))
                    .fold(0, u64::wrapping_add)
            }
            _ => words.flatten().map(|word| word.load(Relaxed)).fold(0, u64::wrapping_add),
        }
    }
}

/// The guest's own speed, while it is scanned each second and while it is not.
#[derive(Default)]
struct Speeds {
    on: Rounds,
    off: Rounds,
    /// Speed for each second of a processor that QEMU got.
    on_by_cpu: Rounds,
    off_by_cpu: Rounds,
    /// Time that the daemon ran, in microseconds each second.
    daemon: Rounds,
    daemon_idle: Rounds,
}

fn noticed(report: &mut Report, quick: bool) -> anyhow::Result<()> {
    let vm = Host::new().run(vms::guest(GUEST_GIB));
    vm.guest("fill kept 2G");
    vm.reclaim();
    let (pairs, seconds) = if quick { (6, 3) } else { (30, 4) };
    let mut speeds = Speeds::default();
    // The first run is not measured, because it pays for translation.
    speed(&vm, seconds);
    for pair in 0..pairs {
        // The order alternates, so that a drift of the machine affects both alike.
        for on in [pair % 2 == 0, pair % 2 == 1] {
            vm.ebb(if on { "auto on --interval 1s" } else { "auto off" }).ok();
            speeds.measure(&vm, on, seconds)?;
        }
    }
    speeds.rows(report);
    Ok(())
}

fn speed(vm: &Vm, seconds: u64) -> f64 {
    vm.guest(&format!("bench mem {seconds}")).parse().unwrap_or(f64::NAN)
}

impl Speeds {
    fn measure(&mut self, vm: &Vm, on: bool, seconds: u64) -> anyhow::Result<()> {
        let daemon = vms::server(vm.host())?;
        let before = (cpu::of_process(vm.pid()), cpu::of_process(daemon));
        let start = Instant::now();
        let pages = speed(vm, seconds);
        let time = start.elapsed().as_secs_f64();
        let qemu = (cpu::of_process(vm.pid()) - before.0).as_secs_f64();
        let daemon_us = us(cpu::of_process(daemon) - before.1) / time;
        let (rate, by_cpu, of_daemon) = match on {
            true => (&mut self.on, &mut self.on_by_cpu, &mut self.daemon),
            false => (&mut self.off, &mut self.off_by_cpu, &mut self.daemon_idle),
        };
        rate.push(pages);
        by_cpu.push(pages * time / qemu);
        of_daemon.push(daemon_us);
        Ok(())
    }

    fn rows(&self, report: &mut Report) {
        let what = "guest's memory benchmark";
        let row = Row::new(format!("{what}, scanned each second"), "pages/s", &self.on);
        report.row(row.against("auto off", &self.off).at_least(SPEED_LIMIT));
        let row = Row::new(format!("{what}, per second of QEMU's CPU"), "pages/s", &self.on_by_cpu);
        report.row(row.against("auto off", &self.off_by_cpu));
        let row = Row::new("the daemon's CPU each second, scanning", "us", &self.daemon);
        report.row(row.against("auto off", &self.daemon_idle));
    }
}
