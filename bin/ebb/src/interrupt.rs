//! Ctrl-C: it ends `ebb`, and not what the daemon has begun.

use std::{process, thread};

use anyhow::Context;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use crate::progress;

/// Exit code that a shell reports for a program that SIGINT ended.
const EXIT_INTERRUPTED: i32 = 130;

/// Makes Ctrl-C print the line `line` before it ends this program.
///
/// # Errors
/// No thread can be started, or the signal cannot be caught.
pub fn say(line: String) -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let mut interrupts = {
        let _inside = runtime.enter();
        signal(SignalKind::interrupt()).context("catching Ctrl-C")?
    };
    thread::Builder::new().spawn(move || {
        if runtime.block_on(interrupts.recv()).is_some() {
            progress::clear();
            eprintln!("ebb: {line}");
            process::exit(EXIT_INTERRUPTED);
        }
    })?;
    Ok(())
}
