//! QEMU's virtio-balloon (VIRTIO 1.2, 5.5): what it holds, what the guest tells by it.
//!
//! QEMU speaks of what is left beside the balloon, DIMMs included and virtio-mem not; here it
//! is always what the balloon holds.

use serde_json::{Value, json};

use crate::driver::{self, Driver};
use crate::qmp::{Qmp, QmpError};

const KIND: &str = "virtio-balloon";
const REPORTING: &str = "VIRTIO_BALLOON_F_REPORTING";

/// A balloon.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Balloon {
    /// Its QOM path.
    pub path: String,
    /// What it holds.
    pub held_bytes: u64,
    /// Whether the guest drives it.
    pub driver: Driver,
    /// The guest takes memory out of it before it kills a process.
    pub deflates_on_oom: bool,
    /// QEMU offers to be told of free pages.
    pub reporting_offered: bool,
    /// What the guest says of its memory.
    pub stats: Stats,
}

impl Balloon {
    /// Whether the guest tells of its free pages; `None`: not known.
    pub fn is_reporting(&self) -> Option<bool> {
        self.driver.took(REPORTING)
    }
}

/// A guest's own figures; `None`: it does not tell.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stats {
    /// When it told, in seconds since 1970; 0: never.
    pub updated_s: u64,
    /// What its kernel manages.
    pub total_bytes: Option<u64>,
    /// Free.
    pub free_bytes: Option<u64>,
    /// Free, and caches that it can drop.
    pub available_bytes: Option<u64>,
    /// Its page cache.
    pub cache_bytes: Option<u64>,
    /// Read from its own swap space.
    pub swapped_in_bytes: Option<u64>,
    /// Written there.
    pub swapped_out_bytes: Option<u64>,
    /// Faults that waited for a disk.
    pub major_faults: Option<u64>,
    /// Faults that did not.
    pub minor_faults: Option<u64>,
}

/// The VM's balloon, if it has one; QEMU has room for one only. `initial_bytes`: the VM's
/// memory but for virtio-mem.
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
    // What QEMU remembers of a guest that was reset says nothing.
    let gone = driver == Driver::Absent;
    let held_bytes = if gone { 0 } else { initial_bytes.saturating_sub(left) };
    let stats = stats.filter(|_| !gone).map(|stats| parse(&stats)).unwrap_or_default();
    Ok(Some(Balloon { path, held_bytes, driver, deflates_on_oom, reporting_offered, stats }))
}

/// Has QEMU ask the guest for its figures every so many seconds; 0: not at all.
///
/// # Errors
/// [`QmpError`].
pub fn poll_stats(qmp: &mut Qmp, balloon: &Balloon, seconds: u64) -> Result<(), QmpError> {
    let property = "guest-stats-polling-interval";
    let set = json!({ "path": balloon.path, "property": property, "value": seconds });
    qmp.execute("qom-set", set).map(drop)
}

/// Tells the guest how much the balloon is to hold.
///
/// # Errors
/// [`QmpError`]; QEMU refuses a balloon that leaves nothing.
pub fn request(qmp: &mut Qmp, initial_bytes: u64, held_bytes: u64) -> Result<(), QmpError> {
    let left = initial_bytes.saturating_sub(held_bytes);
    qmp.execute("balloon", json!({ "value": left })).map(drop)
}

fn parse(answer: &Value) -> Stats {
    // All bits set: the guest did not tell.
    let told = |key: &str| {
        let value = answer.get("stats").and_then(|stats| stats.get(key)).and_then(Value::as_u64);
        value.filter(|value| *value != u64::MAX)
    };
    Stats {
        updated_s: answer.get("last-update").and_then(Value::as_u64).unwrap_or(0),
        total_bytes: told("stat-total-memory"),
        free_bytes: told("stat-free-memory"),
        available_bytes: told("stat-available-memory"),
        cache_bytes: told("stat-disk-caches"),
        swapped_in_bytes: told("stat-swap-in"),
        swapped_out_bytes: told("stat-swap-out"),
        major_faults: told("stat-major-faults"),
        minor_faults: told("stat-minor-faults"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_does_not_tell_is_none() {
        let stats = parse(&json!({
            "last-update": 1_700_000_000u64,
            "stats": { "stat-total-memory": 4096, "stat-free-memory": u64::MAX, "stat-htlb": 1 },
        }));
        assert_eq!((stats.updated_s, stats.total_bytes), (1_700_000_000, Some(4096)));
        assert_eq!((stats.free_bytes, stats.available_bytes), (None, None));
        assert_eq!(parse(&json!({ "last-update": -1, "stats": [] })), Stats::default());
    }
}
