/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The layout that the guest's side and the host's share, number by number;
 * docs/llfree.md draws it byte by byte. The build of the tests compares each
 * of these with the host's.
 */
#ifndef LLFREE_LAYOUT_H
#define LLFREE_LAYOUT_H

#include "llfree_platform.h"

/* Header: 128 bytes, "EBBLLFRE" first. */
#define LLFREE_HEADER_WORDS 16
#define LLFREE_MAGIC 0x4552464c4c424245ull
#define LLFREE_VERSION 1

#define LLFREE_MAX_ORDER 10
#define LLFREE_HUGE_ORDER 9
/* A row is a word of the bit field. */
#define LLFREE_ROW_FRAMES 64
#define LLFREE_AREA_ROWS 8
/* An area is a huge frame. */
#define LLFREE_AREA_FRAMES 512
#define LLFREE_TREE_AREAS 8
#define LLFREE_TREE_FRAMES 4096
/* A zone begins at a multiple of this. */
#define LLFREE_ZONE_ALIGN_FRAMES 1024
#define LLFREE_MAX_FRAMES (1ull << 38)
#define LLFREE_MAX_CORES 4096

/* Area: frames that are free and not claimed, 0..512. */
#define LLFREE_AREA_FREE_MASK 0x3ff
/* A set bit of the bit field stands for a free frame, not an allocated one. */
#define LLFREE_AREA_INVERTED (1 << 13)
/* No memory is behind it (E). */
#define LLFREE_AREA_EVICTED (1 << 14)
/* Allocated as a whole (A), by the guest or, evicted, by the host. */
#define LLFREE_AREA_ALLOCATED (1 << 15)

/* Tree: free frames, in steps of LLFREE_TREE_STEP an area. */
#define LLFREE_TREE_FREE_MASK 0x1fffu
#define LLFREE_TREE_RESERVED (1u << 13)
#define LLFREE_TREE_KIND_SHIFT 14
#define LLFREE_TREE_KIND_MASK (3u << LLFREE_TREE_KIND_SHIFT)
/* How many of its areas are evicted, 0..8. */
#define LLFREE_TREE_EVICTED_SHIFT 16
#define LLFREE_TREE_EVICTED_MASK (0xfu << LLFREE_TREE_EVICTED_SHIFT)
#define LLFREE_TREE_STEP 16

/* A reservation slot is a cache line; a core, or all together, has one for each kind. */
#define LLFREE_SLOT_WORDS 8
#define LLFREE_SLOT_KINDS 3
/* Slot: single frames of its area that it has claimed. */
#define LLFREE_SLOT_CLAIMS_MASK 0x3ffull
/* The area's flag. */
#define LLFREE_SLOT_INVERTED (1ull << 13)
#define LLFREE_SLOT_PRESENT (1ull << 15)
/* The row at which the search goes on. */
#define LLFREE_SLOT_ROW_SHIFT 32
/* Frames that a slot claims at once. */
#define LLFREE_CLAIM_FRAMES 64

/* Of blocks below order 9, whoever asks says which of the first two. */
#define LLFREE_KIND_UNMOVABLE 0
#define LLFREE_KIND_MOVABLE 1
#define LLFREE_KIND_HUGE 2

/* Words of the header. Addresses are guest-physical. */
#define LLFREE_HEADER_MAGIC 0
/* Version in the low half, cores in the high one. */
#define LLFREE_HEADER_VERSION_CORES 1
#define LLFREE_HEADER_BASE_FRAME 2
#define LLFREE_HEADER_FRAMES 3
#define LLFREE_HEADER_BITS 4
#define LLFREE_HEADER_AREAS 5
#define LLFREE_HEADER_TREES 6
#define LLFREE_HEADER_SLOTS 7
/* The host's: huge frames that it has hard-reclaimed. */
#define LLFREE_HEADER_HARD 8
/* The host's: frames that it has asked the guest to free, ever. */
#define LLFREE_HEADER_PURGE_ASKED 9
/* Of those, frames that the guest has tried to free. */
#define LLFREE_HEADER_PURGE_DONE 10

_Static_assert(LLFREE_AREA_FRAMES == LLFREE_ROW_FRAMES * LLFREE_AREA_ROWS, "rows of an area");
_Static_assert(LLFREE_AREA_FRAMES == 1 << LLFREE_HUGE_ORDER, "an area is a huge frame");
_Static_assert(LLFREE_TREE_FRAMES == LLFREE_AREA_FRAMES * LLFREE_TREE_AREAS, "areas of a tree");
_Static_assert(LLFREE_ZONE_ALIGN_FRAMES == 1 << LLFREE_MAX_ORDER, "blocks are aligned");
_Static_assert(LLFREE_SLOT_INVERTED == LLFREE_AREA_INVERTED, "taken over as it is");
_Static_assert(sizeof(llf_u16) == 2 && sizeof(llf_u32) == 4 && sizeof(llf_u64) == 8,
	       "atomic words have the size of plain ones");

#endif /* LLFREE_LAYOUT_H */
