//! The mechanisms by which `ebb resize` changes a VM's size here.

use std::path::Path;

use vmtest::{Guest, Host, Vm, assets};

use crate::bench::report::Report;

/// Kernel option that guests of several processors have under an older QEMU (`vmtest`). Those under
/// QEMU 11 get it here, so that all have the same.
const AS_UNDER_OLDER_QEMUS: &str = "nohz=off";

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
        let qemu = match self {
            Mechanism::Own => Some(assets::qemu11().expect("looked for before")),
            Mechanism::Qemus | Mechanism::Balloon => None,
        };
        let guest = self.guest(guest, [began_mib, most_mib], qemu.as_deref());
        // Each mechanism has a QEMU of its own, and so a daemon.
        Host::new().run(guest)
    }

    /// Makes a mechanism's VM, with two processors, under the system's QEMU or the one in this
    /// directory. This is the only place that does.
    fn guest(self, guest: Guest, [began_mib, most_mib]: [u64; 2], qemu: Option<&Path>) -> Guest {
        let (began, most) = (format!("{began_mib}M"), format!("{most_mib}M"));
        let guest = match self {
            Mechanism::Own | Mechanism::Qemus => guest.memory(&began).grow_to(&most),
            Mechanism::Balloon => guest.memory(&most),
        };
        match qemu {
            None => guest,
            Some(qemu) => guest.append(AS_UNDER_OLDER_QEMUS).qemu_in(qemu),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::vm as vms;

    /// What differs: how much memory a VM begins with. Ebb adds the memory devices.
    const DIFFERENT: [&str; 2] = ["-m ", "-object memory-backend-"];

    fn options(mechanism: Mechanism) -> Vec<String> {
        let qemu = (mechanism == Mechanism::Own).then_some(Path::new("/qemu11"));
        let guest = Guest::of(vms::no_kernel()).append(super::super::MOVABLE);
        let guest = mechanism.guest(guest, [1024, 4096], qemu);
        vms::options(&guest.ebb_line("vm0", Path::new("/host/vm0")))
    }

    #[test]
    fn all_of_a_figures_vms_are_on_equal_terms() {
        let terms = |mechanism| {
            let mut options = options(mechanism);
            options.retain(|option| !DIFFERENT.iter().any(|begin| option.starts_with(begin)));
            options
        };
        let due = terms(Mechanism::Own);
        for option in ["-accel ", "-machine q35,", "-smp 2", "-device virtio-balloon-pci,"] {
            assert!(due.iter().any(|found| found.starts_with(option)), "{option}: {due:?}");
        }
        for mechanism in [Mechanism::Qemus, Mechanism::Balloon] {
            assert_eq!(terms(mechanism), due, "{}", mechanism.name());
        }
    }

    #[test]
    fn a_vm_begins_small_unless_it_can_only_shrink() {
        for (mechanism, size) in
            [(Mechanism::Own, 1024), (Mechanism::Qemus, 1024), (Mechanism::Balloon, 4096)]
        {
            let options = options(mechanism);
            assert!(options.contains(&format!("-m {size}M")), "{options:?}");
        }
    }
}
