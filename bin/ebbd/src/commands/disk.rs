//! `ebbd disk`: serves one image to a QEMU that somebody else starts.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::ensure;
use clap::Parser;
use ebb_api::{DiskRequest, DmaMode};
use ebb_block::{AllResident, Backend, Counts, Nobody, Options};
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::serve::disks;
use crate::support::log;

/// The name of the subcommand.
pub const COMMAND: &str = "disk";

/// Serves a raw image as a vhost-user-blk disk, until it is terminated.
#[derive(Parser)]
#[command(name = "ebbd disk", version)]
struct Arguments {
    /// Where QEMU connects
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Raw image: a file or a block device. `readonly`: the guest cannot write. `format=raw`: serve
    /// the image as raw even if its first bytes look like another format
    #[arg(long, value_name = "IMAGE[,readonly][,format=raw]")]
    image: DiskRequest,
    /// The most queues that the guest can use; each has a thread
    #[arg(long, value_name = "COUNT", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(ebb_block::QUEUES_MAX)))]
    queues: u16,
}

/// Runs `ebbd disk` with these arguments.
///
/// # Errors
/// The image or the socket cannot be used.
pub fn main(words: impl Iterator<Item = String>) -> anyhow::Result<()> {
    let arguments = Arguments::parse_from(["ebbd disk".to_owned()].into_iter().chain(words));
    log::to_stderr(None, None);
    crate::support::privileges::of_device(true)?;
    let DiskRequest { path, dma, .. } = &arguments.image;
    ensure!(
        *dma == DmaMode::Pinned,
        "dma=strict is for the disks of VMs that Ebb manages: see ebb run --disk"
    );
    let image = disks::open_one(&arguments.image)?;
    let options = Options { queues: arguments.queues, ..Options::default() };
    // No memory of this guest is reclaimed or evicted, and nobody observes what moves.
    let disk =
        Backend::start(&arguments.socket, image, Arc::new(AllResident), Arc::new(Nobody), options)?;
    disk.on_panic(|why| end_failed(&why));
    tracing::info!("serving {} at {}", path.display(), arguments.socket.display());
    let signal = wait_end()?;
    let Counts { reads, writes, flushes, .. } = disk.counts();
    tracing::info!("ended by {signal:?} after {reads} reads, {writes} writes, {flushes} flushes");
    disk.stop();
    Ok(())
}

/// Ends this process, whose device is not served any more. Its driver waits for the next process.
pub fn end_failed(why: &str) -> ! {
    tracing::error!("its service failed: {why}");
    log::end();
    std::process::exit(1);
}

/// Waits for the signal to end.
pub fn wait_end() -> io::Result<Signal> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        Ok(tokio::select! {
            _ = terminate.recv() => Signal::TERM,
            _ = interrupt.recv() => Signal::INT,
        })
    })
}
