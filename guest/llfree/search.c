// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Finding a tree to take from, and the slots' reservations. */
#include "zone.h"

/* Trees of a cache line of the array. */
#define NEAR 16
/* Trees looked at before a free one is broken into. */
#define FAR 256
/* The core's part of the zone: there it meets no other core's lines. */
#define SHARE 1
#define ALL 0
#define FULL LLFREE_TREE_FRAMES

enum kinds { OWN, OWN_OR_FREE, ANY };

/* One way to look at trees; they are tried in turn. */
struct pass {
	/* ALL, SHARE, or of that the aligned group of so many that the last is in. */
	u32 reach;
	/* Least and most that a tree may have free. */
	u32 least;
	u32 most;
	enum kinds kinds;
	/* Even if another slot takes from it. */
	bool reserved;
	/* Even areas without memory. */
	bool evicted;
};

/*
 * Half-empty trees of the own kind first: full ones are nearly used up, empty
 * ones may become free as a whole.
 */
static const struct pass small[] = {
	{ .reach = NEAR, .least = FULL / 16, .most = FULL / 2, .kinds = OWN },
	{ .reach = NEAR, .least = FULL / 64, .most = FULL / 16 * 15, .kinds = OWN },
	{ .reach = FAR, .least = 1, .most = FULL - 1, .kinds = OWN },
	{ .reach = SHARE, .least = 1, .most = FULL, .kinds = OWN_OR_FREE },
	{ .reach = ALL, .least = 1, .most = FULL, .kinds = OWN_OR_FREE },
};

static const struct pass huge[] = {
	{ .reach = NEAR, .least = 1, .most = FULL, .kinds = OWN },
	{ .reach = SHARE, .least = 1, .most = FULL, .kinds = OWN_OR_FREE },
	{ .reach = ALL, .least = 1, .most = FULL, .kinds = OWN_OR_FREE },
};

/* Another kind's, then another slot's, then those whose memory the host has. */
static const struct pass steal[] = {
	{ .reach = ALL, .least = 1, .most = FULL, .kinds = ANY },
	{ .reach = ALL, .least = 1, .most = FULL, .kinds = ANY, .reserved = true },
	{ .reach = ALL, .least = 1, .most = FULL, .kinds = ANY, .reserved = true, .evicted = true },
};

#define PASSES(table) (sizeof(table) / sizeof((table)[0]))

static bool kind_fits(enum kinds kinds, u32 tree, u32 kind)
{
	switch (kinds) {
	case OWN:
		return tree_kind(tree) == kind && !tree_is_free(tree);
	case OWN_OR_FREE:
		return tree_kind(tree) == kind || tree_is_free(tree);
	default:
		return true;
	}
}

static bool fits(const struct pass *pass, u32 tree, struct want want)
{
	u32 free = tree_free(tree);

	return free >= pass->least && free >= 1u << want.order && free <= pass->most &&
	       (pass->reserved || !tree_is_reserved(tree)) &&
	       (pass->evicted || tree_evicted(tree) < LLFREE_TREE_AREAS) &&
	       kind_fits(pass->kinds, tree, want.kind);
}

static void release(struct llfree *zone, u32 index)
{
	u32 tree = llf_load(&zone->trees[index]);

	while (!llf_replace(&zone->trees[index], &tree, tree & ~LLFREE_TREE_RESERVED))
		;
}

static u64 first_row(u32 tree)
{
	return (u64)tree * LLFREE_TREE_AREAS * LLFREE_AREA_ROWS;
}

/* Reserves a tree if there is such a block in it. */
static bool grab_reserved(struct llfree *zone, u32 index, struct want want, struct grab *grab)
{
	u32 tree = llf_load(&zone->trees[index]);

	while (!llf_replace(&zone->trees[index], &tree, tree_reserve(tree, want.kind)))
		;
	if (llf_grab_in_tree(zone, index, first_row(index), want, grab))
		return true;
	if (!tree_is_reserved(tree))
		release(zone, index);
	return false;
}

/* Those after @from first, then around. */
static bool search_with(struct llfree *zone, const struct pass *pass, u32 from, struct want want,
			struct grab *grab)
{
	u32 start = 0, end = zone->tree_count;
	u32 step, index;

	if (pass->reach != ALL) {
		start = zone_home(zone, want.core);
		end = zone_home(zone, want.core + 1);
	}
	if (pass->reach > SHARE) {
		u32 group = from & ~(pass->reach - 1);

		start = group > start ? group : start;
		end = group + pass->reach < end ? group + pass->reach : end;
	}
	want.evicted = pass->evicted;
	index = from >= start && from < end ? from + 1 : start;
	for (step = start; step < end; step++, index++) {
		if (index == end)
			index = start;
		if (fits(pass, llf_peek(&zone->trees[index]), want) &&
		    grab_reserved(zone, index, want, grab))
			return true;
	}
	return false;
}

static bool search_each(struct llfree *zone, const struct pass *passes, size_t count, u32 from,
			struct want want, struct grab *grab)
{
	size_t index;

	for (index = 0; index < count; index++) {
		if (search_with(zone, &passes[index], from, want, grab))
			return true;
	}
	return false;
}

bool llf_search(struct llfree *zone, u32 from, struct want want, struct grab *grab)
{
	bool is_small = want.order < LLFREE_HUGE_ORDER;
	const struct pass *passes = is_small ? small : huge;
	size_t count = is_small ? PASSES(small) : PASSES(huge);
	u32 index;

	if (from >= zone->tree_count)
		from = zone->tree_count - 1;
	if (search_each(zone, passes, count, from, want, grab) ||
	    search_each(zone, steal, PASSES(steal), from, want, grab))
		return true;
	/* Claims hide frames, and a tree's count may be on its way. */
	llf_end_claims(zone, 0, zone->area_count - 1);
	want.evicted = true;
	for (index = 0; index < zone->tree_count; index++) {
		if (llf_grab_in_tree(zone, index, first_row(index), want, grab))
			return true;
	}
	return false;
}

void llf_place(struct llfree *zone, llf_u64 *slot, u64 seen, u64 next)
{
	bool placed = llf_replace(slot, &seen, next);
	u64 gone = placed ? seen : next;
	u64 kept = placed ? next : seen;

	if (!slot_is_present(gone))
		return;
	llf_give_back(zone, slot_area(gone), slot_claims(gone));
	if (!slot_is_present(kept) || slot_tree(kept) != slot_tree(gone))
		release(zone, slot_tree(gone));
}

static llf_u64 *nth_slot(struct llfree *zone, u32 index)
{
	return &zone->slots[index * LLFREE_SLOT_WORDS];
}

void llf_end_claims(struct llfree *zone, u32 first, u32 last)
{
	u32 index;

	for (index = 0; index < zone->cores * LLFREE_SLOT_KINDS; index++) {
		u64 seen = llf_load(nth_slot(zone, index));

		while (slot_claims(seen) && slot_area(seen) >= first && slot_area(seen) <= last) {
			if (!llf_replace(nth_slot(zone, index), &seen,
					 seen & ~LLFREE_SLOT_CLAIMS_MASK))
				continue;
			llf_give_back(zone, slot_area(seen), slot_claims(seen));
			break;
		}
	}
}

void llfree_drain(struct llfree *zone)
{
	u32 index;

	for (index = 0; index < zone->cores * LLFREE_SLOT_KINDS; index++) {
		u64 seen = llf_load(nth_slot(zone, index));

		while (seen) {
			if (!llf_replace(nth_slot(zone, index), &seen, 0))
				continue;
			llf_give_back(zone, slot_area(seen), slot_claims(seen));
			release(zone, slot_tree(seen));
			break;
		}
	}
}
