//! QEMU's virtio-balloon (VIRTIO 1.2, 5.5): its size, and what the guest tells through it.
//!
//! QEMU gives the memory left beside the balloon, with DIMMs and without virtio-mem. This module
//! always gives the bytes in the balloon.

use serde_json::{Value, json};

use crate::driver::{self, GuestDriver};
use crate::qmp::{Qmp, QmpError};

const KIND: &str = "virtio-balloon";
const REPORTING: &str = "VIRTIO_BALLOON_F_REPORTING";

/// QEMU's balloon device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Balloon {
    /// The balloon's QOM path.
    pub path: String,
    /// Bytes in the balloon.
    pub held_bytes: u64,
    /// Whether the guest drives the balloon.
    pub driver: GuestDriver,
    /// Whether the guest deflates the balloon before it kills a process.
    pub deflates_on_oom: bool,
    /// Whether QEMU offers free page reporting.
    pub reporting_offered: bool,
    /// What the guest tells about its memory.
    pub stats: Stats,
}

impl Balloon {
    /// Whether the guest reports its free pages. `None` if not known.
    pub fn is_reporting(&self) -> Option<bool> {
        self.driver.took(REPORTING)
    }
}

/// A guest's own figures. `None` where it does not tell.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stats {
    /// When the guest reported them, in seconds since 1970. 0 means never.
    pub updated_s: u64,
    /// Bytes that the guest's kernel manages.
    pub total_bytes: Option<u64>,
    /// Free bytes.
    pub free_bytes: Option<u64>,
    /// Bytes that are free, or in caches that the guest can drop.
    pub available_bytes: Option<u64>,
    /// Bytes of page cache.
    pub cache_bytes: Option<u64>,
    /// Bytes read from the guest's own swap space.
    pub swapped_in_bytes: Option<u64>,
    /// Bytes written to the guest's own swap space.
    pub swapped_out_bytes: Option<u64>,
    /// Number of faults that waited for a disk.
    pub major_faults: Option<u64>,
    /// Number of faults that did not wait for a disk.
    pub minor_faults: Option<u64>,
}

/// Returns the VM's balloon, if it has one. QEMU has room for one only. `initial_bytes` is the VM's
/// memory without virtio-mem.
///
/// # Errors
/// [`QmpError`].
pub fn look(qmp: &mut Qmp, initial_bytes: u64) -> Result<Option<Balloon>, QmpError> {
    let Some(path) = driver::devices(qmp, KIND)?.into_iter().next() else { return Ok(None) };
    let left = qmp.execute("query-balloon", json!({}))?;
    let left = left.get("actual").and_then(Value::as_u64).unwrap_or(initial_bytes);
    let mut is_on = |name| {
        let value = driver::property(qmp, &path, name)?;
        Ok::<bool, QmpError>(value.and_then(|value| value.as_bool()).unwrap_or(false))
    };
    let (deflates_on_oom, reporting_offered) =
        (is_on("deflate-on-oom")?, is_on("free-page-reporting")?);
    let stats = driver::property(qmp, &path, "guest-stats")?;
    let driver = driver::of(qmp, &path)?;
    // What QEMU remembers of a guest before its reset is stale.
    let is_absent = driver == GuestDriver::Absent;
    let held_bytes = if is_absent { 0 } else { initial_bytes.saturating_sub(left) };
    let stats = stats.filter(|_| !is_absent).map(|stats| parse(&stats)).unwrap_or_default();
    Ok(Some(Balloon { path, held_bytes, driver, deflates_on_oom, reporting_offered, stats }))
}

/// Makes QEMU ask the guest for its figures every `seconds` seconds. 0 means not at all.
///
/// # Errors
/// [`QmpError`].
pub fn poll_stats(qmp: &mut Qmp, balloon: &Balloon, seconds: u64) -> Result<(), QmpError> {
    let property = "guest-stats-polling-interval";
    let set = json!({ "path": balloon.path, "property": property, "value": seconds });
    qmp.execute("qom-set", set).map(drop)
}

/// Asks the guest to put `held_bytes` into the balloon.
///
/// # Errors
/// [`QmpError`]. QEMU refuses a balloon that leaves nothing.
pub fn request(qmp: &mut Qmp, initial_bytes: u64, held_bytes: u64) -> Result<(), QmpError> {
    let left = initial_bytes.saturating_sub(held_bytes);
    qmp.execute("balloon", json!({ "value": left })).map(drop)
}

fn parse(answer: &Value) -> Stats {
    // All bits set means that the guest did not report it.
    let figure = |key: &str| {
        let value = answer.get("stats").and_then(|stats| stats.get(key)).and_then(Value::as_u64);
        value.filter(|value| *value != u64::MAX)
    };
    Stats {
        updated_s: answer.get("last-update").and_then(Value::as_u64).unwrap_or(0),
        total_bytes: figure("stat-total-memory"),
        free_bytes: figure("stat-free-memory"),
        available_bytes: figure("stat-available-memory"),
        cache_bytes: figure("stat-disk-caches"),
        swapped_in_bytes: figure("stat-swap-in"),
        swapped_out_bytes: figure("stat-swap-out"),
        major_faults: figure("stat-major-faults"),
        minor_faults: figure("stat-minor-faults"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_that_a_guest_does_not_report_are_none() {
        let stats = parse(&json!({
            "last-update": 1_700_000_000u64,
            "stats": { "stat-total-memory": 4096, "stat-free-memory": u64::MAX, "stat-htlb": 1 },
        }));
        assert_eq!((stats.updated_s, stats.total_bytes), (1_700_000_000, Some(4096)));
        assert_eq!((stats.free_bytes, stats.available_bytes), (None, None));
        assert_eq!(parse(&json!({ "last-update": -1, "stats": [] })), Stats::default());
    }
}
