//! `ebbd memory`: serves one virtio-mem device to a QEMU that somebody else starts.

use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use anyhow::{Context, bail, ensure};
use clap::Parser;
use ebb_units::{Bytes, Gpa};
use ebb_vhost::AllResident;
use ebb_virtio_mem::{Device, FileMemory, Geometry, Options, StateFile};
use ebb_virtio_mem_user::{Backend, Setup};
use serde::Serialize;

use super::disk;

/// The name of the subcommand.
pub const COMMAND: &str = "memory";

/// Magic numbers of tmpfs and hugetlbfs, from Linux's `include/uapi/linux/magic.h`.
const MEMORY_FILE_SYSTEMS: [u64; 2] = [0x0102_1994, 0x9584_58f6];

/// Serves a virtio-mem device by vhost-user, until it is terminated.
///
/// A size on standard input is the new requested size. Each line, even an empty one, gets a line on
/// standard output with the device's sizes, as JSON.
#[derive(Parser)]
#[command(name = "ebbd memory", version, args_override_self = true)]
struct Arguments {
    /// Where QEMU connects
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// The region's memory: a file on tmpfs or hugetlbfs that QEMU maps shared. It is created if it
    /// does not exist
    #[arg(long, value_name = "PATH")]
    file: PathBuf,
    /// Where the region begins in the file
    #[arg(long, value_name = "SIZE", default_value = "0")]
    offset: Bytes,
    /// The region's guest-physical address, as 0x140000000 or 5G
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    address: Gpa,
    /// The size of the region: the most that the guest can plug
    #[arg(long, value_name = "SIZE")]
    size: Bytes,
    /// The unit of plugging: a power of two
    #[arg(long, value_name = "SIZE", default_value = "2M")]
    block: Bytes,
    /// The guest's NUMA node
    #[arg(long, value_name = "NODE")]
    node: Option<u16>,
    /// The requested size, unless the saved state has one [default: 0]
    #[arg(long, value_name = "SIZE")]
    requested: Option<Bytes>,
    /// Give plugged blocks their memory at once, not at the first touch
    #[arg(long)]
    prealloc: bool,
    /// The saved state, for the next process; on tmpfs [default: SOCKET.state]
    #[arg(long, value_name = "PATH")]
    state: Option<PathBuf>,
}

fn address(text: &str) -> Result<Gpa, String> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).map(Gpa).map_err(|error| error.to_string()),
        None => text.parse().map(|Bytes(bytes)| Gpa(bytes)).map_err(|_| {
            format!("{text:?} is no address: write it as 0x140000000, or as a size like 5G")
        }),
    }
}

/// Runs `ebbd memory` with these arguments.
///
/// # Errors
/// The file, the state or the socket cannot be used, or no device can have this region.
pub fn main(words: impl Iterator<Item = String>) -> anyhow::Result<()> {
    let arguments = Arguments::parse_from(["ebbd memory".to_owned()].into_iter().chain(words));
    crate::support::log::to_stderr(None, None);
    crate::support::privileges::of_device(false)?;
    let backend = start(&arguments)?;
    backend.on_panic(|why| disk::end_failed(&why));
    if let Some(Bytes(bytes)) = arguments.requested
        && backend.device().sizes().requested_bytes == 0
    {
        backend.device().request_bytes(bytes)?;
    }
    tracing::info!("serving {} at {}", arguments.file.display(), arguments.socket.display());
    let device = backend.device().clone();
    // The thread ends with the process: nothing can end a read of a terminal.
    thread::Builder::new().name("input".into()).spawn(move || obey(&device))?;
    let signal = disk::wait_end()?;
    tracing::info!("{signal:?}: {}", report(backend.device()));
    backend.stop();
    Ok(())
}

fn start(arguments: &Arguments) -> anyhow::Result<Backend> {
    let geometry = Geometry {
        start: arguments.address,
        region_bytes: arguments.size.0,
        block_bytes: arguments.block.0,
        node: arguments.node,
    };
    geometry.check()?;
    let Some(end) = arguments.offset.0.checked_add(geometry.region_bytes) else {
        bail!("--offset {} is too large", arguments.offset);
    };
    let file = open(&arguments.file, end)
        .with_context(|| format!("the region's memory, {}", arguments.file.display()))?;
    let (record, saved) = StateFile::open_or_create(&state_path(arguments), geometry)?;
    let setup = Setup {
        saved,
        options: Options { prealloc: arguments.prealloc, ..Options::default() },
        memory: Box::new(FileMemory::new(file, arguments.offset.0, &geometry)),
        record: Box::new(record),
        // Only the guest's own driver takes memory away from it.
        dma: Arc::new(AllResident),
    };
    Ok(Backend::start(&arguments.socket, setup)?)
}

fn state_path(arguments: &Arguments) -> PathBuf {
    arguments.state.clone().unwrap_or_else(|| {
        let mut name = arguments.socket.as_os_str().to_owned();
        name.push(".state");
        name.into()
    })
}

/// Opens the file, and makes it long enough for the region. QEMU takes an existing file as it is.
fn open(path: &Path, bytes: u64) -> anyhow::Result<File> {
    let mut options = File::options();
    let file =
        options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    // Unplugged parts of the file are emptied: this must not be somebody's data if the path is
    // mistyped.
    let kind = rustix::fs::fstatfs(&file)?.f_type as u64;
    ensure!(MEMORY_FILE_SYSTEMS.contains(&kind), "it is on a disk: give one on tmpfs or hugetlbfs");
    if file.metadata()?.len() < bytes {
        file.set_len(bytes)?;
    }
    Ok(file)
}

/// The answer to a line.
#[derive(Serialize)]
struct Report {
    requested_bytes: u64,
    plugged_bytes: u64,
    usable_bytes: u64,
    /// Number of touches of unplugged memory by the device's own queue.
    violations: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn report_with(device: &Device, error: Option<String>) -> String {
    let sizes = device.sizes();
    let report = Report {
        requested_bytes: sizes.requested_bytes,
        plugged_bytes: sizes.plugged_bytes,
        usable_bytes: sizes.usable_bytes,
        violations: device.guard().violations(),
        error,
    };
    serde_json::to_string(&report).unwrap_or_default()
}

fn report(device: &Device) -> String {
    report_with(device, None)
}

/// Takes sizes until the input ends, or nobody reads the answers.
fn obey(device: &Device) {
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { return };
        let answer = report_with(device, request(device, line.trim()).err());
        if writeln!(io::stdout(), "{answer}").is_err() {
            return;
        }
    }
}

fn request(device: &Device, size: &str) -> Result<(), String> {
    if size.is_empty() {
        return Ok(());
    }
    let Bytes(bytes) = size.parse::<Bytes>().map_err(|error| error.to_string())?;
    device.request_bytes(bytes).map_err(|error| error.to_string())
}
