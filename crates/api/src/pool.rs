//! Fast memory that VMs share.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::request::ensure;
use crate::{BadRequest, VmName};

/// The lower limit of a share unless a request says otherwise.
pub const LOWER_PERCENT_DEFAULT: u32 = 75;
/// The upper one.
pub const UPPER_PERCENT_DEFAULT: u32 = 125;
/// The most that the upper one can be.
pub const UPPER_PERCENT_MAX: u32 = 10_000;

/// Set the size of the pool, or end the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolRequest {
    /// The pool's size; null: no pool.
    pub bytes: Option<u64>,
}

/// Give a VM a share of the pool, or take the VM out of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ShareRequest {
    /// The VM's share; null: the VM leaves the pool, and has no limit.
    pub bytes: Option<u64>,
    /// The least that the VM gets, in percent of its share; null: 75.
    #[serde(default)]
    pub lower_percent: Option<u32>,
    /// The most that the VM gets, in percent of its share; null: 125.
    #[serde(default)]
    pub upper_percent: Option<u32>,
}

impl ShareRequest {
    /// Checks all that needs no VM.
    pub fn check(&self) -> Result<(), BadRequest> {
        let Self { bytes, lower_percent, upper_percent } = *self;
        ensure(bytes.is_some() || (lower_percent.is_none() && upper_percent.is_none()), || {
            "`off` takes the VM out of the pool: --lower and --upper belong to a share".into()
        })?;
        ensure(bytes != Some(0), || "a share of 0 is no share: give a size, or `off`".into())?;
        ensure(lower_percent.is_none_or(|lower| (1..=100).contains(&lower)), || {
            format!(
                "a lower limit of {} % of the share is out of range: give 1 to 100",
                lower_percent.unwrap_or(0)
            )
        })?;
        ensure(upper_percent.is_none_or(|upper| (100..=UPPER_PERCENT_MAX).contains(&upper)), || {
            format!(
                "an upper limit of {} % of the share is out of range: give 100 to \
                     {UPPER_PERCENT_MAX}",
                upper_percent.unwrap_or(0)
            )
        })
    }
}

/// The pool, and the VMs in it.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct PoolStatus {
    /// The pool's size; null: there is no pool.
    pub bytes: Option<u64>,
    /// Sum of all shares.
    pub shares_bytes: u64,
    /// Memory of the pool that no VM has or may take now.
    pub free_bytes: u64,
    /// The VMs in the pool, by name.
    pub vms: Vec<PoolMember>,
}

/// A VM in the pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct PoolMember {
    /// The VM's name.
    #[schema(value_type = String)]
    pub name: VmName,
    /// The VM's share.
    pub share_bytes: u64,
    /// The least that the VM gets.
    pub lower_bytes: u64,
    /// The most that the VM gets.
    pub upper_bytes: u64,
    /// The VM's hot set; null: it was not monitored lately, and its share counts instead.
    pub hot_bytes: Option<u64>,
    /// Host memory that the VM takes now.
    pub held_bytes: u64,
    /// The limit that the pool moves the VM to.
    pub goal_bytes: u64,
    /// The VM's limit now; null: all of its memory.
    pub limit_bytes: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_lie_around_the_share() {
        let check = |bytes, lower_percent, upper_percent| {
            let request = ShareRequest { bytes, lower_percent, upper_percent };
            request.check().map_err(|error| error.to_string())
        };
        for (bytes, lower, upper) in
            [(None, None, None), (Some(1), None, None), (Some(1), Some(100), Some(100))]
        {
            assert_eq!(check(bytes, lower, upper), Ok(()));
        }
        for (bytes, lower, upper, why) in [
            (None, Some(50), None, "belong to a share"),
            (Some(0), None, None, "a share of 0"),
            (Some(1), Some(0), None, "give 1 to 100"),
            (Some(1), Some(101), None, "give 1 to 100"),
            (Some(1), None, Some(99), "give 100 to 10000"),
        ] {
            let refused = check(bytes, lower, upper).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
