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

impl Told {
    /// A figure of which less is better.
    pub const fn less(what: &'static str, unit: &'static str, figure: &'static str) -> Told {
        Told { what, unit, figure, better: Better::Less }
    }
}

/// What a VM cost, whatever it did.
pub const COUNTED: [Told; 11] = [
    Told::less("CPU of QEMU and the daemon", "s", "cpu"),
    Told::less("CPU of all that the host did, but for this bench", "s", "host-cpu"),
    Told::less("memory of the guest's on average, compressed memory in it", "MiB", "guest-mib"),
    Told::less("the same at most", "MiB", "guest-most-mib"),
    Told::less("memory of the guest's and the daemon's on average", "MiB", "all-mib"),
    Told::less("memory of the daemon's own", "MiB", "daemon-mib"),
    Told::less("most memory of all processes together", "MiB", "peak-mib"),
    Told::less("memory of QEMU's own that is swapped out in the end", "MiB", "own-swapped-mib"),
    Told::less("times that QEMU waited for memory that only this bench gives", "", "waits"),
    Told::less("how long it waited for that", "s", "waited"),
    Told::less("complaints of the guest's kernel", "", "complaints"),
];
