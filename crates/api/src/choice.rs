//! The choices under which a VM is managed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The text names none of the choices.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{given:?} is not one of {allowed}")]
pub struct ChoiceError {
    given: String,
    allowed: String,
}

impl ChoiceError {
    /// The text is none of these.
    pub(crate) fn new(given: &str, allowed: &[&str]) -> ChoiceError {
        ChoiceError { given: given.into(), allowed: allowed.join(", ") }
    }
}

/// One table per choice gives its JSON form, its text form and its parser.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$variant_doc])* $variant,)+ }

        impl $name {
            /// Every choice, in the order of the documentation.
            pub const ALL: &[$name] = &[$($name::$variant,)+];

            /// The choice as it stands in JSON and on the command line.
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::choice::ChoiceError;

            fn from_str(text: &str) -> Result<$name, Self::Err> {
                let choice = $name::ALL.iter().copied().find(|choice| choice.as_str() == text);
                choice.ok_or_else(|| $crate::choice::ChoiceError::new(text, &[$($text),+]))
            }
        }
    };
}

pub(crate) use choice;

choice! {
    /// What the guest's RAM is made of on the host.
    #[derive(Default)]
    Backing {
        /// THP where the host allows it for shared memory, else small pages. Only in requests.
        #[default]
        Auto = "auto",
        /// Reserved 2 MiB pages. Free memory cannot be taken from it by metadata protection.
        Hugetlb = "hugetlb",
        /// Shared memory in transparent huge pages.
        Thp = "thp",
        /// Shared memory in 4 KiB pages.
        Small = "small",
    }
}

choice! {
    /// How a disk that Ebb serves accesses the guest's memory.
    #[derive(Default)]
    DmaMode {
        /// As a part of the host: what a request uses is brought back for it, and stays there
        /// as long.
        #[default]
        Pinned = "pinned",
        /// As a device passed through, behind an IOMMU in software: a request that meets a frame
        /// that is not mapped there fails.
        Strict = "strict",
    }
}

choice! {
    /// The format of a disk's image, as the request states it.
    DiskFormat {
        /// The guest's disk, byte for byte. Its content is not looked at.
        Raw = "raw",
    }
}

choice! {
    /// How reclaimed memory is watched.
    Mode {
        /// A record of every reclaimed block, its metadata write-protected: memory is back before
        /// the guest uses it, devices included.
        Strict = "strict",
        /// Nothing recorded, nothing left protected: the guest's next touch brings fresh memory.
        /// Only for VMs that no device reaches by itself.
        Release = "release",
    }
}

choice! {
    /// Which of a VM's memory Ebb may reclaim or evict.
    #[derive(Default)]
    MayTake {
        /// Free memory, and memory in use.
        #[default]
        Everything = "everything",
        /// Free memory only: nothing in use is evicted.
        FreeOnly = "free_only",
        /// Nothing.
        Nothing = "nothing",
    }
}

choice! {
    /// What runs the guest's instructions.
    Accelerator {
        /// QEMU's own translator.
        Tcg = "tcg",
        /// The host's hardware virtualization.
        Kvm = "kvm",
    }
}

choice! {
    /// What Ebb does with the VM.
    State {
        /// Ebb serves its faults and may take its memory.
        #[serde(rename = "held")]
        Managed = "held",
        /// An earlier process managed it, and the next one is about to.
        #[serde(rename = "taking_up")]
        Recovering = "taking_up",
        /// That failed, or its service did. A guest that needs Ebb waits; it is tried again.
        #[serde(rename = "not_taken_up")]
        NotRecovered = "not_taken_up",
    }
}

choice! {
    /// How a VM's free memory is found and reclaimed.
    Mechanism {
        /// The guest's page-frame allocator, shared by the host.
        HyperAlloc = "hyper_alloc",
        /// The guest's page metadata.
        VProbe = "v_probe",
        /// It is not taken.
        None = "none",
    }
}

choice! {
    /// What begins a round of automatic reclaim.
    #[derive(Default)]
    ReclaimWhen {
        /// The end of an interval.
        #[default]
        Interval = "interval",
        /// The host is short of memory.
        Pressure = "pressure",
    }
}

choice! {
    /// What the pilot does.
    #[derive(Default)]
    PilotMode {
        /// Nothing.
        #[default]
        Off = "off",
        /// It decides, and only tells what it would do.
        DryRun = "dry_run",
        /// It decides and acts.
        On = "on",
    }
}

choice! {
    /// How much a VM's speed matters to the pilot.
    #[derive(Default)]
    VmClass {
        /// Nobody waits for it: its memory goes first.
        Batch = "batch",
        /// Neither of the others.
        #[default]
        Normal = "normal",
        /// Somebody waits for its answers: its memory goes last and comes back first.
        Latency = "latency",
    }
}

choice! {
    /// How short of memory the host is.
    PilotStage {
        /// Memory is given back to VMs.
        Ample = "ample",
        /// Less than twice the reserve is available: what VMs do not use is taken.
        Tight = "tight",
        /// Less than the reserve is available, or tasks wait for memory.
        Short = "short",
        /// Less than half of the reserve is available: batch VMs lose memory that they work with.
        Critical = "critical",
    }
}

choice! {
    /// What changes a VM's size.
    SizeMechanism {
        /// The guest's page-frame allocator, shared by the host.
        HyperAlloc = "hyper_alloc",
        /// A balloon in the guest.
        Balloon = "balloon",
        /// Blocks plugged and unplugged beyond what the VM began with.
        VirtioMem = "virtio_mem",
    }
}

choice! {
    /// Progress of a VM to its target.
    SizeState {
        /// It has it.
        Reached = "reached",
        /// It gets closer.
        Moving = "moving",
        /// Something is in the way; it is tried again and again.
        Waiting = "waiting",
        /// Nobody wants another size than it has.
        Off = "off",
    }
}

choice! {
    /// Whether the guest drives a device.
    DriverState {
        /// It does.
        Ready = "ready",
        /// It does not, or not yet.
        Absent = "absent",
        /// QEMU does not tell.
        Unknown = "unknown",
    }
}

choice! {
    /// Who serves a device.
    DeviceServer {
        /// QEMU itself.
        Qemu = "qemu",
        /// Ebb.
        Ebb = "ebb",
    }
}

choice! {
    /// What happens if a guest touches hard-reclaimed memory.
    #[derive(Default)]
    OnViolation {
        /// It has the memory, and that is counted.
        #[default]
        Allow = "allow",
        /// The VM is stopped as well.
        Stop = "stop",
    }
}

choice! {
    /// How Ebb sees which memory a VM uses.
    HeatTracker {
        /// The accessed bits of the guest's own page tables.
        GuestTables = "guest_tables",
        /// What the VMM has mapped.
        VmmTable = "vmm_table",
        /// The host kernel's idle page tracking.
        IdlePages = "idle_pages",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_json_agree() {
        for &backing in Backing::ALL {
            assert_eq!(serde_json::to_value(backing).ok(), Some(backing.as_str().into()));
            assert_eq!(backing.as_str().parse::<Backing>().ok(), Some(backing));
        }
        for &mode in Mode::ALL {
            assert_eq!(serde_json::to_value(mode).ok(), Some(mode.as_str().into()));
        }
        for &mechanism in Mechanism::ALL {
            assert_eq!(serde_json::to_value(mechanism).ok(), Some(mechanism.as_str().into()));
        }
        for &mechanism in SizeMechanism::ALL {
            assert_eq!(serde_json::to_value(mechanism).ok(), Some(mechanism.as_str().into()));
        }
        for &when in ReclaimWhen::ALL {
            assert_eq!(serde_json::to_value(when).ok(), Some(when.as_str().into()));
        }
        for &mode in PilotMode::ALL {
            assert_eq!(serde_json::to_value(mode).ok(), Some(mode.as_str().into()));
        }
        for &class in VmClass::ALL {
            assert_eq!(serde_json::to_value(class).ok(), Some(class.as_str().into()));
        }
        for &stage in PilotStage::ALL {
            assert_eq!(serde_json::to_value(stage).ok(), Some(stage.as_str().into()));
        }
        for &tracker in HeatTracker::ALL {
            assert_eq!(serde_json::to_value(tracker).ok(), Some(tracker.as_str().into()));
        }
        for &accelerator in Accelerator::ALL {
            assert_eq!(serde_json::to_value(accelerator).ok(), Some(accelerator.as_str().into()));
        }
        for &state in State::ALL {
            assert_eq!(serde_json::to_value(state).ok(), Some(state.as_str().into()));
        }
    }

    #[test]
    fn a_wrong_choice_lists_the_right_ones() {
        let error = "loose".parse::<Mode>().map_err(|e| e.to_string());
        assert_eq!(error, Err(r#""loose" is not one of strict, release"#.into()));
    }
}
