//! The mechanisms by which `ebb resize` changes a VM's size here.

use vmtest::{Guest, Host, Vm, assets};

use crate::bench::report::Report;

/// What changes a VM's size.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mechanism {
    /// A virtio-mem device that Ebb serves, under QEMU 11.
    Own,
    /// QEMU's virtio-mem.
    Qemus,
    /// QEMU's balloon, in a VM that begins with all its memory.
    Balloon,
}

impl Mechanism {
    /// Returns the mechanisms that this machine has.
    pub fn here(report: &mut Report) -> Vec<Mechanism> {
        if let Err(why) = assets::qemu11() {
            report.note(format!("No device of Ebb's own: {why}"));
            return vec![Mechanism::Qemus, Mechanism::Balloon];
        }
        report.note("Ebb's own device under QEMU 11, the others under this system's QEMU.");
        vec![Mechanism::Own, Mechanism::Qemus, Mechanism::Balloon]
    }

    /// Returns the mechanism's name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Mechanism::Own => "own device",
            Mechanism::Qemus => "QEMU's device",
            Mechanism::Balloon => "balloon",
        }
    }

    /// Starts a VM that can have any size from `began_mib` to `most_mib`.
    ///
    /// # Panics
    /// The test bench panics.
    pub fn start(self, guest: Guest, began_mib: u64, most_mib: u64) -> Vm {
        let (began, most) = (format!("{began_mib}M"), format!("{most_mib}M"));
        let guest = match self {
            Mechanism::Own => {
                let qemu = assets::qemu11().expect("looked for before");
                guest.memory(&began).grow_to(&most).qemu_in(&qemu)
            }
            Mechanism::Qemus => guest.memory(&began).grow_to(&most),
            Mechanism::Balloon => guest.memory(&most),
        };
        // Each mechanism has a QEMU of its own, and so a daemon.
        Host::new().run(guest)
    }
}
