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

/// Free memory that reclaim leaves to the guest if it is not told to leave more, in bytes. The
/// guest takes memory there next.
pub const RESERVE_BYTES: u64 = 64 << 20;

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

/// Appends blocks to `out`, from the tails of the lists: the largest blocks of all zones first. Of
/// one order, zones come as Normal, Movable and DMA32 (never DMA), and movable memory comes first.
///
/// A block of the largest order cannot be merged with its buddy, so its metadata is written least
/// often while it stays free.
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
    let orders = (min_order..=sight.layout.max_order()).rev();
    let usable = || zones.iter().filter(|zone| zone.kind != ZoneKind::Dma);
    orders.flat_map(move |order| {
        usable().flat_map(move |zone| {
            migrate_types(zones.migrate_types()).map(move |kind| (zone, order, kind))
        })
    })
}

/// Migrate types in order of preference: movable, reclaimable and unmovable memory, and last what
/// the kernel keeps for special uses. Numbers are those of `include/linux/mmzone.h`.
fn migrate_types(count: u8) -> impl Iterator<Item = u8> {
    const COMMON: [u8; 3] = [1, 2, 0];
    COMMON.into_iter().filter(move |kind| *kind < count).chain(3..count)
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
