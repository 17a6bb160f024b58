// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Looking at what is free, without changing a word. */
#include "zone.h"

/* Whether both areas of a pair are free as a whole. */
static bool has_pair(struct llfree *zone, u32 index)
{
	return index % 2 == 0 && index + 1 < zone->area_count &&
	       area_is_free(llf_load(&zone->areas[index])) &&
	       area_is_free(llf_load(&zone->areas[index + 1]));
}

static bool area_has_block(struct llfree *zone, u32 index, unsigned int order)
{
	u16 area = llf_load(&zone->areas[index]);

	if (order > LLFREE_HUGE_ORDER)
		return has_pair(zone, index);
	if (order == LLFREE_HUGE_ORDER)
		return area_is_free(area);
	return area_has(area, 1u << order) &&
	       (order == 0 || llf_rows_have(zone_rows(zone, index), order, area_flip(area)));
}

static bool tree_has_block(struct llfree *zone, u32 index, unsigned int order)
{
	u32 area = index * LLFREE_TREE_AREAS;
	u32 end = area + LLFREE_TREE_AREAS;

	/* Its count is rounded up, so it tells what there cannot be. */
	if (tree_free(llf_peek(&zone->trees[index])) < 1u << order)
		return false;
	for (; area < end && area < zone->area_count; area++) {
		if (area_has_block(zone, area, order))
			return true;
	}
	return false;
}

/* Where llfree_get() looks first. Blocks below order 9 are mostly the kernel's own. */
static u32 first_tree(struct llfree *zone, unsigned int order, unsigned int core)
{
	u32 kind = order < LLFREE_HUGE_ORDER ? LLFREE_KIND_UNMOVABLE : LLFREE_KIND_HUGE;
	u32 of = zone_core(zone, core);
	u64 slot = llf_load(zone_slot(zone, of, kind));

	return slot_is_present(slot) ? slot_tree(slot) : zone_home(zone, of);
}

bool llfree_has(struct llfree *zone, unsigned int order, unsigned int core)
{
	u32 index = first_tree(zone, order, core);
	u32 step;

	if (order > LLFREE_MAX_ORDER)
		return false;
	for (step = 0; step < zone->tree_count; step++, index++) {
		if (index >= zone->tree_count)
			index = 0;
		if (tree_has_block(zone, index, order))
			return true;
	}
	return false;
}

/* Areas that are free in part, or allocated. */
static void summarize_part(struct llfree *zone, u32 index, u16 area,
			   struct llfree_summary *summary)
{
	llf_u64 *rows = zone_rows(zone, index);
	u64 flip = area_flip(area);

	if (!area_is_allocated(area))
		llf_rows_count_blocks(rows, flip, summary->blocks);
	else if (area_is_evicted(area))
		summary->hosts_areas += llf_rows_are(rows, 0, LLFREE_HUGE_ORDER, flip, true);
}

void llfree_summarize(struct llfree *zone, struct llfree_summary *summary)
{
	u32 index;

	*summary = (struct llfree_summary){ 0 };
	for (index = 0; index < zone->cores * LLFREE_SLOT_KINDS; index++)
		summary->claimed += slot_claims(llf_load(&zone->slots[index * LLFREE_SLOT_WORDS]));
	summary->free = summary->claimed;
	for (index = 0; index < zone->area_count; index++) {
		u16 area = llf_load(&zone->areas[index]);

		summary->free += area_free(area);
		if (!area_is_free(area)) {
			summarize_part(zone, index, area, summary);
			continue;
		}
		summary->free_areas++;
		summary->evicted_areas += area_is_evicted(area);
		if (has_pair(zone, index))
			summary->blocks[LLFREE_MAX_ORDER]++;
		else if (!has_pair(zone, index & ~1u))
			summary->blocks[LLFREE_HUGE_ORDER]++;
	}
}
