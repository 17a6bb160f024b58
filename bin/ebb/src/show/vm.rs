//! A whole VM: what was decided at its start, and every figure of its status.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use ebb_api::{Confinement, DetachReport, DiskCounts, GuestStatus, Mode, VmName, VmStatus};
use ebb_units::Bytes;

use super::{known, limit, reach, reclaim, row, size, state_word, tier, times, with_percent};
use crate::interval::readable;
use crate::progress::bar;

/// Returns what `run` and `attach` decided, and how to see the guest.
pub fn started(vm: &VmStatus) -> String {
    let memory = Bytes(vm.memory_bytes);
    let head = format!("{} is managed: QEMU's pid is {}, memory {memory}\n", vm.name, vm.pid);
    head + &warnings(vm) + &decisions(vm) + &console(vm)
}

/// Returns how to see the console of a VM that Ebb started.
fn console(vm: &VmStatus) -> String {
    let console = vm.console.as_deref().map(|path| {
        let log = vm.console_log.clone().unwrap_or_else(|| path.with_extension("log"));
        row("console", watch_with(path, &log))
    });
    console.unwrap_or_default()
}

fn decisions(vm: &VmStatus) -> String {
    let because = |choice: &str, reason: &str| format!("{choice:<9}{reason}");
    row("accelerator", because(vm.accelerator.as_str(), &vm.accelerator_reason))
        + &row("backing", because(vm.backing.as_str(), backing_reason(vm)))
        + &row("mode", because(vm.mode.as_str(), &vm.mode_reason))
        + &reach::rows(&vm.reach)
        + &row("mechanism", format!("{}: {}", vm.mechanism, vm.mechanism_reason))
        + &vm.confinement.as_ref().map(confinement).unwrap_or_default()
}

/// Returns the reason for the backing, unless a warning above gives it already.
fn backing_reason(vm: &VmStatus) -> &str {
    let reason = vm.backing_reason.as_str();
    let is_told = vm.warnings.iter().any(|warning| warning.ends_with(reason));
    if is_told && !reason.is_empty() { "see the warning" } else { reason }
}

/// Returns as whom QEMU runs, and what confines it.
fn confinement(confinement: &Confinement) -> String {
    if confinement.privileged {
        return row("QEMU", "root, with all that the daemon may do (--privileged)");
    }
    let sandbox = if confinement.sandbox { ", seccomp filter" } else { "" };
    let group = match confinement.cgroups.first() {
        Some(_) => ", control group of its own",
        None => "",
    };
    row("QEMU", format!("user {}, no capabilities{sandbox}{group}", confinement.uid))
}

/// Returns commands that show the console: one for its log, one for its socket to type into.
fn watch_with(console: &Path, log: &Path) -> String {
    let is_socket = fs::metadata(console).is_ok_and(|found| found.file_type().is_socket());
    let watch = format!("tail -f {}", log.display());
    let type_into = format!("socat -,raw,echo=0,escape=0x1d {}", console.display());
    match (is_socket, log.exists()) {
        (true, true) => format!("{watch}   (to type into it: {type_into})"),
        (true, false) => type_into,
        (false, _) => watch,
    }
}

/// Returns why a VM is not simply managed, or nothing for one that is.
pub fn state(vm: &VmStatus) -> String {
    let Some(reason) = &vm.state_reason else { return String::new() };
    let age = format!("{} s old", vm.age_ms / 1000);
    row("why", reason) + &row("figures", age)
}

/// Returns what the operator should know.
pub fn warnings(vm: &VmStatus) -> String {
    vm.warnings.iter().map(|warning| row("warning", warning)).collect()
}

/// Returns the size of memory devices that left the VM for good, if any.
fn unplugged(vm: &VmStatus) -> String {
    let bytes = Some(vm.unplugged_bytes).filter(|&bytes| bytes > 0);
    bytes
        .map(|bytes| row("unplugged", format!("{}, by QEMU, so no longer managed", Bytes(bytes))))
        .unwrap_or_default()
}

/// Returns the label of memory that takes none of the host's. Strict mode knows only what it has
/// reclaimed and what is empty.
fn non_resident(mode: Mode) -> &'static str {
    match mode {
        Mode::Release => "non-resident",
        Mode::Strict => "reclaimed now",
    }
}

/// Returns all that is known of a VM.
pub fn status(vm: &VmStatus) -> String {
    let order_bytes = Bytes(4096 << vm.min_order.min(ebb_api::ORDER_MAX));
    [
        format!("{}: {}, QEMU's pid is {}\n", vm.name, state_word(vm.state), vm.pid),
        state(vm),
        warnings(vm),
        decisions(vm),
        console(vm),
        row("least block", format!("order {} ({order_bytes})", vm.min_order)),
        "\nmemory\n".into(),
        row("total", Bytes(vm.memory_bytes)),
        unplugged(vm),
        row("resident", with_percent(vm.resident_bytes, vm.memory_bytes)),
        row(non_resident(vm.mode), with_percent(vm.emptied_bytes, vm.memory_bytes)),
        row("guest free", known(vm.guest_free_bytes)),
        row("reclaimed", format!("{} in all", Bytes(vm.reclaimed_total_bytes))),
        row("returned", format!("{} in all", Bytes(vm.returned_total_bytes))),
        guest(&vm.guest),
        faults(vm),
        "\nautomatic reclaim\n".into(),
        reclaim::auto_rows(&vm.auto),
        "\nlimit\n".into(),
        limit::rows(&vm.limit),
        size::section(&vm.size, vm.balloon.as_ref()),
        vm.tier.as_ref().map(tier::section).unwrap_or_default(),
        reclaim::allocator_section(vm),
        disks(vm.disks),
    ]
    .concat()
}

fn guest(guest: &GuestStatus) -> String {
    let trust = match (guest.trusted, &guest.why) {
        (true, _) if guest.registered => {
            "yes, by what its kernel has registered of its page metadata".to_owned()
        }
        (true, _) => "yes".to_owned(),
        (false, Some(why)) => format!("no: {why}"),
        (false, None) => "no".to_owned(),
    };
    [
        "\nguest\n".into(),
        row("kernel", guest.kernel.as_deref().unwrap_or("unknown")),
        row("trusted", trust),
        row("anonymous", known(guest.anonymous_bytes)),
        row("file", known(guest.file_bytes)),
        row("slab", known(guest.slab_bytes)),
        row("page tables", known(guest.page_table_bytes)),
        row("offline", known(guest.offline_bytes)),
        row("free blocks", guest.free_blocks.map_or("unknown".into(), free_blocks)),
    ]
    .concat()
}

fn free_blocks(blocks: [u64; ebb_api::ORDER_MAX as usize + 1]) -> String {
    let by_order = blocks.iter().enumerate().map(|(order, count)| format!("{order}:{count}"));
    by_order.collect::<Vec<_>>().join("  ") + "  (order:count)"
}

fn faults(vm: &VmStatus) -> String {
    let counts = vm.faults;
    let served = format!(
        "missing {}, metadata {} ({} spurious), early {}",
        counts.missing, counts.metadata, counts.spurious, counts.early
    );
    "\nfaults\n".to_owned() + &row("served", served) + &row("took", times(vm.fault_ns))
}

/// Returns the requests of the disks that Ebb serves, or nothing if there were none.
fn disks(disks: DiskCounts) -> String {
    if disks == DiskCounts::default() {
        return String::new();
    }
    let requests = format!(
        "{}, of which {} failed; {} accesses to memory refused",
        disks.requests, disks.failed_requests, disks.dma_faults
    );
    let moved = format!("{} read, {} written", Bytes(disks.read_bytes), Bytes(disks.written_bytes));
    "\ndisks\n".to_owned() + &row("requests", requests) + &row("moved", moved)
}

/// Returns how far a detach is, in one line: how much evicted content is back, of how much.
pub fn detaching(name: &VmName, back_bytes: u64, of_bytes: u64, time: Duration) -> String {
    let seconds = time.as_secs();
    match of_bytes {
        0 => format!("{name}: content comes back, {seconds} s"),
        _ => {
            let (bar, back, of) = (bar(back_bytes, of_bytes), Bytes(back_bytes), Bytes(of_bytes));
            format!("{name}: {bar}  {back} of {of} is back, {seconds} s")
        }
    }
}

/// Returns what a detach brought back.
pub fn detached(name: &VmName, report: &DetachReport) -> String {
    let (restored, time) = (Bytes(report.restored_bytes), readable(report.duration_ns));
    format!("{name} is detached: {restored} brought back in {time}; the guest runs on\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_detach_shows_how_much_is_back() {
        let name = "web".parse().expect("a name");
        let told = |back: u64, of: u64| {
            detaching(&name, back << 20, of << 20, Duration::from_millis(3200))
        };
        assert_eq!(
            told(120, 450),
            "web: █████░░░░░░░░░░░░░░░  26 %  120 MiB of 450 MiB is back, 3 s"
        );
        assert_eq!(told(0, 0), "web: content comes back, 3 s");
    }
}
