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

/// Passes on what a QEMU and a vhost-user device say to each other, until it is killed.
///
/// QEMU's generic vhost-user device does not survive that its back-end comes back. It is to
/// connect here, so that the back-end may die and be started again.
#[derive(Parser)]
#[command(name = "ebbd relay", version)]
struct Arguments {
    /// Where QEMU connects to
    #[arg(long, value_name = "PATH", required_unless_present = "once")]
    socket: Option<PathBuf>,
    /// Where the device is served; it need not be there yet
    #[arg(long, value_name = "PATH")]
    device: PathBuf,
    /// The file that standard error is, to be kept short
    #[arg(long, value_name = "PATH")]
    log: Option<PathBuf>,
    /// Serve one QEMU, which connects to the socket that is standard input, and end with it
    #[arg(long, conflicts_with = "socket")]
    once: bool,
}

/// Runs `ebbd relay` with these arguments.
///
/// # Errors
/// The socket cannot be used.
pub fn main(words: impl Iterator<Item = String>) -> anyhow::Result<()> {
    let arguments = Arguments::parse_from(["ebbd relay".to_owned()].into_iter().chain(words));
    crate::support::log::to_stderr(arguments.log.as_deref());
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
