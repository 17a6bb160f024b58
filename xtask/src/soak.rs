//! Repeats the tests that look for rare events, for as long as asked; or runs everything at once.

mod all;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use super::{assets, cargo, guest_kernel};

/// The tests of vmtest for what may go wrong once in thousands of times, or takes long to try. All of kvmtest and the
/// allocator's thread tests run besides. The longest tests come first, so that all lanes end at
/// about the same time.
const VM_TESTS: [&str; 25] = [
    "in_flight",
    "hyperalloc",
    "reclaim",
    "guest_kernel",
    "idle",
    "dma",
    "evict",
    "limit",
    "nodes",
    "passthrough",
    "package",
    "death",
    "processes",
    "served_disk",
    "attach",
    "devices",
    "faults",
    "large_folios",
    "service",
    "store",
    "swap",
    "full",
    "scarce",
    "api",
    KUBERNETES,
];

/// The one that needs Kubernetes' API server, which is built here.
const KUBERNETES: &str = "kubernetes";

/// Those of them that need a Linux built here that tracks idle pages, as their host.
const NEED_HOST_KERNEL: [&str; 1] = ["idle"];

/// How long, and how.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    whole: Option<Whole>,
    /// Only these: programs of vmtest's tests, `kvmtest`, `models`, `threads` or `fuzz` [default: all]
    #[arg(value_name = "NAME")]
    only: Vec<String>,
    /// Begin no new round after this many minutes; a round takes about 100 minutes with one lane
    #[arg(long, default_value_t = 60)]
    minutes: u64,
    /// Fuzz each target for this many seconds in each round
    #[arg(long, default_value_t = 60)]
    fuzz_seconds: u64,
    /// Run this many tests at once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    lanes: u8,
}

/// What is no repetition of tests.
#[derive(clap::Subcommand)]
enum Whole {
    /// Several VMs, everything that Ebb can do with them at once, and everything that can die or
    /// fail, while the guests check every byte
    All(all::Args),
}

/// A test, or all of the fuzzing: its name, and the command that runs it.
struct Job {
    name: &'static str,
    command: Command,
}

/// Runs rounds of all jobs until the time is up or a round has a failure. A round with a failure is
/// still run to its end. The output of each job is in `target/soak`.
///
/// # Errors
/// Jobs of a round fail, or cannot be run.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(Whole::All(args)) = &args.whole {
        return all::run(args);
    }
    let (began, limit) = (Instant::now(), Duration::from_secs(60 * args.minutes));
    check_names(&args.only)?;
    if NEED_HOST_KERNEL.iter().any(|name| is_wanted(name, &args.only)) {
        guest_kernel::run(&guest_kernel::Args::host())?;
    }
    if is_wanted(KUBERNETES, &args.only) {
        let built = assets::run_kubernetes();
        // Among all soaks, this one is skipped where it cannot be built.
        built.or_else(|error| if args.only.is_empty() { Ok(()) } else { Err(error) })?;
    }
    build()?;
    for round in 1.. {
        println!("== soak: round {round}, {} min so far", began.elapsed().as_secs() / 60);
        let logs = cargo::workspace().join(format!("target/soak/{round}"));
        fs::create_dir_all(&logs).with_context(|| format!("{}", logs.display()))?;
        let mut jobs = jobs(args.fuzz_seconds);
        jobs.retain(|job| is_wanted(job.name, &args.only));
        let failed = in_lanes(jobs, args.lanes, &logs)?;
        ensure!(failed.is_empty(), "failed in round {round}: {}", failed.join(", "));
        if began.elapsed() >= limit {
            println!("== soak: {round} rounds without a failure");
            break;
        }
    }
    Ok(())
}

fn is_wanted(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|wanted| wanted == name)
}

fn check_names(only: &[String]) -> anyhow::Result<()> {
    let names: Vec<&str> = jobs(0).iter().map(|job| job.name).collect();
    let unknown = only.iter().find(|wanted| !names.contains(&wanted.as_str()));
    match unknown {
        Some(unknown) => bail!("no soak is called {unknown}; there are: {}", names.join(", ")),
        None => Ok(()),
    }
}

fn build() -> anyhow::Result<()> {
    let programs = ["-p", "ebb", "-p", "ebbd", "-p", "ebb-node"];
    cargo::run(cargo::command().args(["build", "--release"]).args(programs))?;
    let tests = ["-p", "vmtest", "-p", "kvmtest", "-p", "llfree-tests"];
    cargo::run(cargo::command().args(["test", "--release", "--no-run"]).args(tests))
}

fn jobs(fuzz_seconds: u64) -> Vec<Job> {
    let mut fuzz = Command::new(cargo::workspace().join("scripts/fuzz"));
    fuzz.arg(fuzz_seconds.to_string());
    let mut jobs: Vec<Job> = VM_TESTS.map(|name| test(name, "vmtest", &["--test", name])).into();
    jobs.insert(1, Job { name: "fuzz", command: fuzz });
    jobs.push(test("kvmtest", "kvmtest", &[]));
    jobs.push(models());
    jobs.push(test("threads", "llfree-tests", &["--test", "threads"]));
    jobs
}

fn test(name: &'static str, package: &str, only: &[&str]) -> Job {
    let mut command = cargo::command();
    command.args(["test", "--release", "-p", package]).args(only).args(["--", "--test-threads=1"]);
    command.env("EBB_LONG", "1");
    Job { name, command }
}

/// Interleavings of the threads that meet in the ledger, and in the allocator.
fn models() -> Job {
    let mut command = cargo::command();
    command.args(["test", "--release", "--lib", "-p", "ebb-ledger", "-p", "ebb-llfree"]);
    command.arg("--target-dir").arg(cargo::workspace().join("target/loom"));
    command.env("RUSTFLAGS", "--cfg loom").env("EBB_LONG", "1");
    Job { name: "models", command }
}

/// Runs all jobs, `lanes` at once. Returns the names of those that failed.
fn in_lanes(jobs: Vec<Job>, lanes: u8, logs: &Path) -> anyhow::Result<Vec<&'static str>> {
    let (left, failed) = (Mutex::new(jobs.into_iter()), Mutex::new(Vec::new()));
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let lane = || -> anyhow::Result<()> {
        while let Some(job) = next() {
            let name = job.name;
            if !passes(job, logs.join(format!("{name}.log")))? {
                failed.lock().unwrap_or_else(PoisonError::into_inner).push(name);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().try_for_each(|lane| match lane.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(failed.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn passes(mut job: Job, log: PathBuf) -> anyhow::Result<bool> {
    let began = Instant::now();
    let to = File::create(&log).with_context(|| format!("{}", log.display()))?;
    let status = job.command.stdout(to.try_clone()?).stderr(to).status();
    let status = status.with_context(|| format!("{} does not start", job.name))?;
    let seconds = began.elapsed().as_secs();
    match status.success() {
        true => println!("{} passed, {seconds} s", job.name),
        false => println!("{} FAILED, {seconds} s: see {}", job.name, log.display()),
    }
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_gets_the_names_there_are() {
        check_names(&["dma".into(), "fuzz".into()]).unwrap();
        let why = check_names(&["dmas".into()]).unwrap_err().to_string();
        assert!(why.contains("dmas") && why.contains("in_flight, fuzz"), "{why}");
    }

    #[test]
    fn each_name_is_a_program_of_tests() {
        let tests = cargo::workspace().join("vmtest/tests");
        let is_there = |name: &&str| {
            let (file, room) = (tests.join(name).with_extension("rs"), tests.join(name));
            file.is_file() || room.join("main.rs").is_file()
        };
        let missing: Vec<&str> = VM_TESTS.into_iter().filter(|name| !is_there(name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn each_name_of_a_kernel_is_one_of_a_test() {
        assert!(NEED_HOST_KERNEL.iter().all(|name| VM_TESTS.contains(name)));
    }
}
