//! `cargo xtask bench`: what Ebb costs, against the bare system calls and against what QEMU has.
//! `docs/benchmarks.md` explains each row.
//!
//! Both sides of a ratio run in turn in one process run, so that other activity of the machine
//! affects both.

mod bare;
mod blocks;
mod cpu;
mod dma;
mod fault;
mod footprint;
mod forget;
mod front;
mod handlers;
mod held;
mod hyperalloc;
mod identity;
mod kept;
mod llfree;
mod memory;
mod observe;
mod pilot;
mod reclaim;
mod report;
mod rounds;
mod row;
mod samples;
mod scan;
mod session;
mod starve;
mod stats;
mod store;
mod swap;
mod sweep;
mod taken;
mod virtio_mem;
mod vm;
mod vprobe;
mod vtmm;
mod work;

use std::fs::File;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::ValueEnum;
use rustix::fs::FlockOperation;
use vmtest::HostSetting;

use crate::guard::guard;
use crate::{cargo, interrupt, results};
pub use identity::Identity;
use identity::Machine;
use report::Report;
pub use row::{FAILED, short};
use session::Session;
pub use stats::Interval;

/// Environment variable that names a directory of programs built by somebody else.
const PROGRAMS: &str = "EBB_BIN_DIR";

#[derive(clap::Args)]
pub struct Args {
    /// The benchmark to run
    #[arg(value_enum, default_value = "all", conflicts_with = "all")]
    name: Name,
    /// Run all benchmarks
    #[arg(long)]
    all: bool,
    /// Run fewer rounds, about a minute for each benchmark; no goal is decided
    #[arg(long)]
    quick: bool,
    /// Skip what is finished, of the same build on this machine
    #[arg(long)]
    resume: bool,
    /// Directory of the results, from which `--resume` goes on [default: target/bench, with
    /// `--quick` target/bench/quick]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    /// Seed for the random order of the sides [default: a new one]
    #[arg(long)]
    seed: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    /// Time from the event of a fault to its end
    Fault,
    /// Reclaim of free memory, and its return
    Reclaim,
    /// Reads of the guest's page metadata
    Scan,
    /// Looks at VMs that nobody manages: their cost, and their error
    Observe,
    /// Memory of the daemon itself, and of each VM's process
    Memory,
    /// Emptying QEMU's page table for a limit, by a ring and by injected calls
    Forget,
    /// Saving pages to disk and to compressed memory, and loading them
    Store,
    /// What a VM that refills without end costs another VM on the same disk
    Starve,
    /// Requests of a disk that cannot wait, while free memory is reclaimed
    Dma,
    /// A guest at its limit reads a file again and again
    VswapperFig9,
    /// A guest at its limit allocates memory
    VswapperFig10,
    /// A compressor in guests with less and less memory
    VswapperFig11,
    /// A compiler in guests with less and less memory
    VswapperFig12,
    /// More and more guests that share the host's memory
    VswapperFig14,
    /// Memory that the guest's disk could back, against the guest's page cache
    VswapperFig15,
    /// A disk served by Ebb and by QEMU, with enough memory
    VswapperPlentiful,
    /// Getting and putting frames in the shared allocator (LLFree)
    Llfree,
    /// Reclaim by the shared allocator (HyperAlloc), and its return
    HyperallocFig4,
    /// Search for free huge frames in the shared allocator
    HyperallocScan,
    /// The guest's speed while its VM shrinks and grows
    HyperallocTab2,
    /// A compile in a guest, and the host memory that it takes
    HyperallocFig7,
    /// Three guests that compile one after the other, and the host memory that they take together
    HyperallocFig11,
    /// Two NUMA nodes that are resized step by step
    VirtioMemTab1,
    /// Memory for which Linux keeps page metadata while a guest grows and shrinks
    VirtioMemFig3,
    /// Shrinking a guest that has memory that cannot move
    VirtioMemFig5,
    /// The guest's speed while its VM shrinks
    VirtioMemFig7,
    /// How long growing and shrinking takes
    VirtioMemPlug,
    /// Time to reclaim and to return 2 MiB (V-Probe)
    VprobeFig8,
    /// Download of a large file from a guest whose memory was reclaimed
    VprobeFig9,
    /// A server that takes memory for each datagram, in a guest whose memory was reclaimed
    VprobeFig10,
    /// A database that grows, in a guest whose memory was reclaimed
    VprobeFig11,
    /// Reclaimed blocks that come back although the guest does not use them (V-Probe)
    VprobeSpurious,
    /// How many page-table entries a monitoring visits, and what that costs the guest
    VtmmFig2,
    /// How often pages are found used, and which pages count as hot
    VtmmFig3,
    /// Share of accesses that fast memory serves, by placement policy
    VtmmFig5,
    /// Accesses of a guest whose memory is mostly evicted or compressed
    VtmmFig5Fault,
    /// Four VMs with different needs, each on its own and in a pool
    VtmmFig8,
    /// Sorting pages by degree
    VtmmSort,
    /// Moving pages between two NUMA nodes, and what that costs their users
    VtmmTab4,
    /// What three VMs get done under the pilot, on a host that has too little memory
    PilotWork,
    /// How soon the pilot gives a guest the memory that it misses
    PilotRelief,
    /// What the pilot itself costs
    PilotCost,
    /// All benchmarks
    All,
}

/// A benchmark: takes its figures in a session.
type Bench = fn(&Session) -> anyhow::Result<Report>;

const EACH: [(Name, Bench); 42] = [
    (Name::Fault, fault::run),
    (Name::Reclaim, reclaim::run),
    (Name::Scan, scan::run),
    (Name::Observe, observe::run),
    (Name::Memory, memory::run),
    (Name::Forget, forget::run),
    (Name::Store, store::run),
    (Name::Starve, starve::run),
    (Name::Dma, dma::run),
    (Name::VswapperFig9, swap::fig9::run),
    (Name::VswapperFig10, swap::fig10::run),
    (Name::VswapperFig11, swap::fig11::zstd),
    (Name::VswapperFig12, swap::fig11::compile),
    (Name::VswapperFig14, swap::fig14::run),
    (Name::VswapperFig15, swap::fig15::run),
    (Name::VswapperPlentiful, swap::plentiful::run),
    (Name::Llfree, llfree::run),
    (Name::HyperallocFig4, hyperalloc::fig4),
    (Name::HyperallocScan, hyperalloc::scan),
    (Name::HyperallocTab2, hyperalloc::tab2::run),
    (Name::HyperallocFig7, hyperalloc::fig7::run),
    (Name::HyperallocFig11, hyperalloc::fig11::run),
    (Name::VirtioMemTab1, virtio_mem::tab1),
    (Name::VirtioMemFig3, virtio_mem::fig3),
    (Name::VirtioMemFig5, virtio_mem::fig5),
    (Name::VirtioMemFig7, virtio_mem::fig7),
    (Name::VirtioMemPlug, virtio_mem::plug),
    (Name::VprobeFig8, vprobe::fig8::run),
    (Name::VprobeFig9, vprobe::fig9::run),
    (Name::VprobeFig10, vprobe::fig10::run),
    (Name::VprobeFig11, vprobe::fig11::run),
    (Name::VprobeSpurious, vprobe::spurious::run),
    (Name::VtmmFig2, vtmm::fig2::run),
    (Name::VtmmFig3, vtmm::fig3::run),
    (Name::VtmmFig5, vtmm::fig5::run),
    (Name::VtmmFig5Fault, vtmm::fault::run),
    (Name::VtmmFig8, vtmm::fig8::run),
    (Name::VtmmSort, vtmm::sort::run),
    (Name::VtmmTab4, vtmm::tab4::run),
    (Name::PilotWork, pilot::work::run),
    (Name::PilotRelief, pilot::relief::run),
    (Name::PilotCost, pilot::cost::run),
];

/// Runs the requested benchmarks. A missed goal is no failure. If all are requested, one that
/// cannot run does not stop the others.
///
/// # Errors
/// A benchmark cannot run here.
pub fn run(args: &Args) -> anyhow::Result<()> {
    interrupt::catch()?;
    let _turn = turn()?;
    let _record = sweep::begin()?;
    build()?;
    // The setting is restored at the end. Without it there are rows for small pages only.
    let _huge_pages = HostSetting::shared_huge_pages();
    let directory = args.results.clone().unwrap_or_else(|| match args.quick {
        // Quick runs have a place of their own, so that results of minutes do not replace results
        // of hours.
        true => results::taken().join("quick"),
        false => results::taken(),
    });
    let identity = Identity::here(args.quick);
    let session = Session::new(identity, args.resume, args.seed, directory)?;
    let Machine { cpu, kernel, cores, .. } = &session.identity.machine;
    println!("{cpu}, Linux {kernel}, {cores} cores; seed {}", session.seed);
    let all = args.all || args.name == Name::All;
    let mut failed = Vec::new();
    for (name, bench) in EACH.iter().filter(|(name, _)| all || args.name == *name) {
        let name = name.to_possible_value().map(|value| value.get_name().to_owned());
        let name = name.unwrap_or_default();
        if session.is_finished(&name)? {
            println!("{name}: finished already\n");
            continue;
        }
        println!("{name}");
        let report = guard(|| bench(&session));
        interrupt::check()?;
        match report {
            Ok(mut report) => {
                report.finish(&session);
                report.print();
                println!("{}\n", report.save(&session.directory)?.display());
            }
            // The other benchmarks of a night's run go on.
            Err(why) if all => {
                eprintln!("{name}: {why:#}\n");
                failed.push(name);
            }
            Err(why) => return Err(why),
        }
    }
    ensure!(failed.is_empty(), "not measured: {}", failed.join(", "));
    Ok(())
}

/// Locks out other benchmarks: two at once would measure each other, and undo each other's
/// settings. The lock leaves no file behind.
fn turn() -> anyhow::Result<File> {
    let place = File::open(std::env::temp_dir())?;
    let lock = rustix::fs::flock(&place, FlockOperation::NonBlockingLockExclusive);
    lock.context("another benchmark runs here")?;
    Ok(place)
}

/// Builds the programs, so that the measured ones are those of this tree.
fn build() -> anyhow::Result<()> {
    if std::env::var_os(PROGRAMS).is_some() {
        return Ok(());
    }
    let words = ["build", "--quiet", "--release", "--package", "ebb", "--package", "ebbd"];
    cargo::run(cargo::command().args(words))
}

/// Returns the names of all benchmarks, in the order in which they run.
pub fn names() -> Vec<String> {
    let names = EACH.iter().filter_map(|(name, _)| name.to_possible_value());
    names.map(|value| value.get_name().to_owned()).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::bench::rounds::Rounds;
    use crate::bench::row::{Better, Row};

    /// Returns the JSON of a full run that compares these figures by each kind of row.
    pub fn written(ebb: &[f64], other: &[f64]) -> String {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let place = directory.path().to_owned();
        let session = Session::new(Identity::of_test(), false, Some(1), place).unwrap();
        let [ebb, other] = [ebb, other].map(|side| side.iter().copied().collect::<Rounds>());
        let row = || Row::new("x", "s", &ebb);
        let best = [("y".to_owned(), other.clone())];
        let mut report = Report::new("x");
        report.row(row().against("y", &other).at_most(1.0));
        report.row(row().against_vms("y", &other));
        report.row(row().against_best(&best, Better::Less).at_most(1.0));
        report.finish(&session);
        std::fs::read_to_string(report.save(&session.directory).unwrap()).unwrap()
    }

    #[test]
    fn each_benchmark_is_there_once() {
        let names: std::collections::BTreeSet<String> = names().into_iter().collect();
        // The name for all of them is not in the list.
        assert_eq!(names.len(), Name::value_variants().len() - 1);
    }
}
