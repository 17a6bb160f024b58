// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Finding a tree to take from, and the slots' reservations. */
#include "fullest.h"
#include "zone.h"

/* Trees looked at before an area is broken into that is free: 16 cache lines. */
#define NEAR_TREES 256
/*
 * Trees looked at before a huge frame takes from a tree that is free as a
 * whole: 2 cache lines. A tree has huge frames for no more than eight gets.
 */
#define NEAR_TREES_HUGE 32
/* So many free blocks are enough to move to a tree, and so are an area's frames. */
#define ENOUGH_BLOCKS LLFREE_CLAIM_FRAMES

/*
 * The aligned group of trees around the slot's, of the core's share; the share,
 * where no other core's lines are, or all that cores share; all.
 */
enum reach { NEAR, SHARE, ALL };

/* OWN: those in which enough is free for the slot to move there. */
enum kinds { OWN, OWN_OR_FREE, ANY };

/* One way to look at trees; they are tried in turn. */
struct pass {
	enum reach reach;
	enum kinds kinds;
	/* Only areas that are free in part; the fullest trees come first then. */
	bool parts;
	/* Even if another slot takes from it. */
	bool reserved;
};

/* What is partly used before what is free as a whole, areas as well as trees. */
static const struct pass own[] = {
	{ .reach = NEAR, .kinds = OWN, .parts = true },
	{ .reach = SHARE, .kinds = OWN },
	{ .reach = SHARE, .kinds = OWN_OR_FREE },
	{ .reach = ALL, .kinds = OWN_OR_FREE },
};

/* A huge frame has no use for an area that is free in part. */
static const struct pass own_huge[] = {
	{ .reach = NEAR, .kinds = OWN },
	{ .reach = SHARE, .kinds = OWN_OR_FREE },
	{ .reach = ALL, .kinds = OWN_OR_FREE },
};

/* Another kind's, then another slot's. */
static const struct pass steal[] = {
	{ .reach = ALL, .kinds = ANY },
	{ .reach = ALL, .kinds = ANY, .reserved = true },
};

#define PASSES(table) (sizeof(table) / sizeof((table)[0]))

/* Free frames that a tree must have. */
static u32 least(const struct pass *pass, unsigned int order)
{
	u32 enough = ENOUGH_BLOCKS << order;

	if (pass->kinds != OWN)
		return 1u << order;
	if (enough > LLFREE_AREA_FRAMES)
		enough = LLFREE_AREA_FRAMES;
	return enough > 1u << order ? enough : 1u << order;
}

static bool kind_fits(enum kinds kinds, u32 tree, bool is_own)
{
	switch (kinds) {
	case OWN:
		return is_own && !tree_is_free(tree);
	case OWN_OR_FREE:
		return is_own || tree_is_free(tree);
	default:
		return true;
	}
}

/* How many frames of a tree are free, if it fits; or 0. */
static u32 fits(const struct llfree *zone, const struct pass *pass, u32 index, struct want want)
{
	u32 tree = llf_peek(&zone->trees[index]);
	u32 free = tree_free(tree);
	bool is_own, is_ours;

	if (free < least(pass, want.order))
		return 0;
	is_own = tree_kind(tree) == want.kind;
	/* Where all cores share the slots, there is one for each kind. */
	is_ours = is_own && (zone->cores == 1 || index == want.tree);
	if (!kind_fits(pass->kinds, tree, is_own))
		return 0;
	/* The parts of the slot's own tree were tried before. */
	if (pass->parts && (index == want.tree || !tree_has_part(tree)))
		return 0;
	if (!pass->reserved && !is_ours && tree_is_reserved(tree))
		return 0;
	return want.evicted || tree_evicted(tree) < LLFREE_TREE_AREAS ? free : 0;
}

static void release(struct llfree *zone, u32 index)
{
	u32 tree = llf_load(&zone->trees[index]);

	while (!llf_replace(&zone->trees[index], &tree, tree & ~LLFREE_TREE_RESERVED))
		;
}

/* Reserves a tree if there is such a block in it. */
static bool grab_reserved(struct llfree *zone, u32 index, struct want want, struct grab *grab)
{
	u32 tree = llf_load(&zone->trees[index]);

	while (!llf_replace(&zone->trees[index], &tree, tree_reserve(tree, want.kind)))
		;
	if (llf_grab_in_tree(zone, index, want, grab))
		return true;
	if (!tree_is_reserved(tree))
		release(zone, index);
	return false;
}

/* The trees that a pass looks at, from *start up to *end. */
static void bounds(const struct llfree *zone, enum reach reach, struct want want, u32 *start,
		   u32 *end)
{
	u32 near = want.order < LLFREE_HUGE_ORDER ? NEAR_TREES : NEAR_TREES_HUGE;
	u32 group = want.tree & ~(near - 1);

	*start = reach == ALL ? 0 : zone_home(zone, want.core);
	*end = reach == ALL ? zone->tree_count : zone_home(zone, want.core + 1);
	if (reach != NEAR)
		return;
	if (group > *start)
		*start = group;
	if (group + near < *end)
		*end = group + near;
}

/* The slot's tree first, then those after it, and around. */
static bool search_with(struct llfree *zone, const struct pass *pass, struct want want,
			struct grab *grab)
{
	struct fullest fullest = { .count = 0 };
	u32 start, end, step, index;

	bounds(zone, pass->reach, want, &start, &end);
	want.whole = !pass->parts;
	index = want.tree >= start && want.tree < end ? want.tree : start;
	for (step = start; step < end; step++, index++) {
		u32 free;

		if (index == end)
			index = start;
		free = fits(zone, pass, index, want);
		if (free && pass->parts)
			fullest_add(&fullest, free, index);
		else if (free && grab_reserved(zone, index, want, grab))
			return true;
	}
	for (index = 0; index < fullest.count; index++) {
		if (grab_reserved(zone, fullest.index[index], want, grab))
			return true;
	}
	return false;
}

static bool search_each(struct llfree *zone, const struct pass *passes, size_t count,
			bool evicted, struct want want, struct grab *grab)
{
	size_t index;

	want.evicted = evicted;
	for (index = 0; index < count; index++) {
		if (search_with(zone, &passes[index], want, grab))
			return true;
	}
	return false;
}

bool llf_search(struct llfree *zone, struct want want, struct grab *grab)
{
	bool is_huge = want.order >= LLFREE_HUGE_ORDER;
	const struct pass *first = is_huge ? own_huge : own;
	size_t count = is_huge ? PASSES(own_huge) : PASSES(own);
	u32 index;

	if (want.tree >= zone->tree_count)
		want.tree = zone->tree_count - 1;
	/* Areas without memory before other kinds: mixed trees rarely become free. */
	if (search_each(zone, first, count, false, want, grab) ||
	    search_each(zone, first, count, true, want, grab) ||
	    search_each(zone, steal, PASSES(steal), false, want, grab) ||
	    search_each(zone, steal + 1, PASSES(steal) - 1, true, want, grab))
		return true;
	/* Claims hide frames, and a tree's count may be on its way. */
	llf_end_claims(zone, 0, zone->area_count - 1);
	want.whole = true;
	want.evicted = true;
	for (index = 0; index < zone->tree_count; index++) {
		if (llf_grab_in_tree(zone, index, want, grab))
			return true;
	}
	return false;
}

void llf_place(struct llfree *zone, llf_u64 *slot, u64 seen, u64 next)
{
	if (llf_replace(slot, &seen, next))
		llf_leave(zone, seen, next);
	else
		llf_leave(zone, next, seen);
}

void llf_leave(struct llfree *zone, u64 gone, u64 kept)
{
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
			llf_leave(zone, seen, 0);
			break;
		}
	}
}
