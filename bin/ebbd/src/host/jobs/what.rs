//! What a job is to do.

use ebb_api::{EvictRequest, HeatRequest, JobKind, ReclaimRequest, ResizeRequest};

/// What a job is to do.
pub enum What {
    /// Reclaim free memory.
    Reclaim(ReclaimRequest),
    /// Evict memory.
    Evict(EvictRequest),
    /// Bring a VM to its target.
    Resize(ResizeRequest),
    /// Monitor which memory is hot.
    Heat(HeatRequest),
    /// Stop managing a VM.
    Detach,
    /// Measure the host's tiers.
    Calibrate,
}

impl What {
    /// Its kind.
    pub fn kind(&self) -> JobKind {
        match self {
            What::Reclaim(_) => JobKind::Reclaim,
            What::Evict(_) => JobKind::Evict,
            What::Resize(_) => JobKind::Resize,
            What::Heat(_) => JobKind::Heat,
            What::Detach => JobKind::Detach,
            What::Calibrate => JobKind::Calibrate,
        }
    }
}

/// Why a job of this kind cannot be cancelled once it is being done; none: it can.
pub fn why_it_goes_on(kind: JobKind) -> Option<&'static str> {
    match kind {
        JobKind::Reclaim | JobKind::Evict | JobKind::Resize | JobKind::Heat => None,
        JobKind::Detach => Some("a detach that has begun goes on to its end"),
        JobKind::Calibrate => Some("a measurement ends by itself within seconds"),
    }
}
