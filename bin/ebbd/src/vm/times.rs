//! How long took what Ebb did for a VM, put together from all that measure it.

use super::context::VmContext;
use super::hyperalloc::SharedAllocator;
use super::reclaim::Reclaim;
use crate::model::times::{Durations, Times};

/// Returns all times of a VM.
pub fn of(cx: &VmContext, reclaim: &Reclaim, hyperalloc: &SharedAllocator) -> Times {
    let counters = cx.pager.counters();
    Times {
        missing: Durations::from(&counters.missing_times),
        metadata: Durations::from(&counters.metadata_times),
        refill: Durations::from(&counters.refill_times),
        reclaim: Durations::from(reclaim.times()),
        install: hyperalloc.install_times().map(Durations::from),
    }
}
