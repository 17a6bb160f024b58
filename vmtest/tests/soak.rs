//! A short form of `cargo xtask soak all`: everything at once, and everything that can die or fail.

use std::time::Duration;

use vmtest::rounds;
use vmtest::soak::{self, Plan, Tally};

/// Environment variable with the seed of a soak to repeat.
const SEED: &str = "EBB_SOAK_SEED";

fn seed() -> u64 {
    let given = std::env::var(SEED).ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("{SEED}={seed}");
    seed
}

fn run(time: Duration, vms: usize, spoils: bool) -> Tally {
    let tally = soak::run(&Plan {
        seed: seed(),
        time,
        vms,
        spoils,
        is_interrupted: &|| false,
        tell: &|tally| eprintln!("{tally}"),
        tell_every: Duration::from_secs(60),
        evidence: None,
    });
    eprintln!("{tally}");
    tally
}

#[test]
fn nothing_is_lost_whatever_dies_or_fails() {
    let tally = run(Duration::from_secs(60 * u64::from(rounds(1, 15))), 4, false);
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
    let tally = run(Duration::from_secs(600), 1, true);
    assert!(tally.wrong_bytes > 0 && !tally.is_good(), "{tally}");
    assert!(tally.failures.iter().any(|why| why.contains("wrong bytes in")), "{tally}");
}
