//! Ctrl-C: what the demo has started must not outlive it.

use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, ensure};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a shell reports after SIGINT.
const EXIT_CODE: i32 = 130;

/// Whether the user has had enough.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on SIGINT and SIGTERM only raise a flag; a second one ends the
    /// program as it is.
    ///
    /// # Errors
    /// No handler is to be had.
    pub fn catch() -> anyhow::Result<Interrupt> {
        let runtime = Builder::new_current_thread().enable_io().build().context("signals")?;
        let signals = handlers(&runtime).context("signals")?;
        let raised = Arc::<AtomicBool>::default();
        let flag = raised.clone();
        thread::spawn(move || wait(&runtime, signals, &flag));
        Ok(Interrupt(raised))
    }

    /// Goes on unless the flag is raised.
    ///
    /// # Errors
    /// It is.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(!self.0.load(Ordering::Relaxed), "interrupted: the demo's VM and daemon are gone");
        Ok(())
    }
}

fn handlers(runtime: &Runtime) -> std::io::Result<[Signal; 2]> {
    let _inside = runtime.enter();
    Ok([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?])
}

fn wait(runtime: &Runtime, mut signals: [Signal; 2], flag: &AtomicBool) {
    runtime.block_on(either(&mut signals));
    flag.store(true, Ordering::Relaxed);
    runtime.block_on(either(&mut signals));
    process::exit(EXIT_CODE);
}

async fn either([one, other]: &mut [Signal; 2]) {
    tokio::select! {
        _ = one.recv() => (),
        _ = other.recv() => (),
    }
}
