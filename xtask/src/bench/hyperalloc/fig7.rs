//! Figures 7 and 8: a guest compiles, then removes the results, then drops its page cache; and how
//! much of the host's memory the guest keeps meanwhile.

use std::path::Path;
use std::time::Duration;

use vmtest::{Disk, Host, Vm, assets};

use super::keeper::{self, Keeper, Setup};
use crate::bench::blocks::{Blocks, Taken};
use crate::bench::footprint::{self, Course, Footprint};
use crate::bench::kept::{Figures, add};
use crate::bench::report::Report;
use crate::bench::row::Row;
use crate::bench::session::Session;
use crate::bench::{cpu, vm as vms, work};
use crate::plot::{Figure, Panel, Series};

const MEMORY_MIB: u64 = 2048;
const CPUS: u32 = 2;
/// Numbers of vCPUs with which the two allocators are compared, too, with nothing reclaimed.
const MORE_CPUS: [u32; 2] = [1, 4];
const DISK: &str = "2G";
/// Goal: largest footprint, as a ratio to free page reporting's.
const FOOTPRINT_MOST: f64 = 0.75;
/// Goal: most memory kept in the end, as a ratio to free page reporting's.
const KEPT_MOST: f64 = 0.5;
/// Goal: most memory at any time with LLFree, as a ratio to the buddy allocator's.
const PEAK_MOST: f64 = 1.0;
/// Goal: largest difference of LLFree's time from the buddy allocator's, to either side, as a part
/// of that.
const TIME_OFF: f64 = 0.01;
/// The sides. Ebb's comes first.
const KEEPERS: [Keeper; 5] =
    [Keeper::HyperAlloc, Keeper::Reporting, Keeper::VProbe, Keeper::Llfree, Keeper::Buddy];
/// The sides that compare the allocators.
const ALLOCATORS: [Keeper; 2] = [Keeper::Llfree, Keeper::Buddy];

const NAME: &str = "hyperalloc-fig7";
/// VMs of each keeper: in a quick run, and in a full one.
const BLOCKS: [usize; 2] = [1, 5];
/// Pause after each step.
const REST: Duration = Duration::from_secs(20);
/// Longest time for a compile by one vCPU.
const PATIENCE: Duration = Duration::from_secs(600);
/// Names of the steps.
const STEPS: [&str; 3] = ["compiled", "make clean", "no page cache"];
/// Names of the figures of the host memory that the guest has after the pause of each step.
const KEPT: [&str; 3] = ["kept-compiled", "kept-clean", "kept-no-cache"];
/// Names of the figures of what the guest's allocator has given out and not got back after the
/// pause of each step, with HyperAlloc.
const USED: [&str; 3] = ["used-compiled", "used-clean", "used-no-cache"];
/// Prefix of the names of marks.
const MARK: &str = "mark ";

/// Runs the benchmark.
///
/// # Errors
/// There is no such kernel, or no Debian to run.
pub fn run(session: &Session) -> anyhow::Result<Report> {
    let mut report = Report::new(NAME);
    let mut blocks = Blocks::open(session, NAME)?;
    report.seeded(blocks.seed());
    let count = BLOCKS[usize::from(!session.identity.quick)];
    keeper::note_kernels(&mut report)?;
    report.note(format!(
        "Two compiles of Lua at once in a guest of {MEMORY_MIB} MiB, {} s of rest, make clean, rest, \
         no page cache, rest; {count} VMs of each keeper. With 1 and 4 vCPUs: the compiles alone.",
        REST.as_secs(),
    ));
    let ground = Host::new();
    let image = image(&ground)?;
    let sides = (&KEEPERS[..], |keeper: Keeper| keeper.name().to_owned());
    let taken =
        blocks.take(&mut report, "compiles", sides, count, |keeper| one(keeper, image.image()))?;
    rows(&mut report, &taken);
    for cpus in MORE_CPUS {
        let sides = (&ALLOCATORS[..], |keeper: Keeper| keeper.name().to_owned());
        let taken = blocks.take(&mut report, &vcpus(cpus), sides, count, |keeper| {
            compiled(keeper, image.image(), cpus)
        })?;
        allocators(&mut report, cpus, &taken);
    }
    plot(&report, &taken)?;
    Ok(report)
}

fn vcpus(count: u32) -> String {
    if count == 1 { "1 vCPU".into() } else { format!("{count} vCPUs") }
}

/// Makes a disk with a small Debian, from which guests start again and again.
///
/// # Errors
/// There is no Debian.
pub fn image(ground: &Host) -> anyhow::Result<Disk> {
    let archive = assets::userland().map_err(anyhow::Error::msg)?;
    crate::guard::guard(|| Ok(Disk::new(ground, "debian", DISK).formatted("ext4").filled(&archive)))
}

fn one(keeper: Keeper, image: &Path) -> anyhow::Result<Figures> {
    let setup = Setup { memory_mib: MEMORY_MIB, cpus: CPUS, image: Some(image) };
    let vm = keeper.start(&Host::new(), &setup);
    keeper.automatic(&vm);
    let mut figures = Figures::new();
    let before = cpu_time(&vm, keeper);
    let daemon = keeper.is_ebb().then(|| vm.host());
    let work = |course: &Course| work(&vm, keeper, course, &mut figures);
    let ((), course) = Footprint::during(&[&vm], daemon, work)?;
    let mut add = |name: &str, figure: f64| add(&mut figures, name, figure);
    add("cpu-all", (cpu_time(&vm, keeper) - before).as_secs_f64());
    add("footprint", course.gib_s());
    add("peak", course.peak_gib() * 1024.0);
    add("huge-percent", vms::huge_percent(&vm));
    course.add_to(&mut figures, MARK);
    Ok(figures)
}

/// Compiles, and does no more.
fn compiled(keeper: Keeper, image: &Path, cpus: u32) -> anyhow::Result<Figures> {
    let setup = Setup { memory_mib: MEMORY_MIB, cpus, image: Some(image) };
    let vm = keeper.start(&Host::new(), &setup);
    vm.console().be_patient(PATIENCE);
    let compile = format!("program /mnt {}", work::COMPILE_WIDE);
    let (seconds, course) = Footprint::during(&[&vm], None, |_| work::seconds(&vm, &compile))?;
    let mut figures = Figures::new();
    add(&mut figures, "compile", seconds);
    add(&mut figures, "peak", course.peak_gib() * 1024.0);
    Ok(figures)
}

fn work(vm: &Vm, keeper: Keeper, course: &Course, figures: &mut Figures) -> anyhow::Result<()> {
    let before = cpu_time(vm, keeper);
    course.mark("compile");
    let seconds = work::seconds(vm, &format!("program /mnt {}", work::COMPILE_WIDE))?;
    add(figures, "compile", seconds);
    add(figures, "cpu-compile", (cpu_time(vm, keeper) - before).as_secs_f64());
    course.mark("rest");
    course.rest(REST)?;
    add_kept(figures, 0, vm, keeper);
    course.mark("make clean");
    work::seconds(vm, &format!("program /mnt {}", work::CLEAN_WIDE))?;
    course.rest(REST)?;
    add_kept(figures, 1, vm, keeper);
    course.mark("drop caches");
    vm.guest("sh busybox sync");
    vm.guest("dropcaches");
    course.rest(REST)?;
    add_kept(figures, 2, vm, keeper);
    Ok(())
}

fn add_kept(figures: &mut Figures, step: usize, vm: &Vm, keeper: Keeper) {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    add(figures, KEPT[step], mib(vm.host_bytes()));
    if keeper == Keeper::HyperAlloc
        && let Some(all) = vm.status().sharing.fragmentation
    {
        let kinds = [all.unmovable, all.movable, all.huge];
        add(figures, USED[step], mib(kinds.iter().map(|kind| kind.used_bytes).sum()));
    }
}

/// Returns QEMU's processor time, with the daemon's if it manages the VM.
fn cpu_time(vm: &Vm, keeper: Keeper) -> Duration {
    let ebbds = if keeper.is_ebb() { vm.host().ebbds() } else { Vec::new() };
    cpu::of_all(vm.pid()) + ebbds.into_iter().map(cpu::of_all).sum::<Duration>()
}

/// Makes a row of one keeper against another.
fn row(
    (what, unit): (&str, &'static str),
    figure: &str,
    [one, other]: [Keeper; 2],
    taken: &Taken,
) -> Row {
    let [of_one, of_other] = [one, other].map(|keeper| taken.rounds(keeper.name(), figure));
    let row = Row::new(format!("{what}, {}", one.name()), unit, &of_one);
    let failed = if one == KEEPERS[0] { taken.failed() } else { 0 };
    row.failed(failed).against_vms(other.name(), &of_other)
}

fn rows(report: &mut Report, taken: &Taken) {
    let [ebb, reporting, vprobe, llfree, buddy] = KEEPERS;
    let against = [reporting, vprobe, llfree, buddy];
    for other in against {
        let row = row(("footprint", "GiB-s"), "footprint", [ebb, other], taken);
        report.row(if other == reporting { row.at_most(FOOTPRINT_MOST) } else { row });
    }
    report.row(row(("footprint", "GiB-s"), "footprint", [vprobe, reporting], taken));
    for other in against {
        report.row(row(("peak", "MiB"), "peak", [ebb, other], taken));
    }
    report.row(row(("peak", "MiB"), "peak", ALLOCATORS, taken).at_most(PEAK_MOST));
    for (step, what) in STEPS.into_iter().enumerate() {
        for other in against {
            let row = row((what, "MiB"), KEPT[step], [ebb, other], taken);
            let is_goal = step == 2 && other == reporting;
            report.row(if is_goal { row.at_most(KEPT_MOST) } else { row });
        }
        let [kept, used] = [KEPT, USED].map(|figures| taken.rounds(ebb.name(), figures[step]));
        let kept = Row::new(format!("{what}, HyperAlloc"), "MiB", &kept);
        report.row(kept.against_vms("of it in use", &used));
    }
    let times = [[ebb, llfree], [reporting, buddy], [vprobe, buddy], [llfree, buddy]];
    for pair in times {
        let row = row(("compile, guest's time", "s"), "compile", pair, taken);
        report.row(if pair[0] == llfree { row.within(TIME_OFF) } else { row });
    }
    for pair in times {
        report.row(row(("compile, host's CPU", "s"), "cpu-compile", pair, taken));
    }
    for pair in times {
        report.row(row(("all, host's CPU", "s"), "cpu-all", pair, taken));
    }
    for keeper in KEEPERS {
        let huge = taken.rounds(keeper.name(), "huge-percent").median();
        report.note(format!(
            "{}: {huge:.0} % of what QEMU has mapped are huge pages.",
            keeper.name()
        ));
    }
}

/// Adds the rows that compare the allocators with this number of vCPUs.
fn allocators(report: &mut Report, cpus: u32, taken: &Taken) {
    let compared = |what: &str, unit, figure| {
        let what = format!("{}: {what}", vcpus(cpus));
        row((what.as_str(), unit), figure, ALLOCATORS, taken).failed(taken.failed())
    };
    report.row(compared("peak", "MiB", "peak").at_most(PEAK_MOST));
    report.row(compared("compile, guest's time", "s", "compile").within(TIME_OFF));
}

/// Draws the last block.
fn plot(report: &Report, taken: &Taken) -> anyhow::Result<()> {
    let series = taken.names().map(|name| Series {
        name: name.into(),
        points: footprint::points(taken, name),
        is_bound: false,
    });
    let panel = Panel {
        series: series.collect(),
        marks: footprint::marks(taken, KEEPERS[0].name(), MARK),
        ..Panel::default()
    };
    let title = "The host's memory of a guest that compiles (HyperAlloc, fig. 8)";
    let (x_label, y_label) = ("s", "GiB");
    report.plot(&Figure { title, x_label, y_label, panels: &[panel] })
}
