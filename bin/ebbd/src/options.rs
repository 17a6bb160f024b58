//! The daemon's options: those of the command line and the environment, and those that the
//! configuration file adds.

mod configured;
mod reload;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use clap::Parser;
use ebb_api::route;
use ebb_units::Bytes;

pub use self::configured::{Source, read};
pub use self::reload::{begin, keep};
use crate::model::monitoring;
use crate::model::record::{ForgetBy, MetadataBy};
use crate::rest::tcp;
use crate::serve::swap_room;
use crate::system::confine;

/// Manages VMs, and returns their unused memory to the host.
///
/// `ebbd disk --help` and `ebbd memory --help` say how it serves a disk, or memory that can be
/// plugged, to a QEMU that it does not manage.
#[derive(Parser)]
#[command(version)]
pub struct Arguments {
    /// Where the sockets, the records and the keys of swap files are.
    #[arg(long, env = "EBB_RUN_DIR", default_value = route::RUN_DIR_DEFAULT)]
    pub run_dir: PathBuf,
    /// Where the logs are: this daemon's, and in a directory for each VM its console's and
    /// QEMU's [default: /var/log/ebb, or the run directory if that is not the default].
    #[arg(long, env = "EBB_LOG_DIR")]
    pub log_dir: Option<PathBuf>,
    /// Where the content of evicted memory goes, encrypted: a directory on a disk
    /// [default: /var/lib/ebb, or the run directory if that is not the default].
    #[arg(long, env = "EBB_SWAP_DIR")]
    pub swap_dir: Option<PathBuf>,
    #[command(flatten)]
    pub swap_room: swap_room::SwapRoom,
    /// Memory of each VM for compressed pages in front of its swap file, as 64M. With a limit, at
    /// most half of the difference between the limit and the guest's least memory. 0: none.
    #[arg(long, env = "EBB_COMPRESSED", value_name = "SIZE", default_value = "0")]
    pub compressed: Bytes,
    /// Also refill frames that the guest has freed since their eviction: slower, for comparison.
    #[arg(long, env = "EBB_READ_FREED")]
    pub read_freed: bool,
    /// The most memory of a VM that moves between NUMA nodes each second, as 256M. 0: no limit.
    #[arg(long, env = "EBB_MOVE_RATE", value_name = "SIZE", default_value = "1G")]
    pub move_rate: Bytes,
    #[command(flatten)]
    pub monitoring: monitoring::MonitoringSettings,
    /// How QEMU's page table is emptied to see which memory is used.
    #[arg(long, env = "EBB_FORGET_BY", value_enum, default_value_t)]
    pub forget_by: ForgetBy,
    /// How a guest's page metadata may become known.
    #[arg(long, env = "EBB_METADATA_BY", value_enum, default_value_t)]
    pub metadata_by: MetadataBy,
    /// For `ebb auto --when pressure`: the host is short of memory if its tasks wait for memory
    /// (PSI) in this share of the time, in percent. 0: PSI is not looked at.
    #[arg(long, env = "EBB_PRESSURE_STALL", value_name = "PERCENT", default_value_t = 15)]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=100))]
    pub pressure_stall: u32,
    /// The user that QEMUs run as, unless `ebb run --user` names one: a name, a number, UID:GID,
    /// or `own` for one that no other process has.
    #[arg(long, env = "EBB_VM_USER", value_name = "USER", default_value = "own", value_parser = user)]
    pub vm_user: String,
    /// Manage VMs even if the run directory is on a disk, so that the keys of swap files are too.
    #[arg(long, env = "EBB_ALLOW_KEYS_ON_DISK")]
    pub allow_keys_on_disk: bool,
    #[command(flatten)]
    pub tcp: tcp::Options,
    /// The configuration file. It counts where neither an option nor the environment says something
    /// [default: /etc/ebb/ebb.toml, if there is one].
    #[arg(long, env = "EBB_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Leave the session of the parent process.
    #[arg(long)]
    pub background: bool,
}

/// Checks that the user exists. The name is resolved again for each VM.
fn user(text: &str) -> Result<String, String> {
    text.parse::<confine::VmUser>().map(|_| text.to_owned())
}
