//! Paths, as axum and OpenAPI write them, and as a client fills them in.

use std::path::{Path, PathBuf};

use crate::VmName;

/// How `ebbd` ends where another one has its run directory.
pub const EXIT_OWNED: i32 = 75;

/// How `ebb resize` ends where the target is on record and not reached.
pub const EXIT_SHORT: u8 = 3;

/// How `ebb` ends where somebody has cancelled the job of its command.
pub const EXIT_CANCELLED: u8 = 4;

/// GET: [`crate::Version`].
pub const VERSION: &str = "/v1/version";
/// GET: [`crate::WhoAmI`].
pub const WHOAMI: &str = "/v1/whoami";
/// GET: a list of [`crate::VmSummary`].
pub const VMS: &str = "/v1/vms";
/// POST [`crate::RunRequest`]: [`crate::VmStatus`].
pub const RUN: &str = "/v1/vms/run";
/// POST [`crate::AttachRequest`]: [`crate::VmStatus`].
pub const ATTACH: &str = "/v1/vms/attach";
/// GET with [`crate::StatusQuery`]: [`crate::VmStatus`]. DELETE: [`crate::DetachReport`].
pub const VM: &str = "/v1/vms/{name}";
/// POST [`crate::ReclaimRequest`]: [`crate::ReclaimReport`].
pub const RECLAIM: &str = "/v1/vms/{name}/reclaim";
/// PUT [`crate::AutoRequest`]: [`crate::AutoStatus`].
pub const AUTO: &str = "/v1/vms/{name}/auto";
/// PUT [`crate::LimitRequest`]: [`crate::LimitStatus`].
pub const LIMIT: &str = "/v1/vms/{name}/limit";
/// PUT [`crate::ResizeRequest`], GET: [`crate::ResizeReport`].
pub const SIZE: &str = "/v1/vms/{name}/size";
/// POST [`crate::EvictRequest`]: [`crate::EvictReport`].
pub const EVICT: &str = "/v1/vms/{name}/evict";
/// POST [`crate::HeatRequest`], GET: [`crate::HeatReport`].
pub const HEAT: &str = "/v1/vms/{name}/heat";
/// PUT [`crate::ShareRequest`]: [`crate::PoolStatus`].
pub const SHARE: &str = "/v1/vms/{name}/share";
/// PUT [`crate::PoolRequest`], GET: [`crate::PoolStatus`].
pub const POOL: &str = "/v1/pool";
/// PUT [`crate::PilotRequest`], GET: [`crate::PilotStatus`].
pub const PILOT: &str = "/v1/pilot";
/// GET: [`crate::PilotSight`].
pub const PILOT_SIGHT: &str = "/v1/pilot/sight";
/// GET: [`crate::Top`].
pub const TOP: &str = "/v1/top";
/// GET: [`crate::HostVms`].
pub const OBSERVE: &str = "/v1/observe";
/// GET with [`crate::HistoryQuery`]: [`crate::History`].
pub const HISTORY: &str = "/v1/history";
/// PUT [`crate::RuleRequest`]: [`crate::PilotStatus`].
pub const RULE: &str = "/v1/vms/{name}/rule";
/// POST, GET: [`crate::Calibration`].
pub const CALIBRATION: &str = "/v1/calibration";
/// GET with [`crate::EventsQuery`]: a stream of [`crate::Event`]s, as server-sent events.
pub const EVENTS: &str = "/v1/events";
/// GET: a list of [`crate::Job`].
pub const JOBS: &str = "/v1/jobs";
/// GET, DELETE: [`crate::Job`].
pub const JOB: &str = "/v1/jobs/{id}";
/// GET: figures in OpenMetrics' text format.
pub const METRICS: &str = "/metrics";
/// GET: the OpenAPI document.
pub const OPENAPI: &str = "/v1/openapi.json";

/// The daemon's socket inside its run directory.
pub const SOCKET_FILE: &str = "ebbd.sock";
/// The daemon's log inside the logs' directory.
pub const LOG_FILE: &str = "ebbd.log";
/// The logs' directory where neither that nor the run directory is named.
pub const LOG_DIR_DEFAULT: &str = "/var/log/ebb";
/// The run directory where none is named.
pub const RUN_DIR_DEFAULT: &str = "/run/ebb";
/// The swap directory where neither that nor the run directory is named: the run directory's
/// default lies in memory, which is no place to swap to.
pub const SWAP_DIR_DEFAULT: &str = "/var/lib/ebb";

/// Where logs are: what `named` says, else the default, or the run directory if that is not its
/// default.
pub fn log_dir(run_dir: &Path, named: Option<&Path>) -> PathBuf {
    match named {
        Some(named) => named.into(),
        None if run_dir == Path::new(RUN_DIR_DEFAULT) => LOG_DIR_DEFAULT.into(),
        None => run_dir.into(),
    }
}

/// Where swap files are: what `named` says, else the default, or the run directory if that is not
/// its default.
pub fn swap_dir(run_dir: &Path, named: Option<&Path>) -> PathBuf {
    match named {
        Some(named) => named.into(),
        None if run_dir == Path::new(RUN_DIR_DEFAULT) => SWAP_DIR_DEFAULT.into(),
        None => run_dir.into(),
    }
}

/// `route` with the VM's name filled in. A name needs no escaping.
pub fn of_vm(route: &str, name: &VmName) -> String {
    route.replace("{name}", name.as_str())
}

/// The path of a job.
pub fn of_job(id: u64) -> String {
    JOB.replace("{id}", &id.to_string())
}

/// `path` of a long operation that is to be a job ([`crate::JobQuery`]).
pub fn as_job(path: &str) -> String {
    format!("{path}?job=true")
}

/// The path that asks for a VM's status with every frame classified.
pub fn full_status(name: &VmName) -> String {
    of_vm(VM, name) + "?counts=true"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_filled_in() {
        let name: VmName = "web-1".parse().expect("a name");
        assert_eq!(of_vm(RECLAIM, &name), "/v1/vms/web-1/reclaim");
        assert_eq!(of_job(7), "/v1/jobs/7");
        assert_eq!(full_status(&name), "/v1/vms/web-1?counts=true");
    }
}
