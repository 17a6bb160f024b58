/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* What the parts of the allocator have in common. */
#ifndef LLFREE_ZONE_H
#define LLFREE_ZONE_H

#include "rows.h"

/* What is looked for. */
struct want {
	unsigned int order;
	u32 kind;
	/* Whose share of the zone to look in first; less than the zone has. */
	u32 core;
	/* The slot's tree, or where the share begins. */
	u32 tree;
	/* Below order 9, areas that are free as a whole will do. */
	bool whole;
	/* Areas without memory will do. */
	bool evicted;
};

/* A block that was taken. */
struct grab {
	u64 frame;
	/* Its area, as it was before. */
	u16 area;
	/* More frames of the same area, claimed for the slot. */
	u16 claims;
};

static inline u32 frame_area(u64 frame)
{
	return frame / LLFREE_AREA_FRAMES;
}

static inline u32 frame_tree(u64 frame)
{
	return frame / LLFREE_TREE_FRAMES;
}

static __always_inline llf_u64 *zone_rows(const struct llfree *zone, u32 area)
{
	return &zone->bits[(size_t)area * LLFREE_AREA_ROWS];
}

/* 0, or why there can be no such block. */
static __always_inline int zone_check(const struct llfree *zone, u64 frame, unsigned int order)
{
	u64 size;

	if (unlikely(order > LLFREE_MAX_ORDER))
		return LLFREE_ERR_ORDER;
	size = 1ull << order;
	if (unlikely(frame >= zone->frames || size > zone->frames - frame || frame & (size - 1)))
		return LLFREE_ERR_FRAME;
	return 0;
}

/* Counts an area's change in its tree, which was @tree a moment ago. */
static __always_inline void zone_count(struct llfree *zone, u32 index, u32 tree, u16 before,
				       u16 after)
{
	s32 frames = area_steps(after) - area_steps(before);
	llf_u32 *word = &zone->trees[index / LLFREE_TREE_AREAS];

	if (frames == 0)
		return;
	while (!llf_replace(word, &tree, tree_shift(tree, frames)))
		;
}

/*
 * Changes area @index, which was *@seen a moment ago. Whether it did; if not,
 * *@seen is what it is.
 */
static __always_inline bool zone_replace(struct llfree *zone, u32 index, u16 *seen, u16 after)
{
	u32 tree = llf_peek(&zone->trees[index / LLFREE_TREE_AREAS]);

	if (!llf_replace(&zone->areas[index], seen, after))
		return false;
	zone_count(zone, index, tree, *seen, after);
	return true;
}

/* Whose slots a core uses: its own, or those of core 0 where all share them. */
static __always_inline u32 zone_core(const struct llfree *zone, u32 core)
{
	/* Without a division where all share them. */
	if (likely(zone->cores == 1))
		return 0;
	return likely(core < zone->cores) ? core : core % zone->cores;
}

/* @core is one that zone_core() returned. */
static __always_inline llf_u64 *zone_slot(const struct llfree *zone, u32 core, u32 kind)
{
	return &zone->slots[(core * LLFREE_SLOT_KINDS + kind) * LLFREE_SLOT_WORDS];
}

/* Where a core begins to look, and its share of the trees begins. */
static inline u32 zone_home(const struct llfree *zone, u32 core)
{
	return (u64)core * zone->tree_count / zone->cores;
}

/* Gives up claims on frames of an area. */
void llf_give_back(struct llfree *zone, u32 index, u16 claims);

/* A block from tree @index. */
bool llf_grab_in_tree(struct llfree *zone, u32 index, struct want want, struct grab *grab);

/* A block from the best tree. */
bool llf_search(struct llfree *zone, struct want want, struct grab *grab);

/* The slot goes on at @next, unless somebody else has moved it. */
void llf_place(struct llfree *zone, llf_u64 *slot, u64 seen, u64 next);

/* Gives up a reservation that a slot does not have, or no longer: it has @kept. */
void llf_leave(struct llfree *zone, u64 gone, u64 kept);

/* Takes back slots' claims on areas from @first to @last. */
void llf_end_claims(struct llfree *zone, u32 first, u32 last);

#endif /* LLFREE_ZONE_H */
