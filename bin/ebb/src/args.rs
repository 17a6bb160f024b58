//! The command line. Help, man pages and completions all come from here.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use ebb_api::{Backing, DiskRequest, Mode, OnViolation, SizeMechanism, VmName, route};
use ebb_units::Bytes;

use crate::interval::Interval;

/// Takes back the memory that running VMs do not use, and returns it on touch
///
/// Sizes are written as 4096, 64K, 512M, 2G or 1.5GiB. All commands but `doctor`, `completions`
/// and `help` speak to the daemon `ebbd` and start it where it does not run.
#[derive(Parser)]
#[command(name = "ebb", version, max_term_width = 100)]
pub struct Args {
    /// Where the daemon keeps its socket, log and records
    #[arg(long, global = true, env = "EBB_RUN_DIR", value_name = "DIR")]
    #[arg(default_value = route::RUN_DIR_DEFAULT)]
    pub run_dir: PathBuf,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Start QEMU and hold the VM
    Run(Run),
    /// Hold a QEMU that runs already
    Attach(Attach),
    /// Bring a VM's memory back and let it go; the guest runs on
    Detach {
        #[command(flatten)]
        vm: Vm,
    },
    /// Show all held VMs
    List {
        #[command(flatten)]
        output: Output,
    },
    /// Show all that is known about a VM
    Status {
        #[command(flatten)]
        vm: Vm,
    },
    /// Take the guest's free memory once
    Reclaim {
        #[command(flatten)]
        vm: Vm,
        /// Stop once this much is taken [default: all but a small reserve]
        #[arg(long, value_name = "SIZE")]
        bytes: Option<Bytes>,
    },
    /// Switch automatic reclaim on or off
    Auto(Auto),
    /// Hold a VM's resident memory at a limit
    Limit {
        #[command(flatten)]
        vm: Vm,
        /// The limit, or `off`
        #[arg(value_name = "SIZE|off")]
        limit: SizeOrOff,
        /// Evict in the background down to this [default: a little below where faults wait]
        #[arg(long, value_name = "SIZE")]
        low: Option<Bytes>,
        /// Have the guest's faults wait for eviction above this [default: a little below the limit]
        #[arg(long, value_name = "SIZE")]
        high: Option<Bytes>,
    },
    /// Make a VM larger or smaller, by whatever it offers
    Resize {
        #[command(flatten)]
        vm: Vm,
        /// What the guest is to have, on its node if one is named; or `off`: what it has now
        #[arg(value_name = "SIZE|off")]
        size: SizeOrOff,
        /// This NUMA node alone
        #[arg(long, value_name = "NODE")]
        node: Option<u32>,
        /// By this and nothing else: hyperalloc, balloon or virtio-mem [default: what fits]
        #[arg(long, value_name = "MECHANISM", value_parser = size_mechanism)]
        by: Option<SizeMechanism>,
        /// When it touches what HyperAlloc took: allow it, or stop the VM [default: as set before,
        /// at first allow]
        #[arg(long, value_name = "allow|stop")]
        on_violation: Option<OnViolation>,
    },
    /// Show which of a VM's memory is hot; monitors it for some seconds where that is not known
    Heat {
        #[command(flatten)]
        vm: Vm,
        /// Monitor it anew, whatever is known
        #[arg(long)]
        fresh: bool,
        /// Write the map into this file, too, as a picture
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
    },
    /// Show the tiers that hold a VM's memory, and whether the fast one is large enough
    Tier {
        #[command(flatten)]
        vm: Vm,
    },
    /// Show the fast memory that VMs share, or say how much it is
    Pool {
        /// All of it, or `off`: none [default: only show]
        #[arg(value_name = "SIZE|off")]
        size: Option<SizeOrOff>,
        #[command(flatten)]
        output: Output,
    },
    /// Give a VM a share of the pool: its limit then follows its hot set
    Share {
        #[command(flatten)]
        vm: Vm,
        /// Its share, or `off`: it is in the pool no more, and has no limit
        #[arg(value_name = "SIZE|off")]
        share: SizeOrOff,
        /// In percent of the share: it never has less [default: 75]
        #[arg(long, value_name = "PERCENT")]
        lower: Option<u32>,
        /// In percent of the share: it never has more [default: 125]
        #[arg(long, value_name = "PERCENT")]
        upper: Option<u32>,
    },
    /// Measure how fast this host's tiers of memory are, for some seconds, and keep it
    Calibrate {
        #[command(flatten)]
        output: Output,
    },
    /// Save and empty memory whether it is used or not: for tests and emergencies
    Evict {
        #[command(flatten)]
        vm: Vm,
        /// How much
        #[arg(long, value_name = "SIZE")]
        bytes: Bytes,
    },
    /// Check what this host offers, what a lack costs and how to mend it
    Doctor {
        /// Mend what can be mended from here, and say what was done
        #[arg(long)]
        fix: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Print completions for a shell
    Completions {
        /// For which shell
        shell: Shell,
    },
    /// Write the man pages into a directory
    #[command(hide = true)]
    Man {
        /// An existing directory
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
    /// The guest's RAM: a multiple of 2 MiB, from 64 MiB to 1 TiB [default: what the tiers hold]
    #[arg(long, value_name = "SIZE", required_unless_present = "tier")]
    pub memory: Option<Bytes>,
    /// The tiers of memory that hold it, fastest first, as dram=1G,file=/var/lib/ebb/web:4G: held to
    /// 1 GiB of the host's memory, with the rest in a new file; or as node0=2G,node1=8G: its hot
    /// pages on the first of these NUMA nodes [default: the host's memory]
    #[arg(long, value_name = "TIER=SIZE,...")]
    pub tier: Option<String>,
    /// The size up to which `ebb resize` can bring it, by memory that the guest's driver
    /// virtio_mem plugs [default: --memory]
    #[arg(long, value_name = "SIZE")]
    pub grow_to: Option<Bytes>,
    /// Give what is plugged all its memory at once, not at a touch
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
    /// Raw image that Ebb serves to the guest as a virtio disk; can be given again. With
    /// `dma=strict` it reaches the guest's memory as a device passed through does: through an
    /// IOMMU (in software), and a request that meets memory not mapped there fails. With
    /// `format=raw` an image is served whose first bytes are those of another format
    #[arg(long = "disk", value_name = "IMAGE[,readonly][,dma=strict][,format=raw]")]
    pub disks: Vec<DiskRequest>,
    /// What the guest's RAM is made of: auto, hugetlb, thp or small
    #[arg(long, default_value_t = Backing::Auto)]
    pub backing: Backing,
    /// The user that QEMU runs as: a name, a number, UID:GID, or `own`, one that no other process
    /// has [default: as ebbd was told, at first own]
    #[arg(long, value_name = "USER", conflicts_with = "privileged")]
    pub user: Option<String>,
    /// Run QEMU as root, with all that the daemon may do and without its filter of system calls
    #[arg(long)]
    pub privileged: bool,
    #[command(flatten)]
    pub watch: Watch,
    #[command(flatten)]
    pub output: Output,
    /// Further arguments for QEMU, passed as they are
    #[arg(last = true, value_name = "QEMU ARGS")]
    pub qemu_args: Vec<String>,
}

#[derive(clap::Args)]
pub struct Attach {
    /// The VM's name, unique on the host
    #[arg(long)]
    pub name: VmName,
    /// QEMU's process
    #[arg(long)]
    pub pid: i32,
    /// QEMU's QMP socket [default: the one on QEMU's command line]
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    #[command(flatten)]
    pub watch: Watch,
    #[command(flatten)]
    pub output: Output,
}

#[derive(clap::Args)]
pub struct Watch {
    /// How emptied memory is watched: strict or release [default: release where no device reaches
    /// the guest's memory by itself, else strict]
    #[arg(long)]
    pub mode: Option<Mode>,
    /// Smallest buddy block to take, 0 to 10 [default: 9, which is 2 MiB]
    #[arg(long, value_name = "ORDER")]
    pub min_order: Option<u8>,
}

#[derive(clap::Args)]
pub struct Auto {
    /// The VM's name
    pub name: VmName,
    /// On or off
    pub switch: Switch,
    /// Time between two reclaims, as 500ms, 5s or 1m [default: as set before, at first 5s]
    #[arg(long, value_name = "TIME")]
    pub interval: Option<Interval>,
    /// Free memory to leave in the guest [default: as set before, at first 0]
    #[arg(long, value_name = "SIZE")]
    pub keep: Option<Bytes>,
    #[command(flatten)]
    pub output: Output,
}

/// A size, or none.
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

/// As people write them.
fn size_mechanism(text: &str) -> Result<SizeMechanism, String> {
    match text {
        "hyperalloc" => Ok(SizeMechanism::HyperAlloc),
        "virtio-mem" => Ok(SizeMechanism::VirtioMem),
        "balloon" => Ok(SizeMechanism::Balloon),
        other => Err(format!("{other:?} is not one of hyperalloc, balloon, virtio-mem")),
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Reclaim at every interval
    On,
    /// Reclaim only when asked
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
