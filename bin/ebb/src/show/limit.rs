//! A VM's limit, and what was evicted to keep it.

use ebb_api::{EvictReport, LimitStatus, VmName};
use ebb_units::Bytes;

use super::row;
use crate::interval::readable;

/// Returns the limit on a VM's resident memory, with a headline.
pub fn limit(name: &VmName, status: &LimitStatus) -> String {
    format!("{name}: limit on resident memory\n") + &rows(status)
}

/// Returns the lines of a limit, and of what became of the evicted memory.
pub fn rows(limit: &LimitStatus) -> String {
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
        row("limit", state + &pool.unwrap_or_default()),
        row(
            "non-resident",
            format!(
                "{} in the store, {} disk-backed; {} of the resident memory keeps its slots in the \
                 store",
                Bytes(limit.saved_bytes),
                Bytes(limit.on_disk_bytes),
                Bytes(limit.clean_bytes)
            ),
        ),
        row(
            "evicted",
            format!(
                "{} saved, {} saved before, {} disk-backed, {} free or empty, in all",
                Bytes(limit.saved_total_bytes),
                Bytes(limit.clean_total_bytes),
                Bytes(limit.on_disk_total_bytes),
                Bytes(limit.empty_total_bytes)
            ),
        ),
        row(
            "refilled",
            format!(
                "{} on touch, {} ahead of it, of which {} was used; {} within 30 s, in all",
                Bytes(limit.refilled_total_bytes),
                Bytes(limit.ahead_total_bytes),
                Bytes(limit.ahead_hit_total_bytes),
                Bytes(limit.refaulted_total_bytes)
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
        + &limit.stuck.as_ref().map(|why| row("blocked by", why)).unwrap_or_default()
}

/// Returns the lines of compressed memory, or nothing if there is none.
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

/// Returns what an eviction did.
pub fn evicted(name: &VmName, report: &EvictReport) -> String {
    let saved = Bytes(report.saved_bytes);
    [
        format!("{name}: evicted {saved} in {} frames\n", report.saved_frames),
        row("time", readable(report.duration_ns)),
        row("abandoned", format!("{} frames that the guest wrote to", report.abandoned)),
        row("stopped by", &report.stopped_by),
    ]
    .concat()
}
