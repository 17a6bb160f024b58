//! Which free blocks to reclaim.
//!
//! The kernel allocates from the heads of its free lists, and most blocks at the tails stay free
//! for long. So blocks are reclaimed from the tails, and a reserve at the heads is left to the
//! guest. If the kernel uses a block's neighbour on the list, it writes the block's metadata, and
//! that faults if the metadata is protected.

use ebb_units::{FrameRange, Gfn};

use crate::zones::{FreeList, Sight};
use crate::{End, Zone, ZoneKind, Zones};

/// A free block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BuddyBlock {
    /// The block's first frame.
    pub head: Gfn,
    /// The block has `1 << order` frames.
    pub order: u8,
}

impl BuddyBlock {
    /// The block's frames.
    pub fn frames(self) -> FrameRange {
        FrameRange::block(self.head, self.order)
    }
}

/// Which blocks to choose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Smallest order of a block.
    pub min_order: u8,
    /// Bytes to leave to the guest at the lists' heads.
    pub reserve_bytes: u64,
    /// Most bytes to choose. The last block may exceed it.
    pub want_bytes: u64,
}

/// What was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ChosenBlocks {
    /// Bytes in the blocks that were appended.
    pub bytes: u64,
    /// Bytes left to the guest at the lists' heads.
    pub reserved_bytes: u64,
    /// Number of lists whose walk stopped before the end. On a running guest lists change during
    /// the walk.
    pub broken_lists: u32,
}

/// Appends blocks to `out`, zone by zone (Normal, Movable, DMA32; never DMA), the largest first,
/// from the tails of the lists.
///
/// A block is on one list only. If lists of a lying guest cross or form a cycle, they yield no more
/// blocks than the guest's RAM has room for.
pub(crate) fn victims(
    zones: &Zones,
    sight: Sight<'_>,
    request: Request,
    out: &mut Vec<BuddyBlock>,
) -> ChosenBlocks {
    let (reserve, reserved_bytes) = reserve(zones, sight, request);
    let mut chosen = ChosenBlocks { reserved_bytes, ..ChosenBlocks::default() };
    let mut left = most_blocks(sight, request);
    for (zone, order, migrate_type) in lists(zones, sight, request.min_order) {
        let mut list = zones.free_list(sight, zone, order, migrate_type, End::Tail);
        while chosen.bytes < request.want_bytes && left > 0 {
            let Some(head) = list.next() else { break };
            let block = BuddyBlock { head, order };
            if reserve.binary_search(&block).is_ok() {
                break;
            }
            chosen.bytes += block.frames().bytes();
            left -= 1;
            out.push(block);
        }
        chosen.broken_lists += u32::from(list.fault().is_some());
    }
    chosen
}

fn most_blocks(sight: Sight<'_>, request: Request) -> u64 {
    sight.memmap.frames() >> request.min_order.min(63)
}

/// Every list to look at, in order of preference.
fn lists<'a>(
    zones: &'a Zones,
    sight: Sight<'_>,
    min_order: u8,
) -> impl Iterator<Item = (&'a Zone, u8, u8)> {
    let orders = move || (min_order..=sight.layout.max_order()).rev();
    let types = zones.migrate_types();
    let usable = zones.iter().filter(|zone| zone.kind != ZoneKind::Dma);
    usable.flat_map(move |zone| {
        orders().flat_map(move |order| (0..types).map(move |kind| (zone, order, kind)))
    })
}

/// Sets blocks aside at the heads of the lists, one of each list in turn, until they hold
/// `reserve_bytes`. Returns them sorted, and their bytes.
fn reserve(zones: &Zones, sight: Sight<'_>, request: Request) -> (Vec<BuddyBlock>, u64) {
    let mut heads: Vec<(u8, FreeList<'_>)> = lists(zones, sight, request.min_order)
        .map(|(zone, order, kind)| (order, zones.free_list(sight, zone, order, kind, End::Head)))
        .collect();
    let (mut blocks, mut bytes, mut left) = (Vec::new(), 0, most_blocks(sight, request));
    while bytes < request.reserve_bytes && left > 0 && !heads.is_empty() {
        heads.retain_mut(|(order, list)| {
            let next = list.next().filter(|_| bytes < request.reserve_bytes && left > 0);
            let Some(head) = next else { return false };
            left -= 1;
            let block = BuddyBlock { head, order: *order };
            bytes += block.frames().bytes();
            blocks.push(block);
            true
        });
    }
    blocks.sort_unstable();
    (blocks, bytes)
}
