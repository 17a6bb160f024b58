// SPDX-License-Identifier: GPL-2.0 OR MIT
/* A zone: a range of frames and the words that tell which of them are free. */
#include "zone.h"

static int check_size(u64 frames, u32 cores)
{
	bool fits = frames && frames <= LLFREE_MAX_FRAMES && cores && cores <= LLFREE_MAX_CORES;

	return fits ? 0 : LLFREE_ERR_LAYOUT;
}

static u64 count_areas(u64 frames)
{
	return (frames + LLFREE_AREA_FRAMES - 1) / LLFREE_AREA_FRAMES;
}

static u64 count_trees(u64 frames)
{
	return (frames + LLFREE_TREE_FRAMES - 1) / LLFREE_TREE_FRAMES;
}

/* Arrays have cache lines of their own. */
static u64 lines(u64 bytes)
{
	return (bytes + 63) & ~63ull;
}

int llfree_layout(u64 frames, u32 cores, struct llfree_layout *layout)
{
	if (check_size(frames, cores))
		return LLFREE_ERR_LAYOUT;
	layout->bits = LLFREE_HEADER_WORDS * sizeof(llf_u64);
	layout->areas =
		layout->bits + count_areas(frames) * LLFREE_AREA_ROWS * sizeof(llf_u64);
	layout->trees = layout->areas + lines(count_areas(frames) * sizeof(llf_u16));
	layout->slots = layout->trees + lines(count_trees(frames) * sizeof(llf_u32));
	layout->total = layout->slots + (u64)cores * LLFREE_SLOT_KINDS * LLFREE_SLOT_WORDS *
						sizeof(llf_u64);
	return 0;
}

int llfree_write_header(llf_u64 *words, const struct llfree_header *header)
{
	u64 addresses = header->bits | header->areas | header->trees | header->slots;
	u32 index;

	if (check_size(header->frames, header->cores) || addresses % 64 ||
	    header->base_frame % LLFREE_ZONE_ALIGN_FRAMES || header->base_frame > LLFREE_MAX_FRAMES)
		return LLFREE_ERR_LAYOUT;
	for (index = 0; index < LLFREE_HEADER_WORDS; index++)
		llf_store(&words[index], 0);
	llf_store(&words[LLFREE_HEADER_VERSION_CORES], LLFREE_VERSION | (u64)header->cores << 32);
	llf_store(&words[LLFREE_HEADER_BASE_FRAME], header->base_frame);
	llf_store(&words[LLFREE_HEADER_FRAMES], header->frames);
	llf_store(&words[LLFREE_HEADER_BITS], header->bits);
	llf_store(&words[LLFREE_HEADER_AREAS], header->areas);
	llf_store(&words[LLFREE_HEADER_TREES], header->trees);
	llf_store(&words[LLFREE_HEADER_SLOTS], header->slots);
	/* Last: who finds it finds the rest. */
	llf_store(&words[LLFREE_HEADER_MAGIC], LLFREE_MAGIC);
	return 0;
}

int llfree_init(struct llfree *zone, void *region, u64 frames, u32 cores,
		void (*touch)(void *context, u64 frame), void *context)
{
	struct llfree_layout layout;
	char *start = region;

	if (llfree_layout(frames, cores, &layout))
		return LLFREE_ERR_LAYOUT;
	*zone = (struct llfree){
		.bits = (llf_u64 *)(start + layout.bits),
		.areas = (llf_u16 *)(start + layout.areas),
		.trees = (llf_u32 *)(start + layout.trees),
		.slots = (llf_u64 *)(start + layout.slots),
		.frames = frames,
		.cores = cores,
		.area_count = count_areas(frames),
		.tree_count = count_trees(frames),
		.touch = touch,
		.context = context,
	};
	return 0;
}

/* Frames that the last area lacks are allocated for ever. */
static u16 format_area(struct llfree *zone, u32 index, bool free)
{
	u64 frames = zone->frames - (u64)index * LLFREE_AREA_FRAMES;
	bool whole = frames >= LLFREE_AREA_FRAMES;
	u64 flip = free ? 0 : ~0ull;
	u32 row;

	for (row = 0; row < LLFREE_AREA_ROWS; row++) {
		u64 first = row * LLFREE_ROW_FRAMES;
		u64 bits = 0;

		if (free && frames <= first)
			bits = ~0ull;
		else if (free && frames < first + LLFREE_ROW_FRAMES)
			bits = ~0ull << (frames - first);
		llf_store(&zone_rows(zone, index)[row], bits);
	}
	if (free)
		return whole ? LLFREE_AREA_FRAMES : frames;
	return (flip & LLFREE_AREA_INVERTED) | (whole ? LLFREE_AREA_ALLOCATED : 0);
}

void llfree_format(struct llfree *zone, bool free)
{
	u32 index;

	for (index = 0; index < zone->tree_count; index++)
		llf_store(&zone->trees[index], 0);
	for (index = 0; index < zone->cores * LLFREE_SLOT_KINDS; index++)
		llf_store(&zone->slots[index * LLFREE_SLOT_WORDS], 0);
	for (index = 0; index < zone->area_count; index++) {
		u16 area = format_area(zone, index, free);

		llf_store(&zone->areas[index], area);
		zone_count(zone, index, llf_peek(&zone->trees[index / LLFREE_TREE_AREAS]), 0,
			   area);
	}
}

bool llfree_is_free(struct llfree *zone, u64 frame, unsigned int order)
{
	u32 index = frame_area(frame);
	u32 last = order > LLFREE_HUGE_ORDER ? index + 1 : index;
	unsigned int within = order > LLFREE_HUGE_ORDER ? LLFREE_HUGE_ORDER : order;

	if (zone_check(zone, frame, order))
		return false;
	for (; index <= last; index++) {
		u16 area = llf_load(&zone->areas[index]);

		if (area_is_allocated(area) ||
		    !llf_rows_are(zone_rows(zone, index), frame % LLFREE_AREA_FRAMES, within,
				  area_flip(area), true))
			return false;
	}
	return true;
}

/* Of slots on this area. */
static u32 claims_on(struct llfree *zone, u32 area)
{
	u32 index, claims = 0;

	for (index = 0; index < zone->cores * LLFREE_SLOT_KINDS; index++) {
		u64 slot = llf_load(&zone->slots[index * LLFREE_SLOT_WORDS]);

		if (slot_area(slot) == area)
			claims += slot_claims(slot);
	}
	return claims;
}

u64 llfree_free_frames(struct llfree *zone)
{
	u64 free = 0;
	u32 index;

	for (index = 0; index < zone->area_count; index++)
		free += area_free(llf_load(&zone->areas[index]));
	for (index = 0; index < zone->cores * LLFREE_SLOT_KINDS; index++)
		free += slot_claims(llf_load(&zone->slots[index * LLFREE_SLOT_WORDS]));
	return free;
}

u64 llfree_free_areas(struct llfree *zone)
{
	u64 free = 0;
	u32 index;

	for (index = 0; index < zone->area_count; index++)
		free += area_is_free(llf_load(&zone->areas[index]));
	return free;
}

static bool area_agrees(struct llfree *zone, u32 index)
{
	u16 area = llf_load(&zone->areas[index]);
	u32 bits = llf_rows_count_free(zone_rows(zone, index), area_flip(area));
	u32 counted = area_free(area) + claims_on(zone, index);

	/* A hard-reclaimed one has free bits, though none may be got. */
	if (area_is_allocated(area) && area_is_evicted(area) && bits == LLFREE_AREA_FRAMES)
		return counted == 0;
	return counted == bits;
}

static bool tree_agrees(struct llfree *zone, u32 index)
{
	u32 area = index * LLFREE_TREE_AREAS;
	u32 end = area + LLFREE_TREE_AREAS;
	u32 tree = llf_load(&zone->trees[index]);
	u32 free = 0, evicted = 0;

	for (; area < end && area < zone->area_count; area++) {
		free += area_steps(llf_load(&zone->areas[area]));
		evicted += area_is_evicted(llf_load(&zone->areas[area]));
	}
	return tree_free(tree) == free && tree_evicted(tree) == evicted;
}

int llfree_verify(struct llfree *zone, u64 *where)
{
	u32 index;

	for (index = 0; index < zone->area_count; index++) {
		*where = index;
		if (!area_agrees(zone, index))
			return LLFREE_ERR_DISAGREE;
	}
	for (index = 0; index < zone->tree_count; index++) {
		*where = index;
		if (!tree_agrees(zone, index))
			return LLFREE_ERR_DISAGREE;
	}
	return 0;
}
