//! `cargo xtask bench`: what Ebb costs, against the bare system calls and
//! against what QEMU has. What each row means: `docs/benchmarks.md`.
//!
//! Both sides of a ratio run in turn in one process run: what the machine does
//! besides hits both.

mod bare;
mod cpu;
mod dma;
mod fault;
mod footprint;
mod front;
mod handlers;
mod hyperalloc;
mod llfree;
mod memory;
mod reclaim;
mod report;
mod rounds;
mod samples;
mod scan;
mod starve;
mod store;
mod swap;
mod virtio_mem;
mod vm;
mod vtmm;
mod work;

use clap::ValueEnum;
use vmtest::HostSetting;

use crate::guard::guard;
use crate::interrupt;
use report::Report;

#[derive(clap::Args)]
pub struct Args {
    /// Which
    #[arg(value_enum, default_value = "all")]
    name: Name,
    /// Fewer rounds: about a minute each
    #[arg(long)]
    quick: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    /// From a fault's event to its end
    Fault,
    /// Taking free memory, and giving it back
    Reclaim,
    /// Reading the guest's page metadata
    Scan,
    /// What the daemon itself holds
    Memory,
    /// Saving pages to disk and in memory, and loading them
    Store,
    /// What a VM that refills without end costs another one on the same disk
    Starve,
    /// Requests of a disk that cannot wait while free memory is taken
    Dma,
    /// A file read again and again by a guest that is short of memory
    VswapperFig9,
    /// Memory taken by a guest that is short of it
    VswapperFig10,
    /// A compressor in a guest with less and less memory
    VswapperFig11,
    /// More and more guests that share what the host has
    VswapperFig14,
    /// What could rest on the guest's disk, and its page cache
    VswapperFig15,
    /// The guest's disk by Ebb and by QEMU, with memory enough
    VswapperPlentiful,
    /// Getting and putting frames of the allocator that a guest shares with the host
    Llfree,
    /// Taking memory in the allocator that a guest shares, and giving it back
    HyperallocFig4,
    /// Looking there for what is free
    HyperallocScan,
    /// The guest's speed while its VM is made smaller and larger
    HyperallocTab2,
    /// A compile in a guest, and what the host keeps for it
    HyperallocFig7,
    /// Three guests that compile one after the other, and what they take together
    HyperallocFig11,
    /// Two NUMA nodes resized step by step
    VirtioMemTab1,
    /// What Linux keeps metadata for while a guest grows and shrinks
    VirtioMemFig3,
    /// Shrinking with memory that cannot move
    VirtioMemFig5,
    /// A guest's speed while it shrinks
    VirtioMemFig7,
    /// How long growing and shrinking takes
    VirtioMemPlug,
    /// What looking for used memory looks at, and what it costs the guest
    VtmmFig2,
    /// How often pages are found used, and which are found hot
    VtmmFig3,
    /// How many accesses fast memory serves, by who places pages
    VtmmFig5,
    /// How many accesses a guest manages whose memory is mostly swapped out or compressed
    VtmmFig5Fault,
    /// Four VMs with unlike needs, each on its own and in a pool
    VtmmFig8,
    /// Sorting pages by how hot they are
    VtmmSort,
    /// Moving pages between two nodes of memory, and what it costs who uses them
    VtmmTab4,
    /// Each of them
    All,
}

/// A benchmark; `true`: the quick one.
type Bench = fn(bool) -> anyhow::Result<Report>;

const EACH: [(Name, Bench); 31] = [
    (Name::Fault, fault::run),
    (Name::Reclaim, reclaim::run),
    (Name::Scan, scan::run),
    (Name::Memory, memory::run),
    (Name::Store, store::run),
    (Name::Starve, starve::run),
    (Name::Dma, dma::run),
    (Name::VswapperFig9, swap::fig9::run),
    (Name::VswapperFig10, swap::fig10::run),
    (Name::VswapperFig11, swap::fig11::run),
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
    (Name::VtmmFig2, vtmm::fig2::run),
    (Name::VtmmFig3, vtmm::fig3::run),
    (Name::VtmmFig5, vtmm::fig5::run),
    (Name::VtmmFig5Fault, vtmm::fault::run),
    (Name::VtmmFig8, vtmm::fig8::run),
    (Name::VtmmSort, vtmm::sort::run),
    (Name::VtmmTab4, vtmm::tab4::run),
];

/// Runs the benchmarks asked for; a missed goal is no failure.
///
/// # Errors
/// One cannot run here.
pub fn run(args: &Args) -> anyhow::Result<()> {
    interrupt::catch()?;
    // Put back at the end; without it there are rows for small pages only.
    let _huge_pages = HostSetting::shared_huge_pages();
    let wanted = EACH.iter().filter(|(name, _)| args.name == Name::All || args.name == *name);
    for (_, bench) in wanted {
        let report = guard(|| bench(args.quick));
        interrupt::check()?;
        let report = report?;
        report.print();
        println!("{}\n", report.save()?.display());
    }
    Ok(())
}
