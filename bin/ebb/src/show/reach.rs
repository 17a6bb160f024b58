//! Devices that restrict what Ebb may take from a VM, and the VM's migration.

use ebb_api::{MayTake, ReachStatus};

use super::row;

/// Returns a line for each device that restricts what Ebb may take, and one for the last migration.
pub fn rows(reach: &ReachStatus) -> String {
    let devices = reach.devices.iter().map(|device| {
        let left = match device.may_take {
            MayTake::Everything => "everything is reclaimed or evicted",
            MayTake::FreeOnly => "only free memory is reclaimed",
            MayTake::Nothing => "nothing is reclaimed or evicted",
        };
        row("device", format!("{}: {left}: {}", device.name, device.why))
    });
    let last = reach.migration.as_deref().map(|status| row("migration", migration(status)));
    devices.chain(last).collect()
}

/// Returns what the status of a migration means for the VM, and what to do. QEMU has the same
/// status on both sides of a migration (`MigrationStatus` in its QMP reference).
fn migration(status: &str) -> String {
    let meaning = match status {
        "setup" | "wait-unplug" => "about to begin",
        "active" | "pre-switchover" | "device" => {
            "in progress: evicted content comes back where it is sent, and is evicted again"
        }
        "completed" => {
            "done: if the guest runs elsewhere now, end this QEMU, which Ebb manages until then; \
             if it came from elsewhere, there is nothing to do"
        }
        "cancelling" | "cancelled" => "cancelled: the guest stays where it was",
        "failed" => "failed: the guest stays where it was",
        _ if status.starts_with("postcopy-") => {
            "in progress: the guest has moved, and needs the rest of its memory: end neither QEMU"
        }
        unknown => return unknown.to_owned(),
    };
    format!("{meaning} (QEMU: {status})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_says_what_to_do() {
        let told = |status: &str| {
            let migration = Some(status.to_owned());
            rows(&ReachStatus { migration, ..ReachStatus::default() })
        };
        let done = told("completed");
        assert!(done.starts_with("  migration     done: if the guest runs elsewhere"), "{done}");
        assert!(done.contains("end this QEMU") && done.ends_with(" (QEMU: completed)\n"), "{done}");
        assert!(told("postcopy-paused").contains("end neither QEMU"));
        assert_eq!(told("a-later-state"), "  migration     a-later-state\n");
        assert_eq!(rows(&ReachStatus::default()), "");
    }
}
