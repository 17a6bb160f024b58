//! The command line. Help, man pages and completions all come from here.

mod config;
mod events;
mod jobs;
mod observe;
mod top;

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use ebb_api::{
    Backing, DiskRequest, Mode, OnViolation, PilotMode, ReclaimWhen, SizeMechanism, VmClass,
    VmName, route,
};
use ebb_units::Bytes;

pub use self::config::{Config, ConfigCommand};
pub use self::events::Events;
pub use self::jobs::{Jobs, JobsCommand};
pub use self::top::Top;
use crate::below::Below;
use crate::interval::Interval;
use crate::remote;
pub use observe::Observe;

/// Elastic memory for VMs: unused memory goes to the host, and comes back on touch
///
/// Sizes are written as 4096, 64K, 512M, 2G or 1.5GiB. All commands but `observe`, `discover`,
/// `simulate`, `config`, `doctor`, `report`, `completions`, `man` and `help` ask the daemon `ebbd`,
/// and start it if it does not run. Only `run`, `attach`, `pool SIZE`, `calibrate` and `pilot` with
/// a setting make a run directory.
#[derive(Parser)]
#[command(name = "ebb", version, max_term_width = 100)]
pub struct Args {
    /// Where the daemon keeps its socket and records
    #[arg(long, global = true, env = "EBB_RUN_DIR", value_name = "DIR")]
    #[arg(default_value = route::RUN_DIR_DEFAULT)]
    pub run_dir: PathBuf,
    #[command(flatten)]
    pub remote: remote::Options,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Show what the guests of this host use their memory for, without touching them
    Observe(Observe),
    /// Show every QEMU of this host, and what stands in the way of managing it
    Discover {
        #[command(flatten)]
        output: Output,
    },
    /// Start QEMU and manage the VM
    Run(Run),
    /// Manage a QEMU that runs already
    Attach(Attach),
    /// Bring a VM's memory back and stop managing it; the guest runs on
    Detach(Detach),
    /// Show all managed VMs
    List {
        #[command(flatten)]
        output: Output,
    },
    /// Show where a VM's memory is, and warnings
    Status {
        #[command(flatten)]
        vm: Vm,
        /// Show every figure
        #[arg(long)]
        verbose: bool,
    },
    /// Show the host and all VMs on one screen, as they change
    Top(Top),
    /// Reclaim the guest's free memory once
    Reclaim {
        #[command(flatten)]
        vm: Vm,
        /// Stop once this much is reclaimed [default: all but a small reserve]
        #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
        bytes: Option<Bytes>,
        /// Do not wait: print the number of a job that does it (`ebb jobs`)
        #[arg(long)]
        background: bool,
    },
    /// Switch automatic reclaim on or off, or show it
    Auto(Auto),
    /// Limit a VM's resident memory
    Limit {
        #[command(flatten)]
        vm: Vm,
        /// The limit, or `off`
        #[arg(value_name = "SIZE|off", allow_negative_numbers = true)]
        limit: SizeOrOff,
        /// Low mark: evict down to this [default: a little below the high mark]
        #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
        low: Option<Bytes>,
        /// High mark: above it, the guest's faults wait for eviction [default: a little below the
        /// limit]
        #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
        high: Option<Bytes>,
    },
    /// Make a VM larger or smaller: set its target size
    Resize {
        #[command(flatten)]
        vm: Vm,
        /// Target, of the node if one is named; `off`: no target, keep the current size
        #[arg(value_name = "SIZE|off", allow_negative_numbers = true)]
        size: SizeOrOff,
        /// Resize this NUMA node only
        #[arg(long, value_name = "NODE")]
        node: Option<u32>,
        /// Use only this mechanism: hyperalloc, balloon or virtio-mem [default: what fits]
        #[arg(long, value_name = "MECHANISM", value_parser = size_mechanism)]
        by: Option<SizeMechanism>,
        /// If the guest touches hard-reclaimed memory: allow it, or stop the VM [default: as set
        /// before, at first allow]
        #[arg(long, value_name = "allow|stop")]
        on_violation: Option<OnViolation>,
        /// Do not wait: print the number of a job that does it (`ebb jobs`)
        #[arg(long)]
        background: bool,
    },
    /// Show which of a VM's memory is hot; this takes some seconds if it is not known
    Heat {
        #[command(flatten)]
        vm: Vm,
        /// Monitor the VM again, even if figures are known
        #[arg(long)]
        fresh: bool,
        /// Write the map to this file as well, as a picture
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
        /// Do not wait: print the number of a job that does it (`ebb jobs`)
        #[arg(long, conflicts_with = "svg")]
        background: bool,
    },
    /// Show what each of a VM's tiers holds, and whether the fast one is large enough
    Tier {
        #[command(flatten)]
        vm: Vm,
    },
    /// Show the pool of fast memory that VMs share, or set its size
    Pool {
        /// Its size, or `off` for no pool [default: only show]
        #[arg(value_name = "SIZE|off", allow_negative_numbers = true)]
        size: Option<SizeOrOff>,
        #[command(flatten)]
        output: Output,
    },
    /// Give a VM a share of the pool: its limit then follows its hot set
    Share {
        #[command(flatten)]
        vm: Vm,
        /// Its share, or `off`: it leaves the pool, and has no limit
        #[arg(value_name = "SIZE|off", allow_negative_numbers = true)]
        share: SizeOrOff,
        /// The least it gets, in percent of its share [default: 75]
        #[arg(long, value_name = "PERCENT")]
        lower: Option<u32>,
        /// The most it gets, in percent of its share [default: 125]
        #[arg(long, value_name = "PERCENT")]
        upper: Option<u32>,
    },
    /// Show the pilot, turn it on or off, or change the reserve: it decides what to take from which
    /// VM, and what to give back
    Pilot {
        /// `dry-run`: it decides and does nothing [default: only show]
        #[arg(value_name = "on|off|dry-run", value_parser = pilot_mode)]
        mode: Option<PilotMode>,
        /// Memory that is to stay available on the host: a size, or a part of its memory, as 10%
        /// [default: as set before, at first 10%]
        #[arg(long, value_name = "SIZE|PERCENT%", allow_negative_numbers = true)]
        reserve: Option<Below>,
        /// Whether the pilot, while it is on, attaches VMs that run on the host and can be managed
        /// [default: as set before, at first off]
        #[arg(long, value_name = "on|off")]
        attach: Option<Switch>,
        /// The host is short if its tasks wait for memory (PSI) in this part of the time, in
        /// percent; 0: waits do not count [default: as set before, at first as `ebbd
        /// --pressure-stall`]
        #[arg(long, value_name = "PERCENT")]
        stall: Option<u32>,
        /// Take nothing in use while all swap files together take this or more; 0: no bound
        /// [default: as set before, at first 0]
        #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
        swap_max: Option<Bytes>,
        #[command(flatten)]
        output: Output,
    },
    /// Show or change the pilot's rule for a VM: how much of its memory may go, and when
    Rule {
        #[command(flatten)]
        vm: Vm,
        /// How much its speed matters: batch, normal or latency [default: as set before, at first
        /// normal]
        #[arg(long, value_name = "CLASS")]
        class: Option<VmClass>,
        /// Take nothing in use below this; 0: what its guest needs to live
        #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
        min: Option<Bytes>,
        /// Give it no more than this; 0: all of its memory
        #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
        max: Option<Bytes>,
        /// Its weight among VMs of its class: with twice the weight it gives half as much
        /// [default: as set before, at first 100]
        #[arg(long, value_name = "NUMBER")]
        weight: Option<u32>,
        /// `on`: the pilot leaves the VM as it is
        #[arg(long, value_name = "on|off")]
        hold: Option<Switch>,
    },
    /// Write down what the pilot sees, a line of JSON a second, until Ctrl-C
    Record {
        /// The file to make
        file: PathBuf,
        /// End after this time
        #[arg(long = "for", value_name = "TIME")]
        time: Option<Interval>,
    },
    /// Replay a recorded trace, and show what the pilot would decide
    Simulate {
        /// A file of `ebb record`
        file: PathBuf,
        /// The host's reserve: a size, or a part of its memory
        #[arg(
            long,
            value_name = "SIZE|PERCENT%",
            default_value = "10%",
            allow_negative_numbers = true
        )]
        reserve: Below,
        /// The host is short if its tasks wait for memory in this part of the time, in percent; 0:
        /// waits do not count
        #[arg(long, value_name = "PERCENT", default_value_t = 15)]
        #[arg(value_parser = clap::value_parser!(u32).range(0..=100))]
        stall: u32,
        /// Take nothing in use while all swap files together take this or more [default: no bound]
        #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
        swap_max: Option<Bytes>,
    },
    /// Show what happened to VMs: states, refusals, warnings, jobs, and what the pilot did
    Events(Events),
    /// Measure for some seconds how fast this host's tiers are, and keep the result
    Calibrate {
        /// Do not wait: print the number of a job that does it (`ebb jobs`)
        #[arg(long)]
        background: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Evict memory now, whether it is used or not: for tests and emergencies
    Evict {
        #[command(flatten)]
        vm: Vm,
        /// How much to evict
        #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
        bytes: Bytes,
        /// Do not wait: print the number of a job that does it (`ebb jobs`)
        #[arg(long)]
        background: bool,
    },
    /// Show jobs: long operations in the background, and how far they are
    Jobs(Jobs),
    /// Check or show the configuration file of this host
    Config(Config),
    /// Check what this host lacks, what each lack costs, and the remedy
    Doctor {
        /// Fix what is safe to fix, and print each step
        #[arg(long)]
        fix: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Write a file for a bug report: what Ebb and the host say of themselves, and nothing of a
    /// guest's memory
    Report {
        /// The file to make, a .tar.gz [default: ebb-report-TIME.tar.gz]
        file: Option<PathBuf>,
        #[command(flatten)]
        output: Output,
    },
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write the man pages into a directory
    Man {
        /// The directory; made if there is none
        dir: PathBuf,
    },
}

#[derive(clap::Args)]
pub struct Output {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(clap::Args)]
pub struct Vm {
    /// The VM's name
    pub name: VmName,
    #[command(flatten)]
    pub output: Output,
}

#[derive(clap::Args)]
pub struct Run {
    /// The VM's name, unique on the host
    #[arg(long)]
    pub name: VmName,
    /// The guest's RAM: a multiple of 2 MiB, from 64 MiB to 1 TiB [default: the sum of the tiers]
    #[arg(long, value_name = "SIZE", required_unless_present = "tier")]
    pub memory: Option<Bytes>,
    /// Tiers of memory, fastest first. dram=1G,file=/var/lib/ebb/web:4G: at most 1 GiB of the
    /// host's memory, and the rest in a new file. node0=2G,node1=8G: hot pages on the first of
    /// these NUMA nodes [default: the host's memory]
    #[arg(long, value_name = "TIER=SIZE,...")]
    pub tier: Option<String>,
    /// The largest size for `ebb resize`: the guest's driver virtio_mem plugs the difference
    /// [default: --memory]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub grow_to: Option<Bytes>,
    /// Give plugged memory its pages at once, not at the first touch
    #[arg(long, requires = "grow_to")]
    pub grow_prealloc: bool,
    /// vCPUs, 1 to 255
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub cpus: u32,
    /// NUMA nodes, 1 to 16, each with the same part of memory and vCPUs
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub nodes: u32,
    /// Kernel image to boot directly
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk, with --kernel
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Kernel command line, with --kernel
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub append: Option<String>,
    /// Raw image that Ebb serves to the guest as a virtio disk; repeat the option for several
    /// disks. `dma=strict`: the disk accesses memory as a passed-through device does, through an
    /// IOMMU in software. A request for memory that is not mapped there fails. `format=raw`: serve
    /// the image as raw even if its first bytes look like another format
    #[arg(long = "disk", value_name = "IMAGE[,readonly][,dma=strict][,format=raw]")]
    pub disks: Vec<DiskRequest>,
    /// What the guest's RAM is made of: auto, hugetlb, thp or small
    #[arg(long, default_value_t = Backing::Auto)]
    pub backing: Backing,
    /// The user that QEMU runs as: a name, a number, UID:GID, or `own` for one that no other
    /// process has [default: ebbd's --vm-user, or else own]
    #[arg(long, value_name = "USER", conflicts_with = "privileged")]
    pub user: Option<String>,
    /// Run QEMU as root, with the capabilities of the daemon and without a seccomp filter
    #[arg(long)]
    pub privileged: bool,
    #[command(flatten)]
    pub watch: Watch,
    #[command(flatten)]
    pub output: Output,
    /// More arguments for QEMU, passed unchanged
    #[arg(last = true, value_name = "QEMU ARGS")]
    pub qemu_args: Vec<String>,
}

#[derive(clap::Args)]
pub struct Attach {
    /// The VM's name, unique on the host
    #[arg(long, required_unless_present = "all")]
    pub name: Option<VmName>,
    /// QEMU's process number
    #[arg(long, required_unless_present = "all")]
    pub pid: Option<i32>,
    /// Manage every QEMU of the host that can be managed, under the name that its command line
    /// gives
    #[arg(long, conflicts_with_all = ["name", "pid", "qmp"])]
    pub all: bool,
    /// QEMU's QMP socket [default: the one on QEMU's command line]
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    #[command(flatten)]
    pub watch: Watch,
    #[command(flatten)]
    pub output: Output,
}

#[derive(clap::Args)]
pub struct Detach {
    /// The VM's name
    #[arg(required_unless_present = "all")]
    pub name: Option<VmName>,
    /// Detach every managed VM, one after the other; what cannot be detached stays managed
    #[arg(long, conflicts_with_all = ["name", "background"])]
    pub all: bool,
    /// Do not wait: print the number of a job that does it (`ebb jobs`)
    #[arg(long)]
    pub background: bool,
    #[command(flatten)]
    pub output: Output,
}

#[derive(clap::Args)]
pub struct Watch {
    /// How reclaimed memory is watched: strict or release [default: strict with a disk with
    /// dma=strict, else release]
    #[arg(long)]
    pub mode: Option<Mode>,
    /// Smallest buddy block to reclaim, as its order: 6 (256 KiB) to 10 (4 MiB) [default: 9, which
    /// is 2 MiB]
    #[arg(long, value_name = "ORDER")]
    pub min_order: Option<u8>,
}

#[derive(clap::Args)]
pub struct Auto {
    /// The VM's name
    pub name: VmName,
    /// Whether Ebb reclaims by itself [default: only show]
    #[arg(value_name = "on|off")]
    pub switch: Option<Switch>,
    /// What begins a round: the end of an interval, or a host that is short of memory [default: as
    /// set before, at first interval]
    #[arg(long, value_name = "interval|pressure", requires = "switch")]
    pub when: Option<ReclaimWhen>,
    /// Time between two rounds, as 500ms, 5s or 1m [default: as set before, at first 5s]
    #[arg(long, value_name = "TIME", requires = "switch")]
    pub interval: Option<Interval>,
    /// The host is short of memory if less than this is available: a size, or a part of its memory
    /// as 10% [default: as set before, at first 10%]
    #[arg(long, value_name = "SIZE|PERCENT%", requires = "switch")]
    pub below: Option<Below>,
    /// Free memory to leave in the guest [default: as set before, at first 0]
    #[arg(long, value_name = "SIZE", requires = "switch")]
    pub keep: Option<Bytes>,
    #[command(flatten)]
    pub output: Output,
}

/// What a command may begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Begins {
    /// A daemon if there is none, and a VM with its settings.
    Vms,
    /// A daemon if there is none; or it needs none.
    Daemon,
    /// A daemon for the VMs of a run directory that exists.
    Nothing,
}

impl Command {
    /// What the command may begin.
    pub fn begins(&self) -> Begins {
        match self {
            Command::Run(_) | Command::Attach(_) => Begins::Vms,
            Command::Pool { size: Some(_), .. }
            | Command::Pilot { mode: Some(_), .. }
            | Command::Pilot { reserve: Some(_), .. }
            | Command::Pilot { attach: Some(_), .. }
            | Command::Pilot { stall: Some(_), .. }
            | Command::Pilot { swap_max: Some(_), .. }
            | Command::Calibrate { .. }
            | Command::Simulate { .. }
            | Command::Observe(_)
            | Command::Discover { .. }
            | Command::Config(_)
            | Command::Doctor { .. }
            | Command::Report { .. }
            | Command::Completions { .. }
            | Command::Man { .. }
            // It shows an empty list instead.
            | Command::List { .. } => Begins::Daemon,
            _ => Begins::Nothing,
        }
    }
}

/// A size, or `off` for none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SizeOrOff(pub Option<Bytes>);

impl FromStr for SizeOrOff {
    type Err = String;

    fn from_str(text: &str) -> Result<SizeOrOff, String> {
        match text {
            "off" => Ok(SizeOrOff(None)),
            size => size.parse().map(|bytes| SizeOrOff(Some(bytes))).map_err(|error| {
                let error: <Bytes as FromStr>::Err = error;
                format!("{error}, or `off`")
            }),
        }
    }
}

/// Parses a mechanism as people write it.
fn size_mechanism(text: &str) -> Result<SizeMechanism, String> {
    match text {
        "hyperalloc" => Ok(SizeMechanism::HyperAlloc),
        "virtio-mem" => Ok(SizeMechanism::VirtioMem),
        "balloon" => Ok(SizeMechanism::Balloon),
        other => Err(format!("{other:?} is not one of hyperalloc, balloon, virtio-mem")),
    }
}

/// Parses what the pilot is to do, as people write it.
fn pilot_mode(text: &str) -> Result<PilotMode, String> {
    match text {
        "on" => Ok(PilotMode::On),
        "off" => Ok(PilotMode::Off),
        "dry-run" => Ok(PilotMode::DryRun),
        other => Err(format!("{other:?} is not one of on, off, dry-run")),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On
    On,
    /// Off
    Off,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_holds_together() {
        Args::command().debug_assert();
    }

    #[test]
    fn qemu_gets_its_arguments_untouched() {
        let line = "ebb run --name web --memory 2G -- -drive file=a.img,if=virtio --name inner";
        let Command::Run(run) = Args::try_parse_from(line.split(' ')).map(|a| a.command).unwrap()
        else {
            panic!("not run")
        };
        assert_eq!(run.qemu_args, ["-drive", "file=a.img,if=virtio", "--name", "inner"]);
        assert_eq!(run.memory, Some(Bytes(2 << 30)));
    }
}
