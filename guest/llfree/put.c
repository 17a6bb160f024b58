// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Giving blocks back. */
#include "zone.h"

/* Hard-reclaimed: allocated, but the bits mean "free". */
static bool is_hosts(struct llfree *zone, u32 index, u16 area)
{
	return area_is_evicted(area) &&
	       llf_rows_are(zone_rows(zone, index), 0, 0, area_flip(area), true);
}

/*
 * From now on each frame of the area is allocated by itself: the bits say so
 * already.
 */
static noinline int split(struct llfree *zone, u32 index, u16 *seen)
{
	while (area_is_allocated(*seen)) {
		u16 after = *seen & ~LLFREE_AREA_ALLOCATED;

		if (is_hosts(zone, index, *seen))
			return LLFREE_ERR_NOT_ALLOCATED;
		if (llf_replace(&zone->areas[index], seen, after))
			*seen = after;
	}
	return 0;
}

static __always_inline int put_part(struct llfree *zone, u32 index, u32 first, unsigned int order)
{
	llf_u64 *rows = zone_rows(zone, index);
	u16 seen = llf_load(&zone->areas[index]);
	u16 freed;
	u64 flip;

	if (unlikely(area_is_allocated(seen)) && split(zone, index, &seen))
		return LLFREE_ERR_NOT_ALLOCATED;
	flip = area_flip(seen);
	freed = llf_rows_give(rows, first, order, flip);
	if (unlikely(!freed))
		return LLFREE_ERR_NOT_ALLOCATED;
	while (likely(area_flip(seen) == flip && area_lacks(seen, freed))) {
		if (likely(zone_replace(zone, index, &seen, seen + freed)))
			return freed == 1u << order ? 0 : LLFREE_ERR_NOT_ALLOCATED;
	}
	/* Turned since, so what was freed was not the caller's. */
	llf_rows_take_at(rows, first, order, flip);
	return LLFREE_ERR_NOT_ALLOCATED;
}

static int put_area(struct llfree *zone, u32 index)
{
	u16 seen = llf_load(&zone->areas[index]);

	while (likely(area_is_allocated(seen))) {
		if (is_hosts(zone, index, seen))
			return LLFREE_ERR_NOT_ALLOCATED;
		if (likely(zone_replace(zone, index, &seen, area_given_back(seen))))
			return 0;
	}
	return put_part(zone, index, 0, LLFREE_HUGE_ORDER);
}

/* Whether the guest has all of an area allocated. */
static bool is_taken(struct llfree *zone, u32 index)
{
	u64 flip = area_flip(llf_load(&zone->areas[index]));

	return llf_rows_are(zone_rows(zone, index), 0, LLFREE_HUGE_ORDER, flip, false);
}

static noinline int put_pair(struct llfree *zone, u32 index)
{
	int error;

	if (!is_taken(zone, index) || !is_taken(zone, index + 1))
		return LLFREE_ERR_NOT_ALLOCATED;
	error = put_area(zone, index);
	return error ? error : put_area(zone, index + 1);
}

int llfree_put(struct llfree *zone, u64 frame, unsigned int order)
{
	int error = zone_check(zone, frame, order);

	if (unlikely(error))
		return error;
	if (order < LLFREE_HUGE_ORDER)
		return put_part(zone, frame_area(frame), frame % LLFREE_AREA_FRAMES, order);
	if (order == LLFREE_HUGE_ORDER)
		return put_area(zone, frame_area(frame));
	return put_pair(zone, frame_area(frame));
}

void llf_give_back(struct llfree *zone, u32 index, u16 claims)
{
	u16 seen = llf_load(&zone->areas[index]);

	while (claims && area_lacks(seen, claims)) {
		if (zone_replace(zone, index, &seen, seen + claims))
			return;
	}
}
