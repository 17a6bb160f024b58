//! The figures of a VM, as rows show them.

use crate::bench::row::Better;

/// A figure of a VM, as rows show it.
#[derive(Clone, Copy)]
pub struct Metric {
    pub what: &'static str,
    pub unit: &'static str,
    /// The figure's name among a VM's figures.
    pub figure: &'static str,
    pub better: Better,
}

impl Metric {
    /// A figure of which less is better.
    pub const fn less(what: &'static str, unit: &'static str, figure: &'static str) -> Metric {
        Metric { what, unit, figure, better: Better::Less }
    }
}

/// What a VM cost, whatever it did.
pub const COUNTED: [Metric; 11] = [
    Metric::less("CPU of QEMU and the daemon", "s", "cpu"),
    Metric::less("CPU of all that the host did, but for this bench", "s", "host-cpu"),
    Metric::less("memory of the guest's on average, compressed memory in it", "MiB", "guest-mib"),
    Metric::less("the same at most", "MiB", "guest-most-mib"),
    Metric::less("memory of the guest's and the daemon's on average", "MiB", "all-mib"),
    Metric::less("memory of the daemon's own", "MiB", "daemon-mib"),
    Metric::less("most memory of all processes together", "MiB", "peak-mib"),
    Metric::less("memory of QEMU's own that is swapped out in the end", "MiB", "own-swapped-mib"),
    Metric::less("times that QEMU waited for memory that only this bench gives", "", "waits"),
    Metric::less("how long it waited for that", "s", "waited"),
    Metric::less("complaints of the guest's kernel", "", "complaints"),
];
