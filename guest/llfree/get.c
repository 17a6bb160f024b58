// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Taking blocks. */
#include "fullest.h"
#include "zone.h"

/* Whether a part of an area will do. */
static __always_inline bool may_take(u16 area, struct want want)
{
	return (want.whole || !area_is_free(area)) && (want.evicted || !area_is_evicted(area));
}

/* Less than an area: the count first, which is a claim; then the bits. */
static bool grab_part(struct llfree *zone, u32 index, u32 row, struct want want, struct grab *grab)
{
	u16 area = llf_load(&zone->areas[index]);
	u16 frames = 1u << want.order;
	u16 claims;
	int first;

	do {
		if (!area_has(area, frames) || !may_take(area, want))
			return false;
		claims = frames;
		if (want.order == 0)
			claims = area_free(area) < LLFREE_CLAIM_FRAMES ? area_free(area) :
									 LLFREE_CLAIM_FRAMES;
	} while (!zone_replace(zone, index, &area, area - claims));
	first = llf_rows_take(zone_rows(zone, index), row, want.order, area_flip(area));
	if (first < 0) {
		llf_give_back(zone, index, claims);
		return false;
	}
	grab->frame = (u64)index * LLFREE_AREA_FRAMES + first;
	grab->area = area;
	grab->claims = claims - frames;
	return true;
}

static __always_inline bool grab_area(struct llfree *zone, u32 index, struct want want,
				      struct grab *grab)
{
	u16 area = llf_load(&zone->areas[index]);

	do {
		if (!area_is_free(area) || (area_is_evicted(area) && !want.evicted))
			return false;
	} while (!zone_replace(zone, index, &area, area_taken(area)));
	grab->frame = (u64)index * LLFREE_AREA_FRAMES;
	grab->area = area;
	grab->claims = 0;
	return true;
}

static void give_area_back(struct llfree *zone, u32 index)
{
	u16 area = llf_load(&zone->areas[index]);

	while (area_is_allocated(area)) {
		if (zone_replace(zone, index, &area, area_given_back(area)))
			return;
	}
}

/* Two areas, the second of which may turn out not to be free. */
static bool grab_pair(struct llfree *zone, u32 index, struct want want, struct grab *grab)
{
	struct grab second;

	if (index + 1 >= zone->area_count || !area_is_free(llf_load(&zone->areas[index + 1])))
		return false;
	if (!grab_area(zone, index, want, grab))
		return false;
	if (!grab_area(zone, index + 1, want, &second)) {
		give_area_back(zone, index);
		return false;
	}
	grab->area |= second.area & LLFREE_AREA_EVICTED;
	return true;
}

/* The fullest areas first, so that the others may become free as a whole. */
static bool grab_small(struct llfree *zone, u32 first, u32 end, struct want want,
		       struct grab *grab)
{
	struct fullest fullest = { .count = 0 };
	u32 index;

	for (index = first; index < end; index++) {
		u16 area = llf_load(&zone->areas[index]);

		if (area_has(area, 1u << want.order) && may_take(area, want))
			fullest_add(&fullest, area_free(area), index);
	}
	for (index = 0; index < fullest.count; index++) {
		if (grab_part(zone, fullest.index[index], 0, want, grab))
			return true;
	}
	return false;
}

bool llf_grab_in_tree(struct llfree *zone, u32 index, struct want want, struct grab *grab)
{
	u32 area = index * LLFREE_TREE_AREAS;
	u32 end = area + LLFREE_TREE_AREAS;

	if (end > zone->area_count)
		end = zone->area_count;
	if (want.order < LLFREE_HUGE_ORDER)
		return grab_small(zone, area, end, want, grab);
	for (; area < end; area += want.order == LLFREE_HUGE_ORDER ? 1 : 2) {
		if (want.order == LLFREE_HUGE_ORDER ? grab_area(zone, area, want, grab) :
						      grab_pair(zone, area, want, grab))
			return true;
	}
	return false;
}

/*
 * Where a slot is: of its area, even if that is free as a whole by now, or else
 * of its tree.
 */
static __always_inline bool grab_at(struct llfree *zone, u64 slot, struct want want,
				    struct grab *grab)
{
	struct want any = want;

	if (!slot_is_present(slot))
		return false;
	any.whole = true;
	if (want.order < LLFREE_HUGE_ORDER &&
	    grab_part(zone, slot_area(slot), slot_row(slot) % LLFREE_AREA_ROWS, any, grab))
		return true;
	return llf_grab_in_tree(zone, slot_tree(slot), want, grab);
}

/*
 * Has the host put memory behind a block whose area was without. After the
 * area's change, so that the host sees the one or the guest meets the other.
 */
static __always_inline void install(struct llfree *zone, u64 frame, unsigned int order, u16 area)
{
	if (likely(!area_is_evicted(area)) || !zone->touch)
		return;
	zone->touch(zone->context, frame);
	if (order > LLFREE_HUGE_ORDER)
		zone->touch(zone->context, frame + LLFREE_AREA_FRAMES);
}

/* Of the rows from @row on, around; @row when none has room. */
static __always_inline u32 first_with_room(llf_u64 *rows, u32 row, u64 flip)
{
	u32 step;

	for (step = 0; step < LLFREE_AREA_ROWS && llf_peek(&rows[row]) == ~flip; step++)
		row = (row + 1) % LLFREE_AREA_ROWS;
	return row;
}

/*
 * Of frames that the slot has claimed: no word is written but the slot and the
 * row. The frame, or LLFREE_ERR_MEMORY.
 */
static __always_inline s64 get_claimed(struct llfree *zone, llf_u64 *slot)
{
	u64 seen = llf_load(slot);

	while (likely(slot_claims(seen))) {
		u32 index = slot_area(seen);
		llf_u64 *rows = zone_rows(zone, index);
		u64 flip = slot_flip(seen);
		u32 row = first_with_room(rows, slot_row(seen) % LLFREE_AREA_ROWS, flip);
		u64 bits = llf_load(&rows[row]);
		u64 next = slot_at_row(seen - 1, (u64)index * LLFREE_AREA_ROWS + row);
		int first;

		if (unlikely(!llf_replace(slot, &seen, next)))
			continue;
		first = row_take(&rows[row], bits, flip);
		if (likely(first >= 0)) {
			first += row * LLFREE_ROW_FRAMES;
		} else {
			first = llf_rows_take(rows, row, 0, flip);
			if (first < 0) {
				llf_give_back(zone, index, 1);
				break;
			}
		}
		return (u64)index * LLFREE_AREA_FRAMES + first;
	}
	return LLFREE_ERR_MEMORY;
}

static noinline s64 get_block(struct llfree *zone, llf_u64 *slot, struct want want)
{
	u64 seen = llf_load(slot);
	struct grab grab;
	bool moves;
	u64 next;

	want.tree = slot_is_present(seen) ? slot_tree(seen) : zone_home(zone, want.core);
	if (!grab_at(zone, seen, want, &grab) && !llf_search(zone, want, &grab))
		return LLFREE_ERR_MEMORY;
	/* Before others may take of the claims: they do not touch. */
	install(zone, grab.frame, want.order, grab.area);
	next = slot_new(grab.frame / LLFREE_ROW_FRAMES, grab.claims, grab.area);
	moves = !slot_is_present(seen) || frame_tree(grab.frame) != want.tree;
	/* Claims outlast a greater block that has no room beside them. */
	if (want.order == 0 || (moves && !slot_claims(seen)))
		llf_place(zone, slot, seen, next);
	else if (moves)
		llf_leave(zone, next, llf_load(slot));
	return grab.frame;
}

s64 llfree_get(struct llfree *zone, unsigned int order, unsigned int kind, unsigned int core)
{
	struct want want = { .order = order, .kind = kind ? LLFREE_KIND_MOVABLE : 0 };
	llf_u64 *slot;
	s64 frame;

	if (unlikely(order > LLFREE_MAX_ORDER))
		return LLFREE_ERR_ORDER;
	want.core = zone_core(zone, core);
	if (order >= LLFREE_HUGE_ORDER)
		want.kind = LLFREE_KIND_HUGE;
	slot = zone_slot(zone, want.core, want.kind);
	if (order == 0) {
		frame = get_claimed(zone, slot);
		if (likely(frame >= 0))
			return frame;
	}
	return get_block(zone, slot, want);
}

/* Whether the block was free; its area as it was before. */
static bool take_at(struct llfree *zone, u64 frame, unsigned int order, struct grab *grab)
{
	struct want want = { .order = order, .evicted = true };
	u32 index = frame_area(frame);
	u16 frames = 1u << order;

	if (order == LLFREE_HUGE_ORDER)
		return grab_area(zone, index, want, grab);
	if (order > LLFREE_HUGE_ORDER)
		return grab_pair(zone, index, want, grab);
	grab->area = llf_load(&zone->areas[index]);
	do {
		if (!area_has(grab->area, frames))
			return false;
	} while (!zone_replace(zone, index, &grab->area, grab->area - frames));
	if (llf_rows_take_at(zone_rows(zone, index), frame % LLFREE_AREA_FRAMES, order,
			     area_flip(grab->area)))
		return true;
	llf_give_back(zone, index, frames);
	return false;
}

int llfree_get_at(struct llfree *zone, u64 frame, unsigned int order)
{
	int error = zone_check(zone, frame, order);
	u32 index = frame_area(frame);
	struct grab grab;

	if (error)
		return error;
	if (!take_at(zone, frame, order, &grab)) {
		/* Slots may have claims on just these frames. */
		llf_end_claims(zone, index, order > LLFREE_HUGE_ORDER ? index + 1 : index);
		if (!take_at(zone, frame, order, &grab))
			return LLFREE_ERR_TAKEN;
	}
	install(zone, frame, order, grab.area);
	return 0;
}
