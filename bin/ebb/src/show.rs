//! Answers as people read them: aligned, sizes with units, one screen.

use std::fmt::Display;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use ebb_api::{
    AutoStatus, BalloonStatus, Calibration, Confinement, DetachReport, DiskCounts, EvictReport,
    FaultTimes, GuestStatus, HeatReport, LimitStatus, MayTake, Mechanism, MemoryDeviceStatus,
    PoolMember, PoolStatus, ReachStatus, ReclaimReport, ResizeReport, SizeState, SizeStatus,
    TierStatus, VmName, VmStatus, VmSummary,
};
use ebb_units::Bytes;

use crate::interval::readable;

/// One labelled line. Control characters go: some of the text is the guest's own.
pub fn row(label: &str, value: impl Display) -> String {
    let value = value.to_string().replace(char::is_control, "?");
    format!("  {label:<14}{value}\n")
}

fn size(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".into(), |bytes| Bytes(bytes).to_string())
}

pub fn share(bytes: u64, of_bytes: u64) -> String {
    let percent = u128::from(bytes) * 100 / u128::from(of_bytes.max(1));
    format!("{:<12}{percent} %", Bytes(bytes).to_string())
}

/// What `run` and `attach` decided, and how to see the guest.
pub fn started(vm: &VmStatus) -> String {
    let memory = Bytes(vm.memory_bytes);
    let head = format!("{} is held: QEMU's pid is {}, memory {memory}\n", vm.name, vm.pid);
    head + &decisions(vm) + &console(vm) + &warnings(vm)
}

/// How to see the console of a VM that Ebb started.
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
        + &row("backing", because(vm.backing.as_str(), &vm.backing_reason))
        + &row("mode", because(vm.mode.as_str(), &vm.mode_reason))
        + &reach(&vm.reach)
        + &row("mechanism", format!("{}: {}", vm.mechanism, vm.mechanism_reason))
        + &vm.confinement.as_ref().map(confinement).unwrap_or_default()
}

/// What QEMU is, and what keeps it to itself.
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

/// Commands that show the console: its log, and its socket to type into.
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

/// Of one that is held and answers there is nothing more to say.
fn state(vm: &VmStatus) -> String {
    let Some(reason) = &vm.state_reason else { return String::new() };
    let age = format!("{} s old", vm.age_ms / 1000);
    row("why", reason) + &row("figures", age)
}

fn warnings(vm: &VmStatus) -> String {
    vm.warnings.iter().map(|warning| row("warning", warning)).collect()
}

/// Memory devices that left the VM for good.
fn unplugged(vm: &VmStatus) -> String {
    let bytes = Some(vm.unplugged_bytes).filter(|&bytes| bytes > 0);
    bytes.map(|bytes| row("unplugged", format!("{}, let go of", Bytes(bytes)))).unwrap_or_default()
}

/// All that is known about a VM.
pub fn status(vm: &VmStatus) -> String {
    let order_bytes = Bytes(4096 << vm.min_order.min(ebb_api::ORDER_MAX));
    [
        format!("{}: {}, QEMU's pid is {}\n", vm.name, vm.state, vm.pid),
        state(vm),
        decisions(vm),
        console(vm),
        row("least block", format!("order {} ({order_bytes})", vm.min_order)),
        "\nmemory\n".into(),
        row("total", Bytes(vm.memory_bytes)),
        unplugged(vm),
        row("resident", share(vm.resident_bytes, vm.memory_bytes)),
        row("emptied", share(vm.emptied_bytes, vm.memory_bytes)),
        row("guest free", size(vm.guest_free_bytes)),
        row("reclaimed", format!("{} in all", Bytes(vm.reclaimed_total_bytes))),
        row("returned", format!("{} in all", Bytes(vm.returned_total_bytes))),
        guest(&vm.guest),
        faults(vm),
        "\nautomatic reclaim\n".into(),
        auto_rows(&vm.auto),
        "\nlimit\n".into(),
        limit_rows(&vm.limit),
        sizes(&vm.size, vm.balloon.as_ref()),
        vm.tier.as_ref().map(tiers).unwrap_or_default(),
        sharing(vm),
        disks(vm.disks),
        warnings(vm),
    ]
    .concat()
}

/// The tiers that hold a VM's memory.
pub fn tier(name: &VmName, status: &TierStatus, warnings: &[String]) -> String {
    let warnings: String = warnings.iter().map(|warning| row("warning", warning)).collect();
    format!("{name}: {}\n", status.ladder) + &tier_rows(status) + &warnings
}

fn tiers(tier: &TierStatus) -> String {
    "\ntiers\n".to_owned() + &row("ladder", &tier.ladder) + &tier_rows(tier)
}

/// What is in the way of taking all of its memory, and how far its migration is.
fn reach(reach: &ReachStatus) -> String {
    let in_the_way = reach.devices.iter().map(|device| {
        let left = match device.may_take {
            MayTake::Everything => "everything is taken",
            MayTake::FreeOnly => "free memory only is taken",
            MayTake::Nothing => "nothing is taken",
        };
        row("device", format!("{}: {left}: {}", device.name, device.why))
    });
    let migration = reach.migration.as_ref().map(|status| row("migration", status));
    in_the_way.chain(migration).collect()
}

/// Of its fast memory, what it works with, and what each tier holds.
fn tier_rows(tier: &TierStatus) -> String {
    let part = |bytes: u64| {
        let percent = u128::from(bytes) * 100 / u128::from(tier.fast_bytes.max(1));
        format!("{}, {percent} % of the fast tier", Bytes(bytes))
    };
    let active =
        tier.active_bytes.map_or("unknown, too little had to leave memory yet".into(), part);
    let hot = tier.hot_bytes.map_or("unknown, not monitored lately".into(), part);
    let each = tier
        .tiers
        .iter()
        .map(|tier| format!("{} of {} {}", Bytes(tier.held_bytes), Bytes(tier.bytes), tier.tier));
    let moved =
        tier.moved_bytes.map(|bytes| row("moved", format!("{} between nodes", Bytes(bytes))));
    row("active", format!("{active}; hot set {hot}"))
        + &row("held by", each.collect::<Vec<_>>().join(", "))
        + &moved.unwrap_or_default()
}

fn guest(guest: &GuestStatus) -> String {
    let trust = match (guest.trusted, &guest.why) {
        (true, _) => "yes".to_owned(),
        (false, Some(why)) => format!("no: {why}"),
        (false, None) => "no".to_owned(),
    };
    [
        "\nguest\n".into(),
        row("kernel", guest.kernel.as_deref().unwrap_or("unknown")),
        row("trusted", trust),
        row("anonymous", size(guest.anonymous_bytes)),
        row("file", size(guest.file_bytes)),
        row("slab", size(guest.slab_bytes)),
        row("page tables", size(guest.page_table_bytes)),
        row("offline", size(guest.offline_bytes)),
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

fn auto_rows(auto: &AutoStatus) -> String {
    let every = readable(auto.interval_ms.saturating_mul(1_000_000));
    let state = match auto.on {
        true => {
            format!("on, every {every}, keeps {} free besides the reserve", Bytes(auto.keep_bytes))
        }
        false => "off".into(),
    };
    row("state", state)
        + &auto.last.as_ref().map(|last| row("last", report(last))).unwrap_or_default()
}

fn report(report: &ReclaimReport) -> String {
    format!(
        "took {} in {}; stopped: {}",
        Bytes(report.bytes),
        readable(report.duration_ns),
        report.stopped_by
    )
}

/// What one reclaim did.
pub fn reclaimed(name: &VmName, report: &ReclaimReport) -> String {
    let skipped = report.skipped;
    [
        format!("{name}: took {} in {} blocks\n", Bytes(report.bytes), report.blocks),
        row("time", readable(report.duration_ns)),
        row("of that scan", readable(report.scan_ns)),
        row("stopped by", &report.stopped_by),
        row("in use", format!("{} blocks at the second look", skipped.in_use)),
        row("empty", format!("{} blocks already", skipped.already_empty)),
        row("cancelled", format!("{} blocks by the guest's own writes", skipped.cancelled)),
    ]
    .concat()
}

/// What automatic reclaim is set to.
pub fn auto(name: &VmName, status: &AutoStatus) -> String {
    format!("{name}: automatic reclaim\n") + &auto_rows(status)
}

/// What resident memory is held at.
pub fn limit(name: &VmName, status: &LimitStatus) -> String {
    format!("{name}: limit on resident memory\n") + &limit_rows(status)
}

fn limit_rows(limit: &LimitStatus) -> String {
    let state = match (limit.bytes, limit.high_bytes, limit.low_bytes) {
        (Some(bytes), Some(high), Some(low)) => {
            let [bytes, high, low] = [bytes, high, low].map(Bytes);
            format!("{bytes}: evicted down to {low}, faults wait above {high}")
        }
        _ => "none".into(),
    };
    let pool =
        limit.share_bytes.map(|share| format!("; by the pool, its share is {}", Bytes(share)));
    let rows = [
        row("held at", state + &pool.unwrap_or_default()),
        row(
            "elsewhere",
            format!(
                "{} in the swap store, {} on the guest's disks; {} in memory keeps its place in the store",
                Bytes(limit.saved_bytes),
                Bytes(limit.on_disk_bytes),
                Bytes(limit.clean_bytes)
            ),
        ),
        row(
            "evicted",
            format!(
                "{} saved, {} saved before, {} equal to a disk, {} free or empty, in all",
                Bytes(limit.saved_total_bytes),
                Bytes(limit.clean_total_bytes),
                Bytes(limit.on_disk_total_bytes),
                Bytes(limit.empty_total_bytes)
            ),
        ),
        row(
            "refilled",
            format!(
                "{} on touch, {} ahead of it, of which {} was used, in all",
                Bytes(limit.refilled_total_bytes),
                Bytes(limit.ahead_total_bytes),
                Bytes(limit.ahead_hit_total_bytes)
            ),
        ),
        row(
            "not read",
            format!(
                "{} freed before its touch, {} overwritten, {} dropped; {} read in vain, in all",
                Bytes(limit.false_reads_avoided_total_bytes),
                Bytes(limit.replaced_total_bytes),
                Bytes(limit.dropped_total_bytes),
                Bytes(limit.false_reads_total_bytes)
            ),
        ),
    ];
    rows.concat()
        + &compressed(limit)
        + &limit.stuck.as_ref().map(|why| row("stuck", why)).unwrap_or_default()
}

/// A line where there is compressed memory.
fn compressed(limit: &LimitStatus) -> String {
    if limit.compressed_limit_bytes == 0 && limit.compressed_pages == 0 {
        return String::new();
    }
    let ratio = limit.compressed_ratio.map_or(String::new(), |ratio| format!(" (1:{ratio:.1})"));
    let text = format!(
        "{} pages in {}{ratio} of {} at most, {} written back in all",
        limit.compressed_pages,
        Bytes(limit.compressed_bytes),
        Bytes(limit.compressed_limit_bytes),
        Bytes(limit.written_back_total_bytes)
    );
    row("compressed", text)
}

/// Of a guest that shares nothing there is nothing to say.
fn sharing(vm: &VmStatus) -> String {
    let shared = &vm.sharing;
    if vm.mechanism != Mechanism::HyperAlloc && shared.size_bytes.is_none() {
        return String::new();
    }
    let size = Bytes(shared.size_bytes.unwrap_or(vm.memory_bytes));
    let gone = format!(
        "{} until returned, {} until touched",
        Bytes(shared.hard_bytes),
        Bytes(shared.soft_bytes)
    );
    let installs = format!("{}, {}", shared.installs, times(shared.install_ns));
    let violations = format!("{} ({})", shared.violations, shared.on_violation);
    let kinds = shared.fragmentation.map(|all| {
        [("unmovable", all.unmovable), ("movable", all.movable), ("huge", all.huge)].map(
            |(kind, bytes)| {
                let [used, huge] = [bytes.used_bytes, bytes.huge_bytes].map(Bytes);
                row(kind, format!("{used} in use, in {huge} of huge frames"))
            },
        )
    });
    [
        "\nshared allocator\n".into(),
        row("size", size),
        row("taken", gone),
        row("installs", installs),
        row("violations", violations),
        kinds.map(|rows| rows.concat()).unwrap_or_default(),
        shared.stopped.as_ref().map(|why| row("stopped", why)).unwrap_or_default(),
    ]
    .concat()
}

fn times(times: FaultTimes) -> String {
    match times {
        FaultTimes { p50: Some(p50), p99: Some(p99) } => {
            format!("p50 {}, p99 {}", readable(p50), readable(p99))
        }
        _ => "none yet".into(),
    }
}

/// Of a VM without disks of ours, or with none in use, there is nothing to say.
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

/// What an eviction did.
pub fn evicted(name: &VmName, report: &EvictReport) -> String {
    let saved = Bytes(report.saved_bytes);
    [
        format!("{name}: saved and emptied {saved} in {} frames\n", report.saved_frames),
        row("time", readable(report.duration_ns)),
        row("abandoned", format!("{} frames that the guest wrote to", report.abandoned)),
        row("stopped by", &report.stopped_by),
    ]
    .concat()
}

/// What the guest may have; of a VM that has what it began with there is only its balloon to
/// speak of.
fn sizes(size: &SizeStatus, held: Option<&BalloonStatus>) -> String {
    let differs = size.bytes != size.initial_bytes || size.wanted_bytes.is_some();
    let rows = match differs || !size.devices.is_empty() {
        true => size_rows(size),
        false => String::new(),
    };
    let rows = rows + &held.map(balloon).unwrap_or_default();
    if rows.is_empty() { rows } else { "\nsize\n".to_owned() + &rows }
}

fn size_rows(size: &SizeStatus) -> String {
    let [bytes, max, initial, plugged, ballooned, hard] = [
        size.bytes,
        size.max_bytes,
        size.initial_bytes,
        size.plugged_bytes,
        size.ballooned_bytes,
        size.hard_bytes,
    ]
    .map(Bytes);
    let made_of = format!(
        "{initial} at the beginning, {plugged} plugged; less {ballooned} ballooned, {hard} taken by \
         HyperAlloc"
    );
    let stopped = size.stopped_by.as_ref().map(|why| row("in the way", why));
    let devices: String = size.devices.iter().map(device).collect();
    row("guest has", format!("{bytes}, at most {max}"))
        + &row("made of", made_of)
        + &row("wanted", wanted(size))
        + &stopped.unwrap_or_default()
        + &devices
}

fn wanted(size: &SizeStatus) -> String {
    let Some(bytes) = size.wanted_bytes else { return "as it is".into() };
    let node = size.wanted_node.map(|node| format!(" on node {node}")).unwrap_or_default();
    let by = size.mechanism.map(|by| format!(" by {by}")).unwrap_or_default();
    format!("{}{node}{by}: {}", Bytes(bytes), size.state)
}

fn device(device: &MemoryDeviceStatus) -> String {
    let [plugged, requested, max, block] =
        [device.plugged_bytes, device.requested_bytes, device.max_bytes, device.block_bytes]
            .map(Bytes);
    let touches = match device.violations.unwrap_or(0) {
        0 => String::new(),
        count => format!("; {count} touches of what is not plugged"),
    };
    let text = format!(
        "{plugged} of {max} plugged, {requested} requested, in blocks of {block}; driver {}, served \
         by {}{touches}",
        device.driver, device.served_by
    );
    row(&format!("node {}", device.node), text)
}

fn balloon(balloon: &BalloonStatus) -> String {
    let reporting = match (balloon.reporting_offered, balloon.reporting) {
        (false, _) => "off",
        (true, Some(true)) => "on",
        (true, Some(false)) => "not used by the guest",
        (true, None) => "offered",
    };
    let holds = format!(
        "{}; driver {}; deflates on OOM: {}; emptied under pressure: {} times; free page reporting: \
         {reporting}",
        Bytes(balloon.ballooned_bytes),
        balloon.driver,
        if balloon.deflates_on_oom { "yes" } else { "no" },
        balloon.releases
    );
    let figures = balloon.figures.map(|told| {
        let [total, free, available, cache] =
            [told.total_bytes, told.free_bytes, told.available_bytes, told.cache_bytes].map(size);
        let text = format!(
            "{available} available of {total}: {free} free, {cache} page cache; {} s ago",
            told.age_s
        );
        row("guest says", text)
    });
    row("balloon", holds) + &figures.unwrap_or_default()
}

/// On the way, in one line.
pub fn resizing(name: &VmName, report: &ResizeReport) -> String {
    let (now, wanted) = (Bytes(report.bytes), Bytes(report.wanted_bytes));
    let time = readable(report.duration_ns);
    format!("{name}: {now} on the way to {wanted} by {}, {time}", report.mechanism)
}

/// On the way, in one line.
pub fn monitoring(name: &VmName, report: &HeatReport) -> String {
    format!("{name}: window {} of {}", report.windows_done + 1, report.windows)
}

/// What a change of the size did.
pub fn resized(name: &VmName, report: &ResizeReport) -> String {
    let (now, wanted) = (Bytes(report.bytes), Bytes(report.wanted_bytes));
    if report.state == SizeState::Off {
        return format!("{name} stays at {now}: {}\n", report.stopped_by);
    }
    let node = report.node.map(|node| format!(" on node {node}")).unwrap_or_default();
    [
        format!("{name}: has {now}{node} of the {wanted} it is to have\n"),
        row("by", format!("{}: {}", report.mechanism, report.reason)),
        row("state", report.state),
        report.least_bytes.map(|least| row("needs", Bytes(least))).unwrap_or_default(),
        row(
            "taken",
            format!(
                "{}; {} of the host's came free",
                Bytes(report.taken_bytes),
                Bytes(report.emptied_bytes)
            ),
        ),
        row("given", Bytes(report.returned_bytes)),
        row("purges", report.purges),
        row("time", readable(report.duration_ns)),
        row("stopped by", &report.stopped_by),
    ]
    .concat()
}

/// What a detach brought back.
pub fn detached(name: &VmName, report: &DetachReport) -> String {
    let (restored, time) = (Bytes(report.restored_bytes), readable(report.duration_ns));
    format!("{name} is let go: {restored} brought back in {time}; the guest runs on\n")
}

/// The pool, and a line for each VM in it.
pub fn pool(pool: &PoolStatus) -> String {
    let Some(bytes) = pool.bytes else {
        return "there is no pool: `ebb pool SIZE` makes one\n".into();
    };
    let [all, shares, free] = [bytes, pool.shares_bytes, pool.free_bytes].map(Bytes);
    let head = format!("pool of {all}: {shares} in shares, {free} in nobody's hands now\n");
    if pool.vms.is_empty() {
        return head + "no VM is in it: `ebb share NAME SIZE` puts one in\n";
    }
    let names = ["NAME", "SHARE", "LOWER", "UPPER", "HOT SET", "HELD", "GOAL", "LIMIT"];
    let lines: Vec<[String; 8]> =
        std::iter::once(names.map(String::from)).chain(pool.vms.iter().map(member)).collect();
    head + &table(&lines)
}

fn member(vm: &PoolMember) -> [String; 8] {
    let [share, lower, upper, held, goal] =
        [vm.share_bytes, vm.lower_bytes, vm.upper_bytes, vm.held_bytes, vm.goal_bytes]
            .map(|bytes| Bytes(bytes).to_string());
    let limit = vm.limit_bytes.map_or("none".into(), |bytes| Bytes(bytes).to_string());
    [vm.name.to_string(), share, lower, upper, size(vm.hot_bytes), held, goal, limit]
}

/// How fast tiers are, and what reads and writes count for by that.
pub fn calibration(found: &Calibration) -> String {
    let each = found.tiers.iter().map(|tier| {
        let (read, write) = (readable(tier.read_ns), readable(tier.write_ns));
        row(&tier.tier, format!("{read} to read a page, {write} to write one"))
    });
    let weights = format!("read {}, written {}", found.read_weight, found.write_weight);
    "this host's tiers\n".to_owned() + &each.collect::<String>() + &row("weights", weights)
}

/// One line per VM.
pub fn list(vms: &[VmSummary]) -> String {
    if vms.is_empty() {
        return "no VM is held\n".into();
    }
    let head = [
        "NAME", "PID", "STATE", "ACCEL", "BACKING", "MODE", "TRUSTED", "AUTO", "RESIDENT", "MEMORY",
    ];
    let lines: Vec<[String; 10]> =
        std::iter::once(head.map(String::from)).chain(vms.iter().map(summary)).collect();
    let reason = |vm: &VmSummary| Some(format!("{}: {}\n", vm.name, vm.state_reason.as_ref()?));
    table(&lines) + &vms.iter().filter_map(reason).collect::<String>()
}

fn summary(vm: &VmSummary) -> [String; 10] {
    [
        vm.name.to_string(),
        vm.pid.to_string(),
        vm.state.to_string(),
        vm.accelerator.to_string(),
        vm.backing.to_string(),
        vm.mode.to_string(),
        if vm.trusted { "yes".into() } else { "no".into() },
        if vm.auto { "on".into() } else { "off".into() },
        vm.age_ms.map_or_else(|| "?".into(), |_| Bytes(vm.resident_bytes).to_string()),
        Bytes(vm.memory_bytes).to_string(),
    ]
}

fn table<const COLUMNS: usize>(lines: &[[String; COLUMNS]]) -> String {
    let widths: [usize; COLUMNS] =
        std::array::from_fn(|at| lines.iter().map(|line| line[at].len()).max().unwrap_or(0));
    let text = |line: &[String; COLUMNS]| {
        let cells = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    lines.iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let lines = [["a", "long"], ["wide", "b"]].map(|line| line.map(String::from));
        assert_eq!(table(&lines), "a     long\nwide  b\n");
    }

    #[test]
    fn a_guest_cannot_write_to_the_terminal() {
        assert_eq!(row("kernel", "6.1\x1b[2J\nheld"), "  kernel        6.1?[2J?held\n");
    }

    #[test]
    fn shares_survive_empty_and_huge_totals() {
        assert_eq!(share(0, 0), "0 B         0 %");
        assert_eq!(share(1 << 60, 1 << 60).split_whitespace().last(), Some("%"));
    }
}
