//! The pilot: what guests get done on a host that has too little for all of them, how soon a guest
//! gets back what it misses, and what the pilot itself costs.

pub mod cost;
pub mod relief;
mod requests;
mod side;
pub mod work;

use std::time::{Duration, Instant};

use anyhow::Context;
use ebb_api::PilotStatus;
use vmtest::Host;

use crate::bench::samples::wait_until;

/// Returns what the pilot says.
///
/// # Errors
/// The daemon does not answer.
fn status(host: &Host) -> anyhow::Result<PilotStatus> {
    let ran = host.ebb("pilot --json");
    serde_json::from_str(&ran.stdout).with_context(|| format!("ebb pilot: {}", ran.stderr))
}

/// Waits, unless somebody interrupts.
///
/// # Errors
/// Somebody interrupted.
fn rest(time: Duration) -> anyhow::Result<()> {
    wait_until(Instant::now() + time)
}
