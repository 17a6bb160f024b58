//! Cargo, as a program to run.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// The root of the workspace.
pub fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The cargo that started this program.
pub fn command() -> Command {
    let cargo = env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
    let mut command = Command::new(cargo);
    command.current_dir(workspace());
    command
}

/// Runs it to its end.
///
/// # Errors
/// It does not start, or fails.
pub fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().context("cargo does not start")?;
    ensure!(status.success(), "cargo fails, see above");
    Ok(())
}
