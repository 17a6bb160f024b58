//! What this host offers, and what Ebb chooses of it. It is probed, never guessed from versions.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use ebb_api::{Backing, Mode};
use ebb_sys::kvm::{self, Verdict};
use ebb_units::HUGE_BYTES;
use ebb_vm::Ram;
use ebb_vm::launch::Accelerator;

use crate::model::api_error::{Answer, not_allowed};
use crate::system::small_pages::keeps_holes;

const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
/// Reason for small pages in a VM for which no backing was requested.
const OLD_KERNEL: &str = "before Linux 6.4, memory in use is not evicted from huge pages";
const FREE_HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

/// Reason for release mode, unless something against it is found later.
pub const NO_DEVICE: &str = "no device reaches its memory by itself";

/// A choice and the reason for it, in words.
#[derive(Clone, Debug)]
pub struct Chosen<T> {
    /// The choice.
    pub value: T,
    /// The reason.
    pub reason: String,
}

impl<T> Chosen<T> {
    /// A choice with its reason.
    pub fn new(value: T, reason: impl Into<String>) -> Chosen<T> {
        Chosen { value, reason: reason.into() }
    }
}

/// KVM if a stock kernel boots on it, else TCG. Tried once in a daemon's life.
pub fn accelerator() -> Chosen<Accelerator> {
    static VERDICT: OnceLock<Verdict> = OnceLock::new();
    match VERDICT.get_or_init(kvm::probe) {
        Verdict::Hardware => Chosen::new(Accelerator::Kvm, "/dev/kvm runs guests on the processor"),
        Verdict::Software => Chosen::new(
            Accelerator::Tcg,
            "/dev/kvm emulates kernel mode in software: no stock kernel gets through its boot on it",
        ),
        Verdict::Unusable(why) => {
            Chosen::new(Accelerator::Tcg, format!("/dev/kvm cannot be used: {why}"))
        }
    }
}

/// The backing for a new VM's RAM.
///
/// # Errors
/// The host does not have what was requested.
pub fn backing(asked: Backing, memory_bytes: u64) -> Answer<Chosen<Backing>> {
    let thp = shmem_huge_pages();
    match asked {
        Backing::Auto if thp && keeps_holes() => {
            Ok(Chosen::new(Backing::Thp, "the host allows it"))
        }
        Backing::Auto if thp => Ok(Chosen::new(Backing::Small, OLD_KERNEL)),
        Backing::Auto => Ok(Chosen::new(Backing::Small, no_huge_pages())),
        Backing::Thp if thp => Ok(Chosen::new(Backing::Thp, "asked for")),
        Backing::Thp => Err(not_allowed(no_huge_pages())),
        Backing::Small => Ok(Chosen::new(Backing::Small, "asked for")),
        Backing::Hugetlb => {
            let free = fs::read_to_string(FREE_HUGE_PAGES).ok();
            let free: u64 = free.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
            match memory_bytes / HUGE_BYTES {
                need if free < need => Err(not_allowed(format!(
                    "hugetlb needs {need} free huge pages and the host has {free}: raise \
                     vm.nr_hugepages, or choose --backing thp"
                ))),
                _ => Ok(Chosen::new(Backing::Hugetlb, "asked for")),
            }
        }
    }
}

/// The backing of a VM that somebody else started.
pub fn backing_of(ram: &Ram, hugetlb: bool) -> Chosen<Backing> {
    let aligned = huge_pages_fit(ram)
        && ram
            .regions()
            .all(|region| (region.hva.0.wrapping_sub(region.offset)).is_multiple_of(HUGE_BYTES));
    match (hugetlb, aligned, shmem_huge_pages()) {
        (true, ..) => Chosen::new(Backing::Hugetlb, "its RAM is in hugetlb pages"),
        (_, true, true) if !keeps_holes() => Chosen::new(Backing::Small, OLD_KERNEL),
        (_, true, true) => Chosen::new(Backing::Thp, "the host allows it"),
        (_, false, _) => Chosen::new(
            Backing::Small,
            "QEMU has mapped its RAM at an address that no huge page fits; ebb run does not",
        ),
        (_, _, false) => Chosen::new(Backing::Small, no_huge_pages()),
    }
}

/// Whether each huge frame of the guest is one huge page of its file. QEMU's `max-ram-below-4g`, and
/// NUMA nodes of an odd number of MiB, can place a region otherwise.
pub fn huge_pages_fit(ram: &Ram) -> bool {
    ram.regions().all(|region| region.gpa.0.wrapping_sub(region.offset).is_multiple_of(HUGE_BYTES))
}

/// Whether shared memory can get huge pages on this host.
pub fn shmem_huge_pages() -> bool {
    let text = fs::read_to_string(SHMEM_ENABLED).unwrap_or_default();
    ["[always]", "[within_size]", "[advise]", "[force]"].iter().any(|set| text.contains(set))
}

/// This host's memory in bytes, read once in a daemon's life; none: the kernel does not tell.
pub fn memory_bytes() -> Option<u64> {
    static BYTES: OnceLock<Option<u64>> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let nodes = ebb_tier::host::nodes().ok()?;
        let bytes: u64 = nodes.iter().map(|node| node.total_bytes).sum();
        (bytes > 0).then_some(bytes)
    })
}

fn no_huge_pages() -> String {
    format!(
        "the host gives shared memory no huge pages ({SHMEM_ENABLED}): ebb doctor --fix allows them \
         for VMs that start later"
    )
}

/// The mode for a VM. All devices of a VM that can be managed reach its memory through a mapping
/// that faults, except for a disk of Ebb's that is to behave like a passed-through one.
pub fn mode(asked: Option<Mode>, strict_disk: Option<&Path>) -> Chosen<Mode> {
    match (asked, strict_disk) {
        (Some(mode), _) => Chosen::new(mode, "asked for"),
        (None, Some(disk)) => Chosen::new(
            Mode::Strict,
            format!("{} reaches its memory as a device passed through", disk.display()),
        ),
        (None, None) => Chosen::new(Mode::Release, NO_DEVICE),
    }
}
