//! What `ebbd` says and understands over its UNIX socket: types, paths, OpenAPI.
//!
//! HTTP/1.1 with JSON bodies. A refusal is an [`ApiErrorBody`]; its [`ErrorCode`] says why, and
//! gives the HTTP status. `GET /v1/events` is a stream of [`Event`]s.
//! No I/O and no policy here: both sides of the socket share only this crate.
#![forbid(unsafe_code)]

pub mod advice;
mod calibration;
mod choice;
mod confinement;
mod error;
mod event;
mod heat;
mod history;
mod host_vms;
mod job;
mod name;
mod observed;
mod openapi;
mod pilot;
mod pool;
mod report;
mod request;
mod role;
pub mod route;
mod status;
mod top;

pub use calibration::{Calibration, TierSpeed};
pub use choice::{
    Accelerator, Backing, DeviceServer, DiskFormat, DmaMode, DriverState, HeatTracker, MayTake,
    Mechanism, Mode, OnViolation, PilotMode, PilotStage, ReclaimWhen, SizeMechanism, SizeState,
    State, VmClass,
};
pub use confinement::Confinement;
pub use error::{ApiErrorBody, ErrorCode};
pub use event::{
    DecisionFigures, EVENT_TEXT_BYTES_MAX, Event, EventType, EventsQuery, JobFigures, LostFigures,
    PilotAction, RefusalFigures, StageFigures, StateFigures, VmChange, WarningFigures,
};
pub use heat::{DegreeBytes, HeatBlock, HeatFigures, HeatRegion, HeatReport, HeatRequest};
pub use history::{
    HISTORY_LONG_S, HISTORY_LONG_STEP_S, HISTORY_POINTS_MAX, HISTORY_S, HISTORY_STEP_S, History,
    HistoryQuery,
};
pub use host_vms::{HOST_VMS_MAX, HostVm, HostVms};
pub use job::{JOBS_MAX, Job, JobKind, JobProgress, JobQuery, JobState, JobUnit};
pub use name::{NAME_LEN_MAX, NameError, VmName};
pub use observed::{DiscoveredVm, GuestUsage, ObservedVm};
pub use openapi::{document, document_text};
pub use pilot::{
    PilotDecision, PilotRequest, PilotSight, PilotStatus, PilotVm, RESERVE_PERCENT_DEFAULT,
    RESERVE_PERCENT_MAX, RuleRequest, SeenBound, SeenPlugged, SeenVm, WEIGHT_MAX,
};
pub use pool::{
    LOWER_PERCENT_DEFAULT, PoolMember, PoolRequest, PoolStatus, ShareRequest,
    UPPER_PERCENT_DEFAULT, UPPER_PERCENT_MAX,
};
pub use report::{DetachReport, EvictReport, ReclaimReport, ResizeReport, Skipped, Version};
pub use request::{
    AttachRequest, AutoRequest, BELOW_PERCENT_DEFAULT, BadRequest, CPUS_MAX, DiskRequest,
    EvictRequest, INTERVAL_MS_MAX, INTERVAL_MS_MIN, LimitRequest, MEMORY_BYTES_MAX,
    MEMORY_BYTES_MIN, MIN_ORDER_DEFAULT, MIN_ORDER_LEAST, NODES_MAX, ReclaimRequest, ResizeRequest,
    RunRequest, StatusQuery,
};
pub use role::{Role, WhoAmI};
pub use status::{
    AutoStatus, BalloonStatus, DiskCounts, FaultCounts, FaultSpread, FaultTimes, Fragmentation,
    GuestFigures, GuestStatus, KindBytes, LimitStatus, MemoryDeviceStatus, MemoryParts, ORDER_MAX,
    PressureStatus, ReachStatus, ReachingDevice, SharingStatus, SizeStatus, TierStatus, TierUse,
    VmStatus, VmSummary,
};
pub use top::{Top, TopHost, TopVm};
