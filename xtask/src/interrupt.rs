//! Ctrl-C: what was started, mounted and set must not outlive us.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, ensure};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a shell reports after SIGINT.
const EXIT_CODE: i32 = 130;

/// The user has had enough.
static RAISED: AtomicBool = AtomicBool::new(false);

/// From now on SIGINT and SIGTERM only raise a flag, and whoever waits for a VM gives up;
/// a second one ends the program as it is.
///
/// # Errors
/// No handler is to be had.
pub fn catch() -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_io().build().context("signals")?;
    let signals = handlers(&runtime).context("signals")?;
    thread::spawn(move || wait(&runtime, signals));
    Ok(())
}

/// Goes on unless the flag is raised.
///
/// # Errors
/// It is.
pub fn check() -> anyhow::Result<()> {
    ensure!(!RAISED.load(Ordering::Relaxed), "interrupted: the VM and the daemon are gone");
    Ok(())
}

fn handlers(runtime: &Runtime) -> std::io::Result<[Signal; 2]> {
    let _inside = runtime.enter();
    Ok([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?])
}

fn wait(runtime: &Runtime, mut signals: [Signal; 2]) {
    runtime.block_on(either(&mut signals));
    RAISED.store(true, Ordering::Relaxed);
    vmtest::give_up();
    runtime.block_on(either(&mut signals));
    process::exit(EXIT_CODE);
}

async fn either([one, other]: &mut [Signal; 2]) {
    tokio::select! {
        _ = one.recv() => (),
        _ = other.recv() => (),
    }
}
