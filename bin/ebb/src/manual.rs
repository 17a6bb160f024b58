//! Man pages and completions, both derived from the command line's definition.

use std::fs;
use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Args;

/// Returns the completion script of `shell`.
pub fn completions(shell: Shell) -> anyhow::Result<String> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "ebb", &mut script);
    Ok(String::from_utf8(script)?)
}

/// Writes `ebb.1` and one page per command into `dir`.
pub fn write_pages(dir: &Path) -> anyhow::Result<String> {
    fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(Args::command(), dir))
        .with_context(|| format!("cannot write man pages to {}", dir.display()))?;
    Ok(String::new())
}
