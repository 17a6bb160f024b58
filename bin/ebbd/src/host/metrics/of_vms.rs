//! Figures of the VMs that Ebb manages, as their processes published them last.

use std::fmt;
use std::sync::Arc;

use ebb_api::{State, VmName, VmStatus};

use super::{Meaning, Sheet, bytes, is, plain};
use crate::host::listing::Listing;
use crate::host::pilot::Glance;
use crate::host::registry::Daemon;
use crate::model::piloted::Piloted;
use crate::model::times::Times;

static INFO: Meaning = plain("vm_info", "What is known of a VM in words. The value is always 1.");
static UP: Meaning = plain("vm_up", "Whether Ebb manages the VM, and has recent figures of it.");
static PARTS: Meaning =
    bytes("vm_memory_part", "Where the VM's memory is. The parts add up to ebb_vm_memory_bytes.");

static SAVED: Meaning = plain(
    "vm_saved_byte_seconds",
    "Memory that the VM has and does not take of the host, summed up over time.",
);

type Gauge = (Meaning, fn(&Known) -> Option<u64>);
type Counter = (Meaning, fn(&VmStatus) -> u64);
/// The label beside `vm`, and for each of its values where the figure is.
type Split = (Meaning, &'static str, &'static [(&'static str, fn(&VmStatus) -> u64)]);

/// The figures of one moment. Those that are not known are left out.
static GAUGES: [Gauge; 12] = [
    (bytes("vm_memory", "The guest's RAM: what the VM began with, and what is plugged."), |vm| {
        Some(vm.status.memory_bytes)
    }),
    (bytes("vm_memory_resident", "The part of it that takes memory of the host."), |vm| {
        Some(vm.status.resident_bytes)
    }),
    (bytes("vm_memory_free", "Free memory by the guest's own count."), |vm| {
        vm.status.guest_free_bytes
    }),
    (
        bytes("vm_memory_available", "Available memory by the guest's own word (its balloon)."),
        |vm| vm.status.balloon.as_ref()?.figures?.available_bytes,
    ),
    (bytes("vm_memory_working", "What the VM works with, as far as Ebb sees it."), |vm| {
        vm.piloted.as_ref()?.working_bytes
    }),
    (bytes("vm_limit", "The limit on what the VM takes of the host's memory."), |vm| {
        vm.status.limit.bytes
    }),
    (bytes("vm_compressed", "Memory that compressed pages take."), |vm| {
        Some(vm.status.limit.compressed_bytes)
    }),
    (bytes("vm_compressed_limit", "The most that compressed pages may take."), |vm| {
        Some(vm.status.limit.compressed_limit_bytes)
    }),
    (bytes("vm_swap_file", "Disk space of the VM's swap file."), |vm| {
        Some(vm.status.limit.swap_file_bytes)
    }),
    (plain("vm_waits", "Whether the guest waits for room in the swap file."), |vm| {
        Some(u64::from(vm.status.limit.waits))
    }),
    (plain("vm_waiting_touches", "Touches that wait for room in the swap file."), |vm| {
        Some(vm.status.limit.waiting_touches)
    }),
    (plain("vm_warnings", "Warnings that ebb status shows."), |vm| {
        Some(vm.status.warnings.len() as u64)
    }),
];

/// Totals. That of reclaimed memory counts since Ebb manages the VM, the others since the VM's
/// process began.
static COUNTERS: [Counter; 9] = [
    (bytes("vm_reclaimed", "Free memory that was reclaimed."), |vm| vm.reclaimed_total_bytes),
    (bytes("vm_returned", "Memory that was given back to the guest."), |vm| {
        vm.returned_total_bytes
    }),
    (bytes("vm_refaulted", "Evicted memory that came back within 30 s."), |vm| {
        vm.limit.refaulted_total_bytes
    }),
    (bytes("vm_written_back", "Moved from compressed memory to the swap file."), |vm| {
        vm.limit.written_back_total_bytes
    }),
    (plain("vm_disk_requests", "Answered requests of disks that Ebb serves."), |vm| {
        vm.disks.requests
    }),
    (plain("vm_disk_failed_requests", "Those of them that were answered with an error."), |vm| {
        vm.disks.failed_requests
    }),
    (plain("vm_disk_dma_faults", "Refused accesses of disks to guest memory."), |vm| {
        vm.disks.dma_faults
    }),
    (bytes("vm_disk_read", "Read from images that Ebb serves."), |vm| vm.disks.read_bytes),
    (bytes("vm_disk_written", "Written to images that Ebb serves."), |vm| vm.disks.written_bytes),
];

static SPLITS: [Split; 3] = [
    (
        plain("vm_faults", "Faults that Ebb has served."),
        "kind",
        &[("missing", |vm| vm.faults.missing), ("metadata", |vm| vm.faults.metadata)],
    ),
    (
        bytes("vm_evicted", "Evicted memory, by where its content went."),
        "to",
        &[
            ("store", |vm| vm.limit.saved_total_bytes),
            ("store-unchanged", |vm| vm.limit.clean_total_bytes),
            ("guest-disk", |vm| vm.limit.on_disk_total_bytes),
            ("nowhere", |vm| vm.limit.empty_total_bytes),
        ],
    ),
    (
        bytes("vm_refilled", "Evicted memory that was read back."),
        "by",
        &[
            ("touch", |vm| vm.limit.refilled_total_bytes),
            ("read-ahead", |vm| vm.limit.ahead_total_bytes),
        ],
    ),
];

/// A VM at one moment.
#[derive(Debug)]
pub struct Vm {
    name: VmName,
    class: String,
    state: State,
    is_up: bool,
    /// None: its process has published nothing yet.
    known: Option<Known>,
}

/// What its process published.
#[derive(Debug)]
struct Known {
    status: Box<VmStatus>,
    piloted: Option<Piloted>,
    times: Option<Times>,
    saved_byte_seconds: f64,
}

impl Vm {
    /// All VMs of the daemon.
    pub fn all(daemon: &Daemon) -> Vec<Vm> {
        let pilot = Glance::of(daemon);
        let vm = |(name, listing): (VmName, Arc<Listing>)| {
            let seen = listing.seen();
            let state = seen.summary.state;
            Vm {
                class: pilot.rule(&name).class.to_string(),
                state,
                is_up: state == State::Managed && !seen.is_slow,
                known: seen.status.map(|status| Known {
                    status,
                    piloted: seen.piloted,
                    times: seen.times,
                    saved_byte_seconds: seen.saved_byte_seconds,
                }),
                name,
            }
        };
        daemon.listings().into_iter().map(vm).collect()
    }

    /// Its process.
    pub fn pid(&self) -> Option<i32> {
        self.known.as_ref().map(|known| known.status.pid)
    }

    /// Disk space of the swap files of all VMs, as this one saw it last.
    pub fn all_swap_files_bytes(&self) -> Option<u64> {
        self.known.as_ref().map(|known| known.status.limit.all_swap_files_bytes)
    }

    /// How long took what Ebb does for it.
    pub(super) fn times(&self) -> Option<&Times> {
        self.known.as_ref()?.times.as_ref()
    }

    /// Its name, as all figures have it.
    pub(super) fn label(&self) -> (&'static str, String) {
        ("vm", self.name.to_string())
    }
}

/// Writes the figures of these VMs.
pub(super) fn tell(vms: &[Vm], sheet: &mut Sheet<'_>) -> fmt::Result {
    let known = || vms.iter().filter_map(|vm| Some((vm, vm.known.as_ref()?)));
    sheet.gauges(&UP, vms.iter().map(|vm| ([vm.label()], is(vm.is_up))))?;
    let info = |(vm, known): (&Vm, &Known)| {
        let words = [
            ("state", vm.state.to_string()),
            ("class", vm.class.clone()),
            ("mode", known.status.mode.to_string()),
            ("mechanism", known.status.mechanism.to_string()),
            ("pid", known.status.pid.to_string()),
        ];
        ([vec![vm.label()], words.to_vec()].concat(), 1.0)
    };
    sheet.gauges(&INFO, known().map(info))?;
    let parts = |(vm, known): (&Vm, &Known)| {
        let parts = known.status.parts.iter().flat_map(|parts| {
            [
                ("in-use", parts.in_use_bytes),
                ("free", parts.free_bytes.unwrap_or(0)),
                ("empty", parts.empty_bytes),
                ("compressed", parts.compressed_bytes),
                ("swapped", parts.swapped_bytes),
                ("disk-backed", parts.disk_backed_bytes),
            ]
        });
        let label = vm.label();
        let of =
            |(name, bytes): (&str, u64)| ([label.clone(), ("part", name.into())], bytes as f64);
        parts.map(of).collect::<Vec<_>>()
    };
    sheet.gauges(&PARTS, known().flat_map(parts))?;
    for (meaning, of) in &GAUGES {
        let values = known().filter_map(|(vm, known)| Some(([vm.label()], of(known)? as f64)));
        sheet.gauges(meaning, values)?;
    }
    let saved = known().map(|(vm, known)| ([vm.label()], known.saved_byte_seconds));
    sheet.counters(&SAVED, saved)?;
    for (meaning, of) in &COUNTERS {
        sheet.counters(meaning, known().map(|(vm, known)| ([vm.label()], of(&known.status))))?;
    }
    for (meaning, label, values) in &SPLITS {
        let each = known().flat_map(|(vm, known)| values.iter().map(move |it| (vm, known, it)));
        let labelled = each.map(|(vm, known, (value, of))| {
            ([vm.label(), (*label, (*value).to_owned())], of(&known.status))
        });
        sheet.counters(meaning, labelled)?;
    }
    Ok(())
}
