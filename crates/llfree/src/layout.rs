//! The memory layout that both implementations of the allocator share. `docs/llfree.md` draws it
//! byte by byte.

use crate::error::LayoutError;

/// Words of a zone's header: 128 bytes.
pub const HEADER_WORDS: usize = 16;
/// First word of a header: `EBBLLFRE`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"EBBLLFRE");
/// Version of this layout.
pub const VERSION: u32 = 1;

/// Greatest order: a pair of huge frames.
pub const MAX_ORDER: u8 = 10;
/// Order of a huge frame.
pub const HUGE_ORDER: u8 = 9;
/// Frames in a row, that is, in one word of the bit field.
pub const ROW_FRAMES: u64 = 64;
/// Rows in an area.
pub const AREA_ROWS: usize = 8;
/// Frames in an area: one huge frame.
pub const AREA_FRAMES: u64 = 512;
/// Areas in a tree.
pub const TREE_AREAS: usize = 8;
/// Frames in a tree.
pub const TREE_FRAMES: u64 = 4096;
/// Alignment of a zone's first frame, in frames, so that blocks of all orders are aligned.
pub const ZONE_ALIGN_FRAMES: u64 = 1024;
/// Most frames in a zone: a row's number fits in 32 bits.
pub const MAX_FRAMES: u64 = 1 << 38;
/// Most cores in a zone: each has one reservation slot of each kind. A zone of one core has slots
/// that all cores share.
pub const MAX_CORES: u32 = 4096;

/// Area: number of frames that are free and not claimed, 0..=512.
pub const AREA_FREE_MASK: u16 = 0x3ff;
/// Area: a set bit of the bit field stands for a free frame, not for an allocated one.
pub const AREA_INVERTED: u16 = 1 << 13;
/// Area: it has no memory (E).
pub const AREA_EVICTED: u16 = 1 << 14;
/// Area: allocated as a whole (A), by the guest or, if it is also evicted, by the host.
pub const AREA_ALLOCATED: u16 = 1 << 15;

/// Tree: free frames, in steps of [`TREE_STEP`] an area.
pub const TREE_FREE_MASK: u32 = 0x1fff;
/// Tree: a slot takes frames from it (R).
pub const TREE_RESERVED: u32 = 1 << 13;
/// Tree: shift of its kind, which is that of the slot that reserved it while it was free.
pub const TREE_KIND_SHIFT: u32 = 14;
/// Tree: mask of the kind, two bits.
pub const TREE_KIND_MASK: u32 = 3 << TREE_KIND_SHIFT;
/// Tree: shift of the number of its evicted areas, 0..=8.
pub const TREE_EVICTED_SHIFT: u32 = 16;
/// Tree: mask of the number of evicted areas, four bits.
pub const TREE_EVICTED_MASK: u32 = 0xf << TREE_EVICTED_SHIFT;
/// A tree counts the free frames of its areas in steps of this many frames.
pub const TREE_STEP: u32 = 16;

/// Words of a reservation slot: a cache line, so that no two cores share one.
pub const SLOT_WORDS: usize = 8;
/// Slots of each core: one for each kind.
pub const SLOT_KINDS: usize = 3;
/// Slot: number of single frames of its area that it has claimed.
pub const SLOT_CLAIMS_MASK: u64 = 0x3ff;
/// Slot: the area is inverted, see [`AREA_INVERTED`].
pub const SLOT_INVERTED: u64 = 1 << 13;
/// Slot: there is a reservation.
pub const SLOT_PRESENT: u64 = 1 << 15;
/// Slot: shift of the row where the search continues.
pub const SLOT_ROW_SHIFT: u32 = 32;
/// Most frames that a slot claims at once.
pub const CLAIM_FRAMES: u16 = 64;

/// Kind: kernel allocations that stay where they are.
pub const KIND_UNMOVABLE: u32 = 0;
/// Kind: memory of processes, page cache.
pub const KIND_MOVABLE: u32 = 1;
/// Kind: blocks of order 9 and more.
pub const KIND_HUGE: u32 = 2;

/// Word of the header: the magic number.
pub const HEADER_MAGIC: usize = 0;
/// Word of the header: version in the low half, cores in the high one.
pub const HEADER_VERSION_CORES: usize = 1;
/// Word of the header: number of the zone's first frame.
pub const HEADER_BASE_FRAME: usize = 2;
/// Word of the header: frames that the zone spans.
pub const HEADER_FRAMES: usize = 3;
/// Word of the header: guest-physical address of the bit field.
pub const HEADER_BITS: usize = 4;
/// Word of the header: guest-physical address of the areas.
pub const HEADER_AREAS: usize = 5;
/// Word of the header: guest-physical address of the trees.
pub const HEADER_TREES: usize = 6;
/// Word of the header: guest-physical address of the reservation slots.
pub const HEADER_SLOTS: usize = 7;
/// Word of the header, written by the host: huge frames that are hard-reclaimed.
pub const HEADER_HARD: usize = 8;
/// Word of the header, written by the host: total of frames that it has asked the guest to purge.
pub const HEADER_PURGE_ASKED: usize = 9;
/// Word of the header, written by the guest: how many of those frames it has tried to purge.
pub const HEADER_PURGE_DONE: usize = 10;

/// Every number of the layout, by its name in C. The build of the C side is checked against it.
pub const TABLE: &[(&str, u64)] = &[
    ("LLFREE_HEADER_WORDS", HEADER_WORDS as u64),
    ("LLFREE_MAGIC", MAGIC),
    ("LLFREE_VERSION", VERSION as u64),
    ("LLFREE_MAX_ORDER", MAX_ORDER as u64),
    ("LLFREE_HUGE_ORDER", HUGE_ORDER as u64),
    ("LLFREE_ROW_FRAMES", ROW_FRAMES),
    ("LLFREE_AREA_ROWS", AREA_ROWS as u64),
    ("LLFREE_AREA_FRAMES", AREA_FRAMES),
    ("LLFREE_TREE_AREAS", TREE_AREAS as u64),
    ("LLFREE_TREE_FRAMES", TREE_FRAMES),
    ("LLFREE_ZONE_ALIGN_FRAMES", ZONE_ALIGN_FRAMES),
    ("LLFREE_MAX_FRAMES", MAX_FRAMES),
    ("LLFREE_MAX_CORES", MAX_CORES as u64),
    ("LLFREE_AREA_FREE_MASK", AREA_FREE_MASK as u64),
    ("LLFREE_AREA_INVERTED", AREA_INVERTED as u64),
    ("LLFREE_AREA_EVICTED", AREA_EVICTED as u64),
    ("LLFREE_AREA_ALLOCATED", AREA_ALLOCATED as u64),
    ("LLFREE_TREE_FREE_MASK", TREE_FREE_MASK as u64),
    ("LLFREE_TREE_RESERVED", TREE_RESERVED as u64),
    ("LLFREE_TREE_KIND_SHIFT", TREE_KIND_SHIFT as u64),
    ("LLFREE_TREE_KIND_MASK", TREE_KIND_MASK as u64),
    ("LLFREE_TREE_EVICTED_SHIFT", TREE_EVICTED_SHIFT as u64),
    ("LLFREE_TREE_EVICTED_MASK", TREE_EVICTED_MASK as u64),
    ("LLFREE_TREE_STEP", TREE_STEP as u64),
    ("LLFREE_SLOT_WORDS", SLOT_WORDS as u64),
    ("LLFREE_SLOT_KINDS", SLOT_KINDS as u64),
    ("LLFREE_SLOT_CLAIMS_MASK", SLOT_CLAIMS_MASK),
    ("LLFREE_SLOT_INVERTED", SLOT_INVERTED),
    ("LLFREE_SLOT_PRESENT", SLOT_PRESENT),
    ("LLFREE_SLOT_ROW_SHIFT", SLOT_ROW_SHIFT as u64),
    ("LLFREE_CLAIM_FRAMES", CLAIM_FRAMES as u64),
    ("LLFREE_KIND_UNMOVABLE", KIND_UNMOVABLE as u64),
    ("LLFREE_KIND_MOVABLE", KIND_MOVABLE as u64),
    ("LLFREE_KIND_HUGE", KIND_HUGE as u64),
    ("LLFREE_HEADER_MAGIC", HEADER_MAGIC as u64),
    ("LLFREE_HEADER_VERSION_CORES", HEADER_VERSION_CORES as u64),
    ("LLFREE_HEADER_BASE_FRAME", HEADER_BASE_FRAME as u64),
    ("LLFREE_HEADER_FRAMES", HEADER_FRAMES as u64),
    ("LLFREE_HEADER_BITS", HEADER_BITS as u64),
    ("LLFREE_HEADER_AREAS", HEADER_AREAS as u64),
    ("LLFREE_HEADER_TREES", HEADER_TREES as u64),
    ("LLFREE_HEADER_SLOTS", HEADER_SLOTS as u64),
    ("LLFREE_HEADER_HARD", HEADER_HARD as u64),
    ("LLFREE_HEADER_PURGE_ASKED", HEADER_PURGE_ASKED as u64),
    ("LLFREE_HEADER_PURGE_DONE", HEADER_PURGE_DONE as u64),
];

const _: () = assert!(AREA_FRAMES == ROW_FRAMES * AREA_ROWS as u64);
const _: () = assert!(AREA_FRAMES == 1 << HUGE_ORDER);
const _: () = assert!(TREE_FRAMES == AREA_FRAMES * TREE_AREAS as u64);
const _: () = assert!(ZONE_ALIGN_FRAMES == 1 << MAX_ORDER);
const _: () = assert!(MAX_FRAMES / ROW_FRAMES == 1 << 32);
const _: () = assert!(AREA_FRAMES <= AREA_FREE_MASK as u64 && TREE_FRAMES <= TREE_FREE_MASK as u64);

/// Bytes of a cache line. Each array has its own lines, so that no two arrays share one.
const LINE_BYTES: u64 = 64;

/// Offsets of the parts of a zone's state in one region. Each is a multiple of 64 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Frames that the zone spans.
    pub frames: u64,
    /// Cores that have reservation slots of their own; 1 if all cores share the slots.
    pub cores: u32,
    /// Offset of the bit field, bytes. The header is at 0.
    pub bits_bytes: u64,
    /// Offset of the areas, bytes.
    pub areas_bytes: u64,
    /// Offset of the trees, bytes.
    pub trees_bytes: u64,
    /// Offset of the reservation slots, bytes.
    pub slots_bytes: u64,
    /// Size of all parts together, bytes.
    pub total_bytes: u64,
}

impl Layout {
    /// Lays out a zone of `frames` frames and `cores` cores.
    ///
    /// # Errors
    /// There are no frames or no cores, or too many of them.
    pub fn new(frames: u64, cores: u32) -> Result<Layout, LayoutError> {
        check_size(frames, cores)?;
        let lines = |bytes: u64| bytes.next_multiple_of(LINE_BYTES);
        let counts = Counts::new(frames, cores);
        let bits_bytes = HEADER_WORDS as u64 * 8;
        let areas_bytes = bits_bytes + counts.rows as u64 * 8;
        let trees_bytes = areas_bytes + lines(counts.areas as u64 * 2);
        let slots_bytes = trees_bytes + lines(counts.trees as u64 * 4);
        let total_bytes = slots_bytes + counts.slot_words as u64 * 8;
        Ok(Layout { frames, cores, bits_bytes, areas_bytes, trees_bytes, slots_bytes, total_bytes })
    }

    /// Returns how many elements each array has.
    pub fn counts(&self) -> Counts {
        Counts::new(self.frames, self.cores)
    }
}

/// Number of elements in each array of a zone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Words of the bit field: eight for each area.
    pub rows: usize,
    /// Areas.
    pub areas: usize,
    /// Trees.
    pub trees: usize,
    /// Words of reservation slots.
    pub slot_words: usize,
}

impl Counts {
    pub(crate) fn new(frames: u64, cores: u32) -> Counts {
        let areas = frames.div_ceil(AREA_FRAMES) as usize;
        Counts {
            rows: areas * AREA_ROWS,
            areas,
            trees: areas.div_ceil(TREE_AREAS),
            slot_words: cores as usize * SLOT_KINDS * SLOT_WORDS,
        }
    }
}

pub(crate) fn check_size(frames: u64, cores: u32) -> Result<(), LayoutError> {
    if frames == 0 || frames > MAX_FRAMES {
        return Err(LayoutError::Frames(frames));
    }
    if cores == 0 || cores > MAX_CORES {
        return Err(LayoutError::Cores(cores));
    }
    Ok(())
}
