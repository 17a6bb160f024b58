//! The tests that look for rare events, again and again for as long as wished.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::{cargo, guest_kernel};

/// What may go wrong once in thousands of times: kvmtest whole, the allocator's threads, and
/// these of vmtest.
const VM_TESTS: [&str; 19] = [
    "attach",
    "death",
    "devices",
    "disk",
    "dma",
    "evict",
    "faults",
    "full",
    "guest_kernel",
    "hyperalloc",
    "idle",
    "in_flight",
    "large_folios",
    "limit",
    "reclaim",
    "scarce",
    "service",
    "store",
    "swap",
];

/// How long.
#[derive(clap::Args)]
pub struct Args {
    /// Begin no new round after so many minutes
    #[arg(long, default_value_t = 60)]
    minutes: u64,
    /// Fuzz each target for so many seconds in every round
    #[arg(long, default_value_t = 60)]
    fuzz_seconds: u64,
}

/// Rounds of all of it until the time is up, or one fails.
///
/// # Errors
/// The first thing that failed.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let (began, limit) = (Instant::now(), Duration::from_secs(60 * args.minutes));
    cargo::run(cargo::command().args(["build", "--release", "-p", "ebb", "-p", "ebbd"]))?;
    guest_kernel::run(&guest_kernel::Args::host())?;
    for round in 1.. {
        println!("== soak: round {round}, {} min so far", began.elapsed().as_secs() / 60);
        tests("kvmtest", &[])?;
        tests("llfree-tests", &["threads"])?;
        tests("vmtest", &VM_TESTS)?;
        fuzz(args.fuzz_seconds)?;
        if began.elapsed() >= limit {
            println!("== soak: {round} rounds without a failure");
            break;
        }
    }
    Ok(())
}

fn tests(package: &str, only: &[&str]) -> anyhow::Result<()> {
    let mut command = cargo::command();
    command.args(["test", "--release", "-p", package]);
    command.env("EBB_LONG", "1");
    command.args(only.iter().flat_map(|test| ["--test", test]));
    cargo::run(command.args(["--", "--test-threads=1"]))
}

fn fuzz(seconds: u64) -> anyhow::Result<()> {
    let mut script = Command::new(cargo::workspace().join("scripts/fuzz"));
    let status = script.arg(seconds.to_string()).status().context("scripts/fuzz")?;
    ensure!(status.success(), "a fuzz target fails, see above");
    Ok(())
}
