//! Runs Cargo.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// The root of the workspace.
pub fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns the cargo that started this program, to be run in the workspace.
pub fn command() -> Command {
    let cargo = env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
    let mut command = Command::new(cargo);
    command.current_dir(workspace());
    command
}

/// Runs `command` to its end.
///
/// # Errors
/// The program does not start, or fails.
pub fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().context("cargo does not start")?;
    ensure!(status.success(), "cargo fails, see above");
    Ok(())
}
