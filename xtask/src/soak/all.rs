//! `cargo xtask soak all`: everything at once, for hours.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use vmtest::assets;
use vmtest::soak::{self, Plan, Tally, VMS_MAX};

use crate::{cargo, guard, interrupt, seed};

const HOUR_S: f64 = 3600.0;
const HOURS_MOST: f64 = 1000.0;
const TELL_EVERY: Duration = Duration::from_secs(60);

/// How long, and with what.
#[derive(clap::Args)]
pub struct Args {
    /// Disturb the VMs for so many hours, which may be a fraction
    #[arg(long, default_value_t = 1.0, value_parser = hours)]
    hours: f64,
    /// Seed of all choices [default: a new one]
    #[arg(long)]
    seed: Option<u64>,
    /// Number of VMs at once, of six kinds in turn; each takes about half a GiB
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u8).range(1..=VMS_MAX as i64))]
    vms: u8,
    /// Write the counts to this file as JSON, each minute and at the end
    /// [default: target/soak/all.json]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Damage the guests' memory, to see that it is found
    #[arg(long)]
    spoil: bool,
}

fn hours(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(hours) if hours > 0.0 && hours <= HOURS_MOST => Ok(hours),
        _ => Err(format!("give a number of hours above 0, at most {HOURS_MOST}")),
    }
}

/// Runs a soak, and tells its counts each minute and at the end. An interruption ends it early.
///
/// # Errors
/// Something happened that must not happen, the user interrupts, or it cannot be run here.
pub fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "a soak takes root, as Ebb itself does: use sudo"
    );
    cargo::run(cargo::command().args(["build", "--release", "-p", "ebb", "-p", "ebbd"]))?;
    let directory = assets::target_directory().join("soak");
    let evidence = directory.join("all");
    let json = args.json.clone().unwrap_or_else(|| directory.join("all.json"));
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let seed = args.seed.map_or_else(seed::any, Ok)?;
    println!("== soak of everything: {} VMs, {} h, --seed {seed}", args.vms, args.hours);
    guard::silence();
    interrupt::catch()?;
    let plan = Plan {
        seed,
        time: Duration::from_secs_f64(args.hours * HOUR_S),
        vms: args.vms.into(),
        spoils: args.spoil,
        is_interrupted: &|| interrupt::check().is_err(),
        tell: &|tally| {
            println!("{tally}");
            save(&json, tally).unwrap_or_else(|error| eprintln!("{error:#}"));
        },
        tell_every: TELL_EVERY,
        evidence: Some(&evidence),
    };
    let tally = guard::guard(|| Ok(soak::run(&plan)))?;
    println!("== soak of everything, at its end\n{tally}");
    for (code, why) in &tally.refused_as {
        println!("  refused as    {code}: {why}");
    }
    save(&json, &tally)?;
    println!("counts: {}", json.display());
    interrupt::check()?;
    ensure!(
        tally.is_good(),
        "{} failures, {} wrong bytes: see above, and {}",
        tally.failures.len(),
        tally.wrong_bytes,
        evidence.display()
    );
    Ok(())
}

/// Writes the counts. A reader sees a whole file.
fn save(path: &Path, tally: &Tally) -> anyhow::Result<()> {
    let new = path.with_extension("json.new");
    let say = || path.display().to_string();
    fs::write(&new, serde_json::to_vec_pretty(tally)?).with_context(say)?;
    fs::rename(&new, path).with_context(say)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_make_no_sense_are_refused() {
        assert_eq!(hours("0.05"), Ok(0.05));
        for text in ["0", "-1", "x", "NaN", "inf", "1e9"] {
            assert!(hours(text).unwrap_err().contains("above 0"), "{text}");
        }
    }

    #[test]
    fn counts_are_whole_in_their_file() {
        let scratch = vmtest::Scratch::new("ebb-test-").unwrap();
        let path = scratch.path().join("all.json");
        save(&path, &Tally { wrong_bytes: 3, ..Tally::default() }).unwrap();
        let read: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(read["wrong_bytes"], 3);
        assert!(!path.with_extension("json.new").exists());
    }
}
