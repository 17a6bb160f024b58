//! A short form of `cargo xtask soak all`: everything at once, and everything that can die or fail.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vmtest::soak::{self, Plan, Tally};
use vmtest::{assets, has_time, require, rounds};

/// Environment variable with the seed of a soak to repeat.
const SEED: &str = "EBB_SOAK_SEED";
/// What is done in the short form: other seeds are for `cargo xtask soak soak`, whose form is long.
const USUAL_SEED: u64 = 7;

fn seed() -> u64 {
    let given = std::env::var(SEED).ok().and_then(|text| text.parse().ok());
    let any = || has_time("").map_or(USUAL_SEED, |()| u64::from(std::process::id()));
    let seed = given.unwrap_or_else(any);
    eprintln!("{SEED}={seed}");
    seed
}

/// Runs a soak until its time is up, or until `ends` wants it to end once it is told counts.
fn run(time: Duration, vms: usize, spoils: bool, ends: fn(&Tally) -> bool) -> Tally {
    let is_over = AtomicBool::new(false);
    let tally = soak::run(&Plan {
        seed: seed(),
        time,
        vms,
        spoils,
        is_interrupted: &|| is_over.load(Ordering::Relaxed),
        tell: &|tally| {
            eprintln!("{tally}");
            is_over.store(ends(tally), Ordering::Relaxed);
        },
        tell_every: Duration::from_secs(20),
        evidence: Some(&assets::target_directory().join("soak/test")),
    });
    eprintln!("{tally}");
    tally
}

#[test]
fn nothing_is_lost_whatever_dies_or_fails() {
    let time = Duration::from_secs(60 * u64::from(rounds(1, 15)));
    let tally = run(time, 4, false, |_| false);
    assert!(tally.is_good(), "{tally}");
    // It was a soak: the least of what happens in a minute on two slow cores.
    assert!(tally.checked_bytes > 64 << 20, "{tally}");
    for counts in [&tally.requests, &tally.kills, &tally.work] {
        assert!(counts.values().sum::<u64>() > 2, "{tally}");
    }
}

/// A soak that finds nothing tells something only if it finds what is there.
#[test]
fn lost_bytes_are_found() {
    let tally = run(Duration::from_secs(600), 1, true, |_| false);
    assert!(tally.wrong_bytes > 0 && !tally.is_good(), "{tally}");
    assert!(tally.failures.iter().any(|why| why.contains("wrong bytes in")), "{tally}");
}

#[test]
fn an_interrupted_soak_ends_early_and_without_a_failure() {
    require!(has_time("half a minute: cargo xtask soak soak"));
    let tally = run(Duration::from_secs(86_400), 2, false, |tally| tally.checked_bytes > 0);
    assert!(tally.is_good() && tally.checked_bytes > 0, "{tally}");
}
