//! `ebbd relay`: keeps a front end connected while the process of its device dies and comes
//! back.

use std::path::PathBuf;

use clap::Parser;

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
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Where the device is served; it need not be there yet
    #[arg(long, value_name = "PATH")]
    device: PathBuf,
}

/// Runs `ebbd relay` with what stands behind that.
///
/// # Errors
/// The socket cannot be used.
pub fn main(words: impl Iterator<Item = String>) -> anyhow::Result<()> {
    let arguments = Arguments::parse_from(["ebbd relay".to_owned()].into_iter().chain(words));
    crate::log_to_stderr();
    let listener = ebb_vhost::socket::listen(&arguments.socket)?;
    tracing::info!("serving {} at {}", arguments.device.display(), arguments.socket.display());
    ebb_vhost::relay::run(&listener, &arguments.device)
}
