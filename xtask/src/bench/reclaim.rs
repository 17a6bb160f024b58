//! Reclaiming the memory that a guest has freed, and giving it back: a guest of 4 GiB fills 3 GiB
//! and frees them.
//!
//! When the guest fills memory again, that memory should have been in use just before, as with the
//! bare system calls: see [`feeding`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ebb_api::VmStatus;
use ebb_units::HUGE_BYTES;
use vmtest::{Host, Vm};

use super::bare::{self, Bare};
use super::report::Report;
use super::rounds::{Rounds, us};
use super::row::Row;
use super::session::Session;
use super::vm::{GIB, balloon, balloon_bytes, guest};
use super::{cpu, vm as vms};
use crate::interrupt;

const FREE: &str = "free a";
const RECLAIM_LIMIT: f64 = 2.0;
const RETURN_LIMIT: f64 = 1.5;
/// Goal against the balloon: 50 times as fast.
const BALLOON_LIMIT: f64 = 0.02;
/// Bytes of stock that are released before the VM asks for them.
const AHEAD_BYTES: u64 = 32 << 20;
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Bytes that a guest with a balloon keeps.
const BALLOON_KEEPS_BYTES: u64 = 128 << 20;
/// Longest wait for a balloon. One that has not given the memory by then never will.
const BALLOON_DEADLINE: Duration = Duration::from_secs(120);

/// Sizes and numbers of rounds.
struct Scale {
    guest_gib: u64,
    fill: &'static str,
    rounds: usize,
    /// Rounds against QEMU's own means.
    qemu_rounds: usize,
}

const FULL: Scale = Scale { guest_gib: 4, fill: "fill a 3G", rounds: 5, qemu_rounds: 5 };
const QUICK: Scale = Scale { guest_gib: 2, fill: "fill a 1G", rounds: 2, qemu_rounds: 1 };

/// A kind of VM.
#[derive(Clone, Copy)]
struct Setting {
    backing: &'static str,
    strict: bool,
}

impl Setting {
    fn is_huge(self) -> bool {
        self.backing == "thp"
    }

    fn mode(self) -> &'static str {
        if self.strict { "strict" } else { "release" }
    }
}

/// Runs the benchmark.
///
/// # Errors
/// There is not enough memory.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("reclaim");
    let scale = if quick { QUICK } else { FULL };
    report
        .note(format!("A guest of {} GiB that fills ({}) and frees.", scale.guest_gib, scale.fill));
    if bare::free_memory_goes_cold() {
        report.note(
            "The hypervisor below takes free memory back within seconds, and is slow to give it \
             again: memory is handed to the guest warm; what QEMU's rows wait for is punching only.",
        );
    }
    let backings = vms::backings(&mut report);
    let wanted = if quick { &backings[..1] } else { &backings[..] };
    for &backing in wanted {
        for strict in [false, true] {
            let setting = Setting { backing, strict };
            let compare = !strict && backing == backings[0];
            measure(&mut report, setting, &scale, compare)?;
        }
    }
    Ok(report)
}

fn measure(
    report: &mut Report,
    setting: Setting,
    scale: &Scale,
    compare: bool,
) -> anyhow::Result<()> {
    let wanted = guest(scale.guest_gib).backing(setting.backing).mode(setting.mode());
    let vm = Host::new().run(wanted.qemu_args("-device virtio-balloon-pci"));
    let name = format!("{}, {}", setting.backing, setting.mode());
    vm.guest(scale.fill);
    vms::note_backing(report, &name, &vm);
    vm.guest(FREE);
    let mut figures = Figures::default();
    for _ in 0..scale.rounds {
        round(&vm, setting, scale, &mut figures)?;
    }
    figures.rows(report, &name, setting);
    if compare {
        against_qemu(report, &vm, setting, scale, &figures)?;
    }
    Ok(())
}

/// Times per 2 MiB in microseconds, and of whole commands in seconds.
#[derive(Default)]
struct Figures {
    saved_gib: Rounds,
    command_s: Rounds,
    inside_s: Rounds,
    reclaim: Rounds,
    scan: Rounds,
    punch: Rounds,
    reclaim_rate: Rounds,
    punch_rate: Rounds,
    given_back: Rounds,
    fault_cpu: Rounds,
    populate: Rounds,
    first_touch: Rounds,
    refill_s: Rounds,
    resident_fill_s: Rounds,
}

/// Runs a round. The guest's memory is free and resident, before and after.
fn round(vm: &Vm, setting: Setting, scale: &Scale, figures: &mut Figures) -> anyhow::Result<()> {
    let confined = together(vm)?;
    let kernel_before = cpu::in_kernel(vm.pid());
    figures.resident_fill_s.push(vms::timed(vm, scale.fill).as_secs_f64());
    let resident_kernel = cpu::in_kernel(vm.pid()) - kernel_before;
    vm.guest(FREE);
    drop(confined);
    if setting.strict {
        vms::restart_daemon(vm);
    }
    let saved = take(vm, figures);
    let beside = Bare::new(saved, setting.is_huge())?;
    beside.touch();
    figures.bare(&beside.measure()?, saved);

    let _confined = together(vm)?;
    let fault_thread = fault_thread(vm)?;
    let (cpu_before, kernel_before) = (fault_thread.ran(), cpu::in_kernel(vm.pid()));
    let refill = feeding(&beside, vm, || vms::timed(vm, scale.fill))?;
    figures.refill_s.push(refill.as_secs_f64());
    let cpu = fault_thread.ran() - cpu_before;
    let kernel = cpu::in_kernel(vm.pid()) - kernel_before;
    if setting.strict {
        let status = vm.status();
        figures.given_back.push(restore_us(&status));
        figures.fault_cpu.push(per_huge(cpu, status.returned_total_bytes));
    } else {
        figures.given_back.push(per_huge(kernel.saturating_sub(resident_kernel), saved));
    }
    vm.guest(FREE);
    Ok(())
}

/// Confines the processes that release and take memory to one processor.
fn together(vm: &Vm) -> anyhow::Result<cpu::Together> {
    let me = std::process::id() as i32;
    Ok(cpu::Together::new(&[me, vm.pid(), vms::server(vm.host())?])?)
}

/// While the VM takes memory, releases as much of `stock` just before: memory that stays free for
/// long may be reclaimed from this machine.
fn feeding<T>(stock: &Bare, vm: &Vm, work: impl FnOnce() -> T) -> anyhow::Result<T> {
    let done = AtomicBool::new(false);
    let feed = || {
        let (before, mut fed) = (vm.host_bytes(), 0);
        while !done.load(Ordering::Relaxed) {
            let taken = vm.host_bytes().saturating_sub(before);
            let due = (taken + AHEAD_BYTES).min(stock.guest.bytes()) & !(HUGE_BYTES - 1);
            if due > fed {
                stock.file.punch(fed, due - fed)?;
                fed = due;
            }
            thread::sleep(LOOK_EVERY);
        }
        std::io::Result::Ok(())
    };
    thread::scope(|scope| {
        let feeder = scope.spawn(feed);
        let result = work();
        done.store(true, Ordering::Relaxed);
        feeder.join().map_err(|_| anyhow::anyhow!("the feeding thread died"))??;
        Ok(result)
    })
}

/// Reclaims free memory. Returns how much of it the host got.
fn take(vm: &Vm, figures: &mut Figures) -> u64 {
    let before = vm.host_bytes();
    let start = Instant::now();
    let taken = vm.reclaim();
    figures.command_s.push(start.elapsed().as_secs_f64());
    let saved = before.saturating_sub(vm.host_bytes());
    let time = Duration::from_nanos(taken.duration_ns);
    figures.inside_s.push(time.as_secs_f64());
    figures.reclaim.push(per_huge(time, saved));
    figures.scan.push(per_huge(Duration::from_nanos(taken.scan_ns), saved));
    figures.reclaim_rate.push(gib(saved) / time.as_secs_f64());
    figures.saved_gib.push(gib(saved));
    saved
}

/// Returns the median fault's time for 2 MiB of the mean restored block, in microseconds. The
/// daemon's counters must have begun just before the memory was reclaimed.
fn restore_us(status: &VmStatus) -> f64 {
    let blocks = status.faults.metadata as f64;
    let huge_frames = status.returned_total_bytes as f64 / HUGE_BYTES as f64;
    status.fault_ns.p50.unwrap_or(0) as f64 / 1e3 * blocks / huge_frames
}

fn fault_thread(vm: &Vm) -> anyhow::Result<cpu::Thread> {
    let threads = cpu::threads(vms::server(vm.host())?);
    let fault = threads.into_iter().find(|thread| thread.name == "fault");
    fault.ok_or_else(|| anyhow::anyhow!("the daemon has no fault thread"))
}

fn per_huge(time: Duration, bytes: u64) -> f64 {
    us(time) / (bytes.max(1) as f64 / HUGE_BYTES as f64)
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

impl Figures {
    fn bare(&mut self, times: &bare::Times, bytes: u64) {
        self.punch.push(per_huge(times.punch, bytes));
        self.punch_rate.push(gib(bytes) / times.punch.as_secs_f64());
        self.populate.push(per_huge(times.populate, bytes));
        self.first_touch.push(per_huge(times.first_touch, bytes));
    }

    fn rows(&self, report: &mut Report, name: &str, setting: Setting) {
        let punch = "punch, 64 MiB a call";
        let row = |what: &str, unit, ebb| Row::new(format!("{name}: {what}"), unit, ebb);
        report.row(
            row("reclaim, per 2 MiB", "us", &self.reclaim)
                .against(punch, &self.punch)
                .at_most(RECLAIM_LIMIT),
        );
        report.row(row("of that the scan", "us", &self.scan));
        report.row(row("reclaim", "GiB/s", &self.reclaim_rate).against(punch, &self.punch_rate));
        let given_back = match setting.strict {
            true => row("return, per 2 MiB, by fault_ns.p50", "us", &self.given_back)
                .against("MADV_POPULATE_WRITE", &self.populate),
            false => row("return, per 2 MiB, by QEMU's kernel time", "us", &self.given_back)
                .against("first touch", &self.first_touch),
        };
        report.row(if setting.is_huge() { given_back.at_most(RETURN_LIMIT) } else { given_back });
        if setting.strict {
            let cpu = row("return, per 2 MiB, fault thread's CPU", "us", &self.fault_cpu);
            report.row(cpu.against("MADV_POPULATE_WRITE", &self.populate));
        }
        let refill = row("guest fills it again", "s", &self.refill_s);
        report.row(refill.against("nothing was taken", &self.resident_fill_s));
    }
}

/// Compares with the same saving by QEMU's own means.
fn against_qemu(
    report: &mut Report,
    vm: &Vm,
    setting: Setting,
    scale: &Scale,
    figures: &Figures,
) -> anyhow::Result<()> {
    let wanted = (figures.saved_gib.median() * GIB as f64) as u64;
    let guest_bytes = scale.guest_gib * GIB;
    let mut balloons = Qemu::default();
    for round in 0..scale.qemu_rounds {
        if round > 0 {
            vm.guest(scale.fill);
            vm.guest(FREE);
        }
        let keep = vm.status().guest_free_bytes.unwrap_or(0).saturating_sub(BALLOON_KEEPS_BYTES);
        balloons.measure(vm, wanted, || balloon(vm, guest_bytes - keep))?;
        balloon(vm, guest_bytes);
        vmtest::until("the balloon's end", || (balloon_bytes(vm) == guest_bytes).then_some(()));
    }
    let mut reports = Qemu::default();
    let plain = let_go(setting, scale);
    for _ in 0..scale.qemu_rounds {
        plain.guest(scale.fill);
        reports.measure(&plain, wanted, || drop(plain.guest(FREE)))?;
    }
    balloons.rows(report, setting, figures, "virtio-balloon", Some(BALLOON_LIMIT));
    reports.rows(report, setting, figures, "free page reporting", None);
    Ok(())
}

/// Starts a VM with memory of the same kind that nobody manages, and whose guest reports its free
/// pages.
fn let_go(setting: Setting, scale: &Scale) -> Vm {
    let device = "-device virtio-balloon-pci,free-page-reporting=on";
    let wanted = guest(scale.guest_gib).backing(setting.backing).qemu_args(device);
    let vm = Host::new().run(wanted);
    vm.detach();
    vm
}

#[derive(Default)]
struct Qemu {
    whole_s: Rounds,
    /// QEMU's time in the kernel. It covers all threads, because the accelerator determines which
    /// of them serves a device.
    host_s: Rounds,
    got_gib: Rounds,
    wanted_gib: f64,
}

impl Qemu {
    /// Measures from `begin` until the host has `wanted` more memory.
    fn measure(&mut self, vm: &Vm, wanted: u64, begin: impl FnOnce()) -> anyhow::Result<()> {
        let (before, kernel_before) = (vm.host_bytes(), cpu::in_kernel(vm.pid()));
        let start = Instant::now();
        begin();
        let got = loop {
            let got = before.saturating_sub(vm.host_bytes());
            if got >= wanted || start.elapsed() > BALLOON_DEADLINE {
                break got;
            }
            interrupt::check()?;
            thread::sleep(Duration::from_millis(5));
        };
        self.whole_s.push(start.elapsed().as_secs_f64());
        self.host_s.push((cpu::in_kernel(vm.pid()) - kernel_before).as_secs_f64());
        self.got_gib.push(gib(got));
        self.wanted_gib = gib(wanted);
        Ok(())
    }

    fn rows(
        &self,
        report: &mut Report,
        setting: Setting,
        figures: &Figures,
        name: &str,
        limit: Option<f64>,
    ) {
        if self.got_gib.min() < self.wanted_gib {
            report.note(format!(
                "{name} gave only {:.2} of {:.2} GiB in {} s, where it was stopped.",
                self.got_gib.min(),
                self.wanted_gib,
                BALLOON_DEADLINE.as_secs()
            ));
        }
        let what = format!(
            "{}, {}: {:.2} GiB to the host",
            setting.backing,
            setting.mode(),
            self.wanted_gib
        );
        let whole = Row::new(&what, "s", &figures.command_s).against(name, &self.whole_s);
        report.row(match limit {
            Some(limit) => whole.at_most(limit),
            None => whole,
        });
        let host = Row::new(format!("{what}, host's part"), "s", &figures.inside_s);
        report.row(host.against(format!("{name}, QEMU's kernel time"), &self.host_s));
    }
}
