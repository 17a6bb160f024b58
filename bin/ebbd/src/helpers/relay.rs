//! `ebbd relay`: keeps a front end connected while the process of its device dies and is started
//! again.

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

/// Longest wait for QEMU to connect. A QEMU that has not connected by then was never started.
const QEMU_WITHIN: Duration = Duration::from_secs(60);

/// The name of the subcommand.
pub const COMMAND: &str = "relay";

/// Keeps QEMU connected to a vhost-user device while the device's process dies and starts again.
///
/// QEMU's generic vhost-user device does not survive a restart of its back-end, so QEMU connects to
/// the relay.
#[derive(Parser)]
#[command(name = "ebbd relay", version)]
struct Arguments {
    /// Where QEMU connects
    #[arg(long, value_name = "PATH", required_unless_present = "once")]
    socket: Option<PathBuf>,
    /// Where the device listens; it need not exist yet
    #[arg(long, value_name = "PATH")]
    device: PathBuf,
    /// The file to which standard error goes; the relay keeps it short
    #[arg(long, value_name = "PATH")]
    log: Option<PathBuf>,
    /// Serve one QEMU, which connects to the socket on standard input, and end with it
    #[arg(long, conflicts_with = "socket")]
    once: bool,
}

/// Runs `ebbd relay` with these arguments.
///
/// # Errors
/// The socket cannot be used.
pub fn main(words: impl Iterator<Item = String>) -> anyhow::Result<()> {
    let arguments = Arguments::parse_from(["ebbd relay".to_owned()].into_iter().chain(words));
    crate::support::log::to_stderr(arguments.log.as_deref(), None);
    let device = &arguments.device;
    let Some(socket) = &arguments.socket else {
        crate::support::privileges::of_relay()?;
        let listener = UnixListener::from(std::io::stdin().as_fd().try_clone_to_owned()?);
        let why = ebb_vhost::relay::run_once(&listener, device, QEMU_WITHIN)?;
        tracing::info!("{}: the front end: {why}", device.display());
        return Ok(());
    };
    let listener = ebb_vhost::socket::listen(socket)?;
    crate::support::privileges::of_relay()?;
    tracing::info!("serving {} at {}", device.display(), socket.display());
    ebb_vhost::relay::run(&listener, device)
}
