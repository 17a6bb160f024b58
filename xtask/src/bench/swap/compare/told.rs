//! The figures of a VM, as rows show them.

use crate::bench::row::Better;

/// A figure of a VM, as rows show it.
#[derive(Clone, Copy)]
pub struct Told {
    pub what: &'static str,
    pub unit: &'static str,
    /// The figure's name among a VM's figures.
    pub figure: &'static str,
    pub better: Better,
}

/// What a VM cost, whatever it did.
pub const COUNTED: [Told; 11] = [
    counted("CPU of QEMU and the daemon", "s", "cpu"),
    counted("CPU of all that the host did, but for this bench", "s", "host-cpu"),
    counted("memory of the guest's on average, compressed memory in it", "MiB", "guest-mib"),
    counted("the same at most", "MiB", "guest-most-mib"),
    counted("memory of the guest's and the daemon's on average", "MiB", "all-mib"),
    counted("memory of the daemon's own", "MiB", "daemon-mib"),
    counted("most memory of all processes together", "MiB", "peak-mib"),
    counted("memory of QEMU's own that is swapped out in the end", "MiB", "own-swapped-mib"),
    counted("times that QEMU waited for memory that only this bench gives", "", "waits"),
    counted("how long it waited for that", "s", "waited"),
    counted("complaints of the guest's kernel", "", "complaints"),
];

const fn counted(what: &'static str, unit: &'static str, figure: &'static str) -> Told {
    Told { what, unit, figure, better: Better::Less }
}
