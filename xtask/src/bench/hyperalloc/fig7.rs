//! Figures 7 and 8: a compile in a guest, then its results go, then the guest's page cache;
//! and how much of the host's memory the guest keeps meanwhile.

use std::path::Path;
use std::time::Duration;

use vmtest::{Disk, Host, Vm, assets};

use super::keeper::{self, Keeper, Setup};
use crate::bench::footprint::{Course, Footprint};
use crate::bench::report::Report;
use crate::bench::rounds::Rounds;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::{cpu, vm as vms, work};
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 2048;
const CPUS: u32 = 2;
const DISK: &str = "2G";
/// Of free page reporting's footprint.
const FOOTPRINT_MOST: f64 = 0.75;
/// Of what it keeps in the end.
const KEPT_MOST: f64 = 0.5;
/// LLFree's part of the buddy allocator's time, to either side.
const TIME_OFF: f64 = 0.03;
/// Ebb's first.
pub const KEEPERS: [Keeper; 5] =
    [Keeper::HyperAlloc, Keeper::Reporting, Keeper::VProbe, Keeper::Llfree, Keeper::Buddy];

const ROUNDS: usize = 5;
/// So long nothing is done after each step.
const REST: Duration = Duration::from_secs(40);

/// What became of one keeper's guests.
struct Run {
    keeper: Keeper,
    compile_s: Rounds,
    cpu_s: Rounds,
    cpu_all_s: Rounds,
    footprint: Rounds,
    peak_mib: Rounds,
    /// After the compile, `make clean`, and without page cache.
    kept_mib: [Rounds; 3],
    /// What the guest's allocator has given out then, and was not returned; of HyperAlloc.
    used_mib: [Rounds; 3],
    /// Of the last round.
    course: Option<Footprint>,
}

/// Runs it.
///
/// # Errors
/// There is no such kernel, or no Debian to run.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let quick = session.identity.quick;
    let mut report = Report::new("hyperalloc-fig7");
    let rounds = if quick { 1 } else { ROUNDS };
    keeper::note_kernels(&mut report)?;
    report.note(format!(
        "Three compiles of Lua at once in a guest of {MEMORY_MIB} MiB, {} s of rest, make clean, rest, no page \
         cache, rest; {rounds} rounds.",
        REST.as_secs(),
    ));
    let ground = Host::new();
    let image = image(&ground)?;
    let mut runs = KEEPERS.map(Run::new);
    for round in 0..rounds {
        for run in session.in_turn(&mut runs, &format!("hyperalloc-fig7, {round}")) {
            run.measure(&mut report, image.image(), round == 0)?;
        }
    }
    rows(&mut report, &runs);
    plot(&report, &runs)?;
    Ok(report)
}

/// A disk with a small Debian, for guests to start from again and again.
///
/// # Errors
/// There is no Debian.
pub fn image(ground: &Host) -> anyhow::Result<Disk> {
    let archive = assets::userland().map_err(anyhow::Error::msg)?;
    crate::guard::guard(|| Ok(Disk::new(ground, "debian", DISK).formatted("ext4").filled(&archive)))
}

impl Run {
    fn new(keeper: Keeper) -> Run {
        let new = Rounds::default;
        Run {
            keeper,
            compile_s: new(),
            cpu_s: new(),
            cpu_all_s: new(),
            footprint: new(),
            peak_mib: new(),
            kept_mib: [new(), new(), new()],
            used_mib: [new(), new(), new()],
            course: None,
        }
    }

    fn measure(&mut self, report: &mut Report, image: &Path, note: bool) -> anyhow::Result<()> {
        let setup = Setup { memory_mib: MEMORY_MIB, cpus: CPUS, image: Some(image) };
        let vm = self.keeper.start(&Host::new(), &setup);
        self.keeper.automatic(&vm);
        let before = cpu_time(&vm, self.keeper);
        let daemon = self.keeper.is_ebb().then(|| vm.host());
        let ((), course) =
            Footprint::during(&[&vm], daemon, |course| self.work(&vm, course, before))?;
        self.cpu_all_s.push((cpu_time(&vm, self.keeper) - before).as_secs_f64());
        self.footprint.push(course.gib_s());
        self.peak_mib.push(course.peak_gib() * 1024.0);
        if note {
            vms::note_backing(report, self.keeper.name(), &vm);
        }
        self.course = Some(course);
        Ok(())
    }

    fn work(&mut self, vm: &Vm, course: &Course, cpu_before: Duration) -> anyhow::Result<()> {
        course.mark("compile");
        self.compile_s.push(work::seconds(vm, &format!("program /mnt {}", work::COMPILE_WIDE))?);
        self.cpu_s.push((cpu_time(vm, self.keeper) - cpu_before).as_secs_f64());
        course.mark("rest");
        course.rest(REST)?;
        self.note_kept(0, vm);
        course.mark("make clean");
        work::seconds(vm, &format!("program /mnt {}", work::CLEAN_WIDE))?;
        course.rest(REST)?;
        self.note_kept(1, vm);
        course.mark("drop caches");
        vm.guest("sh busybox sync");
        vm.guest("dropcaches");
        course.rest(REST)?;
        self.note_kept(2, vm);
        Ok(())
    }

    fn note_kept(&mut self, step: usize, vm: &Vm) {
        self.kept_mib[step].push(mib(vm));
        if self.keeper == Keeper::HyperAlloc
            && let Some(all) = vm.status().sharing.fragmentation
        {
            let kinds = [all.unmovable, all.movable, all.huge];
            let used: u64 = kinds.iter().map(|kind| kind.used_bytes).sum();
            self.used_mib[step].push(used as f64 / f64::from(1 << 20));
        }
    }
}

fn mib(vm: &Vm) -> f64 {
    vm.host_bytes() as f64 / f64::from(1 << 20)
}

/// QEMU's, and the daemon's where it holds the VM.
fn cpu_time(vm: &Vm, keeper: Keeper) -> Duration {
    let daemon = vm.host().daemon().filter(|_| keeper.is_ebb());
    cpu::of_all(vm.pid()) + daemon.map(cpu::of_all).unwrap_or_default()
}

/// One keeper against another.
fn row(
    what: &str,
    unit: &'static str,
    of: &dyn Fn(&Run) -> &Rounds,
    [one, other]: [&Run; 2],
) -> Row {
    let what = format!("{what}, {}", one.keeper.name());
    Row::new(what, unit, of(one)).against(other.keeper.name(), of(other))
}

fn rows(report: &mut Report, runs: &[Run; 5]) {
    let [ebb, reporting, vprobe, llfree, buddy] = runs;
    let against = [reporting, vprobe, llfree, buddy];
    for other in against {
        let row = row("footprint", "GiB-s", &|run| &run.footprint, [ebb, other]);
        let is_goal = other.keeper == Keeper::Reporting;
        report.row(if is_goal { row.at_most(FOOTPRINT_MOST) } else { row });
    }
    report.row(row("footprint", "GiB-s", &|run| &run.footprint, [vprobe, reporting]));
    for other in against {
        report.row(row("peak", "MiB", &|run| &run.peak_mib, [ebb, other]));
    }
    for (step, what) in ["compiled", "make clean", "no page cache"].into_iter().enumerate() {
        for other in against {
            let row = row(what, "MiB", &|run| &run.kept_mib[step], [ebb, other]);
            let is_goal = step == 2 && other.keeper == Keeper::Reporting;
            report.row(if is_goal { row.at_most(KEPT_MOST) } else { row });
        }
        let kept = Row::new(format!("{what}, HyperAlloc"), "MiB", &ebb.kept_mib[step]);
        report.row(kept.against("of it in use", &ebb.used_mib[step]));
    }
    let times = [[ebb, llfree], [reporting, buddy], [vprobe, buddy], [llfree, buddy]];
    for pair in times {
        let row = row("compile, guest's time", "s", &|run| &run.compile_s, pair);
        let is_goal = pair[0].keeper == Keeper::Llfree;
        report.row(if is_goal { row.within(TIME_OFF) } else { row });
    }
    for pair in times {
        report.row(row("compile, host's CPU", "s", &|run| &run.cpu_s, pair));
    }
    for pair in times {
        report.row(row("all, host's CPU", "s", &|run| &run.cpu_all_s, pair));
    }
}

fn plot(report: &Report, runs: &[Run; 5]) -> anyhow::Result<()> {
    let courses = || runs.iter().filter_map(|run| Some((run.keeper, run.course.as_ref()?)));
    let series = courses().map(|(keeper, course)| Series {
        name: keeper.name().into(),
        points: course.points().into(),
        is_bound: false,
    });
    let panel = Panel {
        series: series.collect(),
        marks: courses().next().map(|(_, course)| course.marks().into()).unwrap_or_default(),
        ..Panel::default()
    };
    let title = "The host's memory of a guest that compiles (HyperAlloc, fig. 8)";
    let (x_label, y_label) = ("s", "GiB");
    report.plot(&Figure { title, x_label, y_label, panels: &[panel] })
}
