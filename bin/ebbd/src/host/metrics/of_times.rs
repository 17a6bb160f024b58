//! Figures of how long took what Ebb does for VMs, as histograms.

use std::fmt;

use super::of_vms::Vm;
use super::{Meaning, Sheet, seconds};

static FAULTS: Meaning =
    seconds("vm_fault_duration", "Time from a fault to its answer, of all faults.");
static REFILLS: Meaning = seconds(
    "vm_refill_duration",
    "The part of the missing faults that is of evicted memory: time until its content is back.",
);
static RECLAIMS: Meaning =
    seconds("vm_reclaim_duration", "Time of a request to reclaim, or of a round by itself.");
static INSTALLS: Meaning = seconds(
    "vm_install_duration",
    "Time of an install by HyperAlloc, for guests that share their allocator.",
);

/// Writes the times of these VMs. What is not known is left out.
pub(super) fn tell(vms: &[Vm], sheet: &mut Sheet<'_>) -> fmt::Result {
    let known = || vms.iter().filter_map(|vm| Some((vm, vm.times()?)));
    let faults = known().flat_map(|(vm, times)| {
        let labels = |kind: &str| [vm.label(), ("kind", kind.to_owned())];
        [(labels("missing"), &times.missing), (labels("metadata"), &times.metadata)]
    });
    sheet.histograms(&FAULTS, faults)?;
    sheet.histograms(&REFILLS, known().map(|(vm, times)| ([vm.label()], &times.refill)))?;
    sheet.histograms(&RECLAIMS, known().map(|(vm, times)| ([vm.label()], &times.reclaim)))?;
    let installs = known().filter_map(|(vm, times)| Some(([vm.label()], times.install.as_ref()?)));
    sheet.histograms(&INSTALLS, installs)
}
