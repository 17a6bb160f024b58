//! What a VM does with its tiers.

use ebb_api::{TierStatus, TierUse};
use ebb_tier::{Ladder, TierKind};
use ebb_units::{Bytes, FRAME_BYTES};

use super::placing::PlacementFigures;
use crate::model::tiers::Tiers;
use crate::vm::context::VmContext;

/// A VM that works with more than this percentage of its fast memory waits too much for the slow
/// one.
const ACTIVE_PERCENT_MAX: u64 = 50;

/// Returns what the VM does with its tiers. `active_bytes`: the bytes that it works with.
/// `hot_bytes`: the bytes that are hot. `on_nodes`: what its nodes hold.
pub fn of(
    cx: &VmContext,
    active_bytes: Option<u64>,
    hot_bytes: Option<u64>,
    on_nodes: Option<PlacementFigures>,
) -> Option<TierStatus> {
    let tiers = cx.record.tiers.as_ref()?;
    let moved_bytes = on_nodes.as_ref().map(|figures| figures.moved_bytes);
    Some(TierStatus {
        ladder: tiers.ladder.clone(),
        fast_bytes: tiers.fast_bytes,
        active_bytes,
        hot_bytes,
        tiers: uses(cx, tiers, on_nodes.unwrap_or_default()),
        moved_bytes,
        warnings: Vec::new(),
    })
}

/// Returns what each tier holds.
fn uses(cx: &VmContext, tiers: &Tiers, on_nodes: PlacementFigures) -> Vec<TierUse> {
    let pager = &cx.pager;
    let usage = pager.residency().store_usage();
    let ladder: Option<Ladder> = tiers.ladder.parse().ok();
    let rungs = ladder.as_ref().map(Ladder::rungs).unwrap_or_default();
    let mut on_nodes = on_nodes.held_bytes.into_iter();
    let of = |rung: &ebb_tier::Rung| TierUse {
        tier: rung.kind.to_string(),
        bytes: rung.bytes,
        held_bytes: match rung.kind {
            TierKind::Compressed => usage.compressed_pages * FRAME_BYTES,
            TierKind::File(_) => usage.disk_slots_used * FRAME_BYTES,
            TierKind::Node(_) => on_nodes.next().unwrap_or(0),
            TierKind::Dram => pager.ram().resident_bytes().unwrap_or(0),
        },
    };
    rungs.iter().map(of).collect()
}

/// Returns what the operator should know of that.
pub fn warning(status: &TierStatus) -> Option<String> {
    // A hot set that was not touched for a while is still hot.
    let active_bytes = status.active_bytes.max(status.hot_bytes)?;
    let percent = active_bytes.saturating_mul(100).checked_div(status.fast_bytes)?;
    (percent > ACTIVE_PERCENT_MAX).then(|| {
        format!(
            "it works with {} of its {} of fast memory ({percent} %): above {ACTIVE_PERCENT_MAX} % \
             it waits for its slow tier; give it more of the fast one",
            Bytes(active_bytes),
            Bytes(status.fast_bytes)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_half_in_use_is_reported() {
        let status = |active_bytes| TierStatus {
            ladder: String::new(),
            fast_bytes: 100 << 20,
            active_bytes,
            hot_bytes: None,
            tiers: Vec::new(),
            moved_bytes: None,
            warnings: Vec::new(),
        };
        assert_eq!(warning(&status(None)), None);
        assert_eq!(warning(&status(Some(50 << 20))), None);
        let said = warning(&status(Some(51 << 20))).unwrap();
        assert!(said.contains("51 MiB of its 100 MiB of fast memory (51 %)"), "{said}");
        let hot = TierStatus { hot_bytes: Some(60 << 20), ..status(Some(1)) };
        assert!(warning(&hot).is_some_and(|said| said.contains("60 MiB of its 100 MiB")));
    }
}
