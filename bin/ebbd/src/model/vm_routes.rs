//! Routes of a VM's process that only `ebbd` uses.

/// GET with `after=NUMBER`: [`VmFigures`](super::figures::VmFigures) of a later number; no content:
/// none came for 5 s. With `watch=true` the guest is asked what it needs, if it can unplug memory.
pub const FIGURES: &str = "/v1/figures";
/// PUT a [`Share`](super::share::Share), or null. Answers with the
/// [`VmFigures`](super::figures::VmFigures) after the change.
pub const POOL_SHARE: &str = "/v1/pool-share";
/// PUT a limit in bytes, or null. Answers with the [`VmFigures`](super::figures::VmFigures) after
/// the change.
pub const POOL_LIMIT: &str = "/v1/pool-limit";
/// PUT a limit in bytes, or null. Answers with the [`VmFigures`](super::figures::VmFigures) after
/// the change.
pub const PILOT_LIMIT: &str = "/v1/pilot-limit";
/// PUT the most bytes of memory that compressed pages may take, or null: as the daemon's option has
/// it. Answers with the [`VmFigures`](super::figures::VmFigures) after the change.
pub const PILOT_COMPRESSED: &str = "/v1/pilot-compressed";
/// PUT a [`PlugRequest`](super::piloted::PlugRequest). Answers with the
/// [`VmFigures`](super::figures::VmFigures) after the change.
pub const PILOT_PLUGGED: &str = "/v1/pilot-plugged";
/// POST an [`ebb_api::ReclaimRequest`]. Answers with an [`ebb_api::ReclaimReport`]. What keeps
/// coming back although the guest does not use it is left alone.
pub const PILOT_RECLAIM: &str = "/v1/pilot-reclaim";
/// GET a [`WorkProgress`](super::work::WorkProgress). DELETE: cancels the work. The requests that
/// take long are known by a [`WorkQuery`](super::work::WorkQuery) while they last.
pub const WORK: &str = "/v1/works/{id}";
/// PUT a [`PressureNotice`](super::host_pressure::PressureNotice). Answers with the bytes that were
/// reclaimed.
pub const HOST_PRESSURE: &str = "/v1/host-pressure";
