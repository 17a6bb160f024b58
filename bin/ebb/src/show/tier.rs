//! What is in the tiers of memory, how hot it is, and how VMs share a pool.

use ebb_api::{Calibration, HeatReport, PoolMember, PoolStatus, TierStatus, VmName};
use ebb_units::Bytes;

use super::{known, limit_or_none, row, table};
use crate::interval::readable;
use crate::progress::bar;

/// Returns the tiers that have a VM's memory.
pub fn tier(name: &VmName, status: &TierStatus) -> String {
    let warnings: String = status.warnings.iter().map(|warning| row("warning", warning)).collect();
    format!("{name}: {}\n", status.ladder) + &tier_rows(status) + &warnings
}

/// Returns the section of a VM's status about its tiers.
pub fn section(tier: &TierStatus) -> String {
    "\ntiers\n".to_owned() + &row("ladder", &tier.ladder) + &tier_rows(tier)
}

/// Returns the active and the hot part of the fast memory, and what each tier has.
fn tier_rows(tier: &TierStatus) -> String {
    let part = |bytes: u64| {
        let percent = u128::from(bytes) * 100 / u128::from(tier.fast_bytes.max(1));
        format!("{}, {percent} % of the fast tier", Bytes(bytes))
    };
    let active = tier.active_bytes.map_or("unknown, too little was evicted yet".into(), part);
    let hot = tier.hot_bytes.map_or("unknown, not monitored lately".into(), part);
    let each = tier
        .tiers
        .iter()
        .map(|tier| format!("{} of {} {}", Bytes(tier.held_bytes), Bytes(tier.bytes), tier.tier));
    let moved =
        tier.moved_bytes.map(|bytes| row("moved", format!("{} between nodes", Bytes(bytes))));
    row("active", format!("{active}; hot set {hot}"))
        + &row("tiers hold", each.collect::<Vec<_>>().join(", "))
        + &moved.unwrap_or_default()
}

/// Returns the progress of a monitoring in one line.
pub fn monitoring(name: &VmName, report: &HeatReport) -> String {
    let (done, windows) = (report.windows_done, report.windows);
    let bar = bar(done.into(), windows.into());
    format!("{name}: {bar}  window {} of {windows}", done.saturating_add(1))
}

/// Returns how fast the tiers are, and the weights of reads and writes that follow from that.
pub fn calibration(found: &Calibration) -> String {
    let each = found.tiers.iter().map(|tier| {
        let (read, write) = (readable(tier.read_ns), readable(tier.write_ns));
        row(&tier.tier, format!("{read} to read a page, {write} to write one"))
    });
    let weights = format!("read {}, written {}", found.read_weight, found.write_weight);
    "this host's tiers\n".to_owned() + &each.collect::<String>() + &row("weights", weights)
}

/// Returns the pool, with a line for each VM in it.
pub fn pool(pool: &PoolStatus) -> String {
    let Some(bytes) = pool.bytes else {
        return "there is no pool: `ebb pool SIZE` makes one\n".into();
    };
    let [all, shares, free] = [bytes, pool.shares_bytes, pool.free_bytes].map(Bytes);
    let head = format!("pool of {all}: {shares} in shares, {free} unassigned now\n");
    if pool.vms.is_empty() {
        return head + "no VM is in it: `ebb share NAME SIZE` puts one in\n";
    }
    let names = ["NAME", "SHARE", "LOWER", "UPPER", "HOT SET", "HAS", "GOAL", "LIMIT"];
    let lines: Vec<[String; 8]> =
        std::iter::once(names.map(String::from)).chain(pool.vms.iter().map(member)).collect();
    head + &table(&lines)
}

fn member(vm: &PoolMember) -> [String; 8] {
    let [share, lower, upper, held, goal] =
        [vm.share_bytes, vm.lower_bytes, vm.upper_bytes, vm.held_bytes, vm.goal_bytes]
            .map(|bytes| Bytes(bytes).to_string());
    let limit = limit_or_none(vm.limit_bytes);
    [vm.name.to_string(), share, lower, upper, known(vm.hot_bytes), held, goal, limit]
}
