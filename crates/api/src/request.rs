//! What a client may ask for.

mod bounds;
mod disk;
mod run;

use std::path::PathBuf;

use ebb_units::Bytes;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

pub(crate) use self::bounds::ensure;
pub use self::bounds::{
    BELOW_PERCENT_DEFAULT, BadRequest, CPUS_MAX, INTERVAL_MS_MAX, INTERVAL_MS_MIN,
    MEMORY_BYTES_MAX, MEMORY_BYTES_MIN, MIN_ORDER_DEFAULT, MIN_ORDER_LEAST, NODES_MAX,
};
use self::bounds::{check_absolute, check_min_order};
pub use self::disk::DiskRequest;
pub use self::run::RunRequest;
use crate::{Mode, OnViolation, ReclaimWhen, SizeMechanism, VmName};

/// Manage a QEMU that runs already.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachRequest {
    /// The VM's name, unique on the host.
    #[schema(value_type = String)]
    pub name: VmName,
    /// QEMU's process.
    pub pid: i32,
    /// QEMU's QMP socket, as an absolute path; null: Ebb looks for it on QEMU's command line.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub qmp: Option<PathBuf>,
    /// How reclaimed memory is watched; null: Ebb chooses.
    #[serde(default)]
    pub mode: Option<Mode>,
    /// Smallest buddy block to reclaim, as its order: 6 to 10; null: 9, which is 2 MiB.
    #[serde(default)]
    pub min_order: Option<u8>,
}

impl AttachRequest {
    /// Checks all that needs neither the host nor QEMU.
    pub fn check(&self) -> Result<(), BadRequest> {
        ensure(self.pid > 1, || format!("{} is the pid of no QEMU", self.pid))?;
        check_min_order(self.min_order)?;
        self.qmp.as_deref().map_or(Ok(()), check_absolute)
    }
}

/// How much to tell about a VM.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct StatusQuery {
    /// Look at every frame of the guest, which takes milliseconds per GiB. Without this, figures
    /// that need it are null. What another client had counted less than a second ago is told again.
    #[serde(default)]
    #[param(required = false)]
    pub counts: bool,
}

/// Reclaim the guest's free memory once.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReclaimRequest {
    /// Stop once this much is reclaimed; null: reclaim all but a reserve.
    #[serde(default)]
    pub bytes: Option<u64>,
}

/// Switch automatic reclaim on or off.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AutoRequest {
    /// Whether Ebb reclaims by itself.
    pub on: bool,
    /// What begins a round; null keeps what is set (at first: interval).
    // Left out if not set, as the two thresholds are: earlier releases refuse unknown fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<ReclaimWhen>,
    /// Time between two reclaims, 100 ms to a day; null keeps what is set (at first 5 s).
    #[serde(default)]
    pub interval_ms: Option<u64>,
    /// The host is short of memory if less than this part of its memory is available, 0 to 100
    /// percent; null keeps what is set (at first 10). In place of `below_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below_percent: Option<u32>,
    /// The host is short of memory if less than this is available; null keeps what is set. In place
    /// of `below_percent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below_bytes: Option<u64>,
    /// Free memory to leave in the guest; null keeps what is set (at first 0: the reserve alone).
    #[serde(default)]
    pub keep_bytes: Option<u64>,
}

impl AutoRequest {
    /// Checks all that needs no VM.
    pub fn check(&self) -> Result<(), BadRequest> {
        let fits = |ms| (INTERVAL_MS_MIN..=INTERVAL_MS_MAX).contains(&ms);
        ensure(self.interval_ms.is_none_or(fits), || {
            "the interval is out of range: give 100ms to 24h".into()
        })?;
        ensure(self.below_percent.is_none_or(|percent| percent <= 100), || {
            let percent = self.below_percent.unwrap_or_default();
            format!("a threshold of {percent} % is out of range: give 0% to 100%")
        })?;
        ensure(self.below_percent.is_none() || self.below_bytes.is_none(), || {
            "two thresholds of the host's memory: give it in percent or in bytes".into()
        })?;
        let is_below = self.below_percent.is_some() || self.below_bytes.is_some();
        ensure(self.when != Some(ReclaimWhen::Interval) || !is_below, || {
            "a threshold of host memory (--below) belongs to --when pressure: give both".into()
        })
    }
}

/// Set or lift the limit on a VM's resident memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitRequest {
    /// The limit; null: lift it.
    pub bytes: Option<u64>,
    /// Low mark: eviction goes down to this; null: a little below the high mark.
    #[serde(default)]
    pub low_bytes: Option<u64>,
    /// High mark: above this, the guest's faults wait for eviction; null: a little below the limit.
    #[serde(default)]
    pub high_bytes: Option<u64>,
}

impl LimitRequest {
    /// Checks all that needs no VM.
    pub fn check(&self) -> Result<(), BadRequest> {
        let Self { bytes, low_bytes, high_bytes } = *self;
        let Some(limit) = bytes else {
            return ensure(low_bytes.is_none() && high_bytes.is_none(), || {
                "low and high marks belong to a limit: give its size, too".into()
            });
        };
        let high = high_bytes.unwrap_or(limit);
        ensure(high <= limit, || {
            let (high, limit) = (Bytes(high), Bytes(limit));
            format!("a high mark of {high} is above the limit of {limit}: give {limit} or less")
        })?;
        ensure(low_bytes.is_none_or(|low| low < high), || {
            let (low, high) = (Bytes(low_bytes.unwrap_or(0)), Bytes(high));
            format!(
                "a low mark of {low} is not below {high}, where faults begin to wait: give less"
            )
        })
    }
}

/// Set a VM's target size, or keep the size that it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeRequest {
    /// The target, of the node if one is named; null: no target, the VM keeps its size.
    pub bytes: Option<u64>,
    /// Resize this NUMA node only; null: the whole VM.
    #[serde(default)]
    pub node: Option<u32>,
    /// Use only this mechanism; null: Ebb chooses.
    #[serde(default)]
    pub by: Option<SizeMechanism>,
    /// What happens if the guest touches hard-reclaimed memory; null keeps what is set (at first:
    /// allow).
    #[serde(default)]
    pub on_violation: Option<OnViolation>,
}

impl ResizeRequest {
    /// Checks all that needs no VM.
    pub fn check(&self) -> Result<(), BadRequest> {
        ensure(self.bytes.is_some() || (self.node.is_none() && self.by.is_none()), || {
            "`off` leaves the VM as it is: --node and --by belong to a size".into()
        })
    }
}

/// Evict memory now, whether it is used or not: for tests and emergencies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EvictRequest {
    /// How much to evict.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const AUTO: AutoRequest = AutoRequest {
        on: true,
        when: None,
        interval_ms: None,
        below_percent: None,
        below_bytes: None,
        keep_bytes: None,
    };

    #[test]
    fn off_goes_alone() {
        let off = ResizeRequest { bytes: None, node: None, by: None, on_violation: None };
        assert_eq!(off.check(), Ok(()));
        assert_eq!(ResizeRequest { bytes: Some(1), node: Some(0), ..off }.check(), Ok(()));
        assert!(ResizeRequest { node: Some(0), ..off }.check().is_err());
        assert!(ResizeRequest { by: Some(SizeMechanism::Balloon), ..off }.check().is_err());
    }

    #[test]
    fn refuses_pids_that_no_vmm_has() {
        let attach = |pid| AttachRequest {
            name: "web".parse().expect("a name"),
            pid,
            qmp: None,
            mode: None,
            min_order: None,
        };
        assert_eq!(attach(2).check(), Ok(()));
        for pid in [i32::MIN, -1, 0, 1] {
            assert!(attach(pid).check().is_err(), "{pid}");
        }
    }

    #[test]
    fn refuses_intervals_that_spin_or_never_come() {
        let auto = |ms| AutoRequest { interval_ms: Some(ms), ..AUTO }.check().is_ok();
        assert!(auto(INTERVAL_MS_MIN) && auto(INTERVAL_MS_MAX));
        assert!(!auto(INTERVAL_MS_MIN - 1) && !auto(INTERVAL_MS_MAX + 1) && !auto(u64::MAX));
    }

    #[test]
    fn a_threshold_is_one_and_belongs_to_pressure() {
        let check = |when, below_percent, below_bytes| {
            let request = AutoRequest { when, below_percent, below_bytes, ..AUTO };
            request.check().map_err(|error| error.0)
        };
        let [interval, pressure] = [ReclaimWhen::Interval, ReclaimWhen::Pressure].map(Some);
        for (when, percent, bytes) in [
            (interval, None, None),
            (pressure, None, None),
            (pressure, Some(100), None),
            (pressure, None, Some(0)),
            (None, Some(0), None),
        ] {
            assert_eq!(check(when, percent, bytes), Ok(()), "{when:?}, {percent:?}, {bytes:?}");
        }
        for (when, percent, bytes, why) in [
            (pressure, Some(101), None, "give 0% to 100%"),
            (pressure, Some(1), Some(1), "in percent or in bytes"),
            (interval, Some(1), None, "belongs to --when pressure"),
            (interval, None, Some(1), "belongs to --when pressure"),
        ] {
            let refused = check(when, percent, bytes).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn an_earlier_release_understands_what_it_knows() {
        let text = serde_json::to_string(&AUTO).expect("text");
        assert_eq!(text, r#"{"on":true,"interval_ms":null,"keep_bytes":null}"#);
        let full = AutoRequest {
            when: Some(ReclaimWhen::Pressure),
            below_percent: Some(5),
            below_bytes: Some(7),
            ..AUTO
        };
        let text = serde_json::to_string(&full).expect("text");
        assert_eq!(serde_json::from_str::<AutoRequest>(&text).expect("a request"), full);
    }

    #[test]
    fn marks_lie_below_their_limit_in_order() {
        let check = |bytes, low_bytes, high_bytes| {
            LimitRequest { bytes, low_bytes, high_bytes }.check().map_err(|error| error.0)
        };
        for (low, high) in [
            (None, None),
            (Some(80), None),
            (None, Some(90)),
            (Some(80), Some(90)),
            (None, Some(100)),
        ] {
            assert_eq!(check(Some(100), low, high), Ok(()), "{low:?}, {high:?}");
        }
        for (bytes, low, high, why) in [
            (None, Some(80), None, "belong to a limit"),
            (None, None, Some(90), "belong to a limit"),
            (Some(100), None, Some(101), "above the limit of 100 B"),
            (Some(100), Some(100), None, "not below 100 B"),
            (Some(100), Some(90), Some(90), "not below 90 B"),
        ] {
            let refused = check(bytes, low, high).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
