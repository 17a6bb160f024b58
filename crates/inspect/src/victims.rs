//! Which free blocks to take.
//!
//! The kernel allocates from the head of its free lists and most blocks at the tail
//! stay free for long. So blocks are taken from the tails, and a reserve at the
//! heads is left to the guest: a block whose list neighbour is used has its
//! metadata written, which costs a fault where metadata is protected.

use ebb_units::{FrameRange, Gfn};

use crate::zones::{FreeList, Sight};
use crate::{End, Zone, ZoneKind, Zones};

/// A free block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Block {
    /// Its first frame.
    pub head: Gfn,
    /// It has `1 << order` frames.
    pub order: u8,
}

impl Block {
    /// Its frames.
    pub fn frames(self) -> FrameRange {
        FrameRange::block(self.head, self.order)
    }
}

/// What to take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The smallest blocks to take.
    pub min_order: u8,
    /// How much to leave at the lists' heads.
    pub reserve_bytes: u64,
    /// How much to take, at most (a last block may pass it).
    pub want_bytes: u64,
}

/// What was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Taken {
    /// In the blocks appended.
    pub bytes: u64,
    /// Left to the guest at the lists' heads.
    pub reserved_bytes: u64,
    /// Lists whose walk stopped before its end; on a running guest they change under it.
    pub broken_lists: u32,
}

/// Appends blocks to `out`: of each zone in order (Normal, Movable, DMA32; never
/// DMA), the largest first, from the tails of the lists.
///
/// A block is on one list only. Lists that pretend otherwise, by crossing or leading
/// in circles, yield no more blocks than the guest's RAM has room for.
pub(crate) fn victims(
    zones: &Zones,
    sight: Sight<'_>,
    request: Request,
    out: &mut Vec<Block>,
) -> Taken {
    let (reserve, reserved_bytes) = reserve(zones, sight, request);
    let mut taken = Taken { reserved_bytes, ..Taken::default() };
    let mut left = most_blocks(sight, request);
    for (zone, order, migrate_type) in lists(zones, sight, request.min_order) {
        let mut list = zones.free_list(sight, zone, order, migrate_type, End::Tail);
        while taken.bytes < request.want_bytes && left > 0 {
            let Some(head) = list.next() else { break };
            let block = Block { head, order };
            if reserve.binary_search(&block).is_ok() {
                break;
            }
            taken.bytes += block.frames().bytes();
            left -= 1;
            out.push(block);
        }
        taken.broken_lists += u32::from(list.fault().is_some());
    }
    taken
}

fn most_blocks(sight: Sight<'_>, request: Request) -> u64 {
    sight.memmap.frames() >> request.min_order.min(63)
}

/// Every list to look at, in the order of preference.
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

/// Sets blocks aside at the heads of the lists, one of each list in turn until they
/// hold `reserve_bytes`; sorted.
fn reserve(zones: &Zones, sight: Sight<'_>, request: Request) -> (Vec<Block>, u64) {
    let mut heads: Vec<(u8, FreeList<'_>)> = lists(zones, sight, request.min_order)
        .map(|(zone, order, kind)| (order, zones.free_list(sight, zone, order, kind, End::Head)))
        .collect();
    let (mut blocks, mut bytes, mut left) = (Vec::new(), 0, most_blocks(sight, request));
    while bytes < request.reserve_bytes && left > 0 && !heads.is_empty() {
        heads.retain_mut(|(order, list)| {
            let next = list.next().filter(|_| bytes < request.reserve_bytes && left > 0);
            let Some(head) = next else { return false };
            left -= 1;
            let block = Block { head, order: *order };
            bytes += block.frames().bytes();
            blocks.push(block);
            true
        });
    }
    blocks.sort_unstable();
    (blocks, bytes)
}
