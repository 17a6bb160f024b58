/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* The words of areas, trees and slots, as they were when they were read. */
#ifndef LLFREE_WORDS_H
#define LLFREE_WORDS_H

#include "llfree.h"

/* More than 512 only where somebody broke the rules. */
static __always_inline u16 area_free(u16 area)
{
	return area & LLFREE_AREA_FREE_MASK;
}

static __always_inline bool area_is_allocated(u16 area)
{
	return area & LLFREE_AREA_ALLOCATED;
}

static __always_inline bool area_is_evicted(u16 area)
{
	return area & LLFREE_AREA_EVICTED;
}

/* What a row is XORed with for a set bit to mean "allocated". */
static __always_inline u64 area_flip(u16 area)
{
	return area & LLFREE_AREA_INVERTED ? ~0ull : 0;
}

/* All frames are free, and nobody has a claim. */
static __always_inline bool area_is_free(u16 area)
{
	return area_free(area) == LLFREE_AREA_FRAMES && !area_is_allocated(area);
}

/* Whether @frames can be claimed. */
static __always_inline bool area_has(u16 area, u16 frames)
{
	return area_free(area) >= frames && !area_is_allocated(area);
}

/* Whether @frames can be given back. */
static __always_inline bool area_lacks(u16 area, u16 frames)
{
	return area_free(area) + frames <= LLFREE_AREA_FRAMES && !area_is_allocated(area);
}

/* Taken as a whole by the guest. The bits, untouched, now mean "allocated". */
static __always_inline u16 area_taken(u16 area)
{
	return ((area & ~LLFREE_AREA_FREE_MASK) | LLFREE_AREA_ALLOCATED) ^ LLFREE_AREA_INVERTED;
}

/* The reverse. */
static __always_inline u16 area_given_back(u16 area)
{
	area &= ~(LLFREE_AREA_FREE_MASK | LLFREE_AREA_ALLOCATED);
	return (area | LLFREE_AREA_FRAMES) ^ LLFREE_AREA_INVERTED;
}

/*
 * What its free frames count for in its tree: 0 and 512 are exact, all between
 * is a multiple of 16 from 16 to 496. So a tree's word is written once in
 * sixteen times, and still tells empty and full.
 */
static __always_inline s32 area_steps(u16 area)
{
	u32 free = area_free(area);
	u32 up = (free + LLFREE_TREE_STEP - 1) / LLFREE_TREE_STEP;
	u32 most = free >= LLFREE_AREA_FRAMES ? 32 : 31;

	return (up < most ? up : most) * LLFREE_TREE_STEP;
}

/* Free frames in steps; 0 while more was subtracted than added so far. */
static inline u32 tree_free(u32 tree)
{
	u32 free = tree & LLFREE_TREE_FREE_MASK;

	return free > LLFREE_TREE_FRAMES ? 0 : free;
}

static inline bool tree_is_free(u32 tree)
{
	return tree_free(tree) == LLFREE_TREE_FRAMES;
}

/*
 * Whether an area seems to be free in part; not so if such areas together have
 * as many free frames as whole ones.
 */
static inline bool tree_has_part(u32 tree)
{
	return tree_free(tree) % LLFREE_AREA_FRAMES;
}

static inline bool tree_is_reserved(u32 tree)
{
	return tree & LLFREE_TREE_RESERVED;
}

static inline u32 tree_kind(u32 tree)
{
	return (tree & LLFREE_TREE_KIND_MASK) >> LLFREE_TREE_KIND_SHIFT;
}

/* Areas without memory behind them. */
static inline u32 tree_evicted(u32 tree)
{
	return (tree & LLFREE_TREE_EVICTED_MASK) >> LLFREE_TREE_EVICTED_SHIFT;
}

/*
 * Modulo the field's size: the changes of two threads may come in the wrong
 * order, but their sum is right.
 */
static __always_inline u32 tree_shift(u32 tree, s32 frames)
{
	return (tree & ~LLFREE_TREE_FREE_MASK) | ((tree + (u32)frames) & LLFREE_TREE_FREE_MASK);
}

/* For a slot of this kind. A free tree has no kind of its own. */
static inline u32 tree_reserve(u32 tree, u32 kind)
{
	if (tree_is_free(tree))
		tree = (tree & ~LLFREE_TREE_KIND_MASK) | kind << LLFREE_TREE_KIND_SHIFT;
	return tree | LLFREE_TREE_RESERVED;
}

/* At @row, with claims on frames of its area when that was @area. */
static inline u64 slot_new(u64 row, u16 claims, u16 area)
{
	u64 inverted = area & LLFREE_SLOT_INVERTED;

	return row << LLFREE_SLOT_ROW_SHIFT | LLFREE_SLOT_PRESENT | inverted | claims;
}

static __always_inline u16 slot_claims(u64 slot)
{
	return slot & LLFREE_SLOT_CLAIMS_MASK;
}

static __always_inline u64 slot_row(u64 slot)
{
	return slot >> LLFREE_SLOT_ROW_SHIFT;
}

static __always_inline u32 slot_area(u64 slot)
{
	return slot_row(slot) / LLFREE_AREA_ROWS;
}

static __always_inline u32 slot_tree(u64 slot)
{
	return slot_area(slot) / LLFREE_TREE_AREAS;
}

static __always_inline bool slot_is_present(u64 slot)
{
	return slot & LLFREE_SLOT_PRESENT;
}

static __always_inline u64 slot_flip(u64 slot)
{
	return slot & LLFREE_SLOT_INVERTED ? ~0ull : 0;
}

static __always_inline u64 slot_at_row(u64 slot, u64 row)
{
	return (slot & ((1ull << LLFREE_SLOT_ROW_SHIFT) - 1)) | row << LLFREE_SLOT_ROW_SHIFT;
}

#endif /* LLFREE_WORDS_H */
