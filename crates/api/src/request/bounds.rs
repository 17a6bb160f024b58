//! The bounds of what can be asked for, and the refusal of what is beyond them.

use std::path::Path;

use ebb_units::{Bytes, HUGE_BYTES};
use serde::{Deserialize, Serialize};

use crate::status::ORDER_MAX;

/// Smallest memory of a VM.
pub const MEMORY_BYTES_MIN: u64 = 64 << 20;
/// Largest memory of a VM.
pub const MEMORY_BYTES_MAX: u64 = 1 << 40;
/// Most vCPUs of a VM (QEMU's limit without interrupt remapping).
pub const CPUS_MAX: u32 = 255;
/// Most NUMA nodes of a VM.
pub const NODES_MAX: u32 = 16;
/// Shortest time between two automatic reclaims.
pub const INTERVAL_MS_MIN: u64 = 100;
/// Longest time between two automatic reclaims.
pub const INTERVAL_MS_MAX: u64 = 24 * 3600 * 1000;
/// Available memory of the host below which there is pressure, in percent, unless a request says
/// otherwise.
pub const BELOW_PERCENT_DEFAULT: u32 = 10;
/// The smallest blocks taken unless a request says otherwise: 2 MiB.
pub const MIN_ORDER_DEFAULT: u8 = 9;
/// The smallest blocks that can be asked for, 256 KiB: several smaller ones share one frame of page
/// metadata, and a write to it would bring all of them back.
pub const MIN_ORDER_LEAST: u8 = 6;

/// A request that no VM or host could meet.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize)]
#[error("{0}")]
pub struct BadRequest(pub(super) String);

impl BadRequest {
    /// A request that makes no sense for this reason.
    pub(crate) fn of(why: impl ToString) -> BadRequest {
        BadRequest(why.to_string())
    }
}

pub(crate) fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), BadRequest> {
    if holds { Ok(()) } else { Err(BadRequest(otherwise())) }
}

pub(super) fn check_memory(bytes: u64) -> Result<(), BadRequest> {
    let size = Bytes(bytes);
    ensure((MEMORY_BYTES_MIN..=MEMORY_BYTES_MAX).contains(&bytes), || {
        let (min, max) = (Bytes(MEMORY_BYTES_MIN), Bytes(MEMORY_BYTES_MAX));
        format!("memory of {size} is out of range: give {min} to {max}")
    })?;
    ensure(bytes.is_multiple_of(HUGE_BYTES), || {
        format!("memory of {size:#} is not a multiple of {}", Bytes(HUGE_BYTES))
    })
}

pub(super) fn check_min_order(order: Option<u8>) -> Result<(), BadRequest> {
    let range = MIN_ORDER_LEAST..=ORDER_MAX;
    ensure(order.is_none_or(|order| range.contains(&order)), || {
        let order = order.unwrap_or_default();
        format!(
            "blocks of order {order} cannot be reclaimed: give {MIN_ORDER_LEAST} to {ORDER_MAX}"
        )
    })
}

pub(super) fn check_absolute(path: &Path) -> Result<(), BadRequest> {
    ensure(path.is_absolute(), || format!("{} is not an absolute path", path.display()))
}
