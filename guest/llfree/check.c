// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Built in user space under sanitizers (make check): random calls of one
 * thread against a plain array of what each frame is, then guests and a host
 * at once. The content of frames is plain memory, so that the thread sanitizer
 * finds a frame handed on without the order that its content needs.
 */
#include "zone.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define AREAS 18
#define FRAMES (AREAS * LLFREE_AREA_FRAMES + 300ull)
#define GUESTS 3
#define STEPS 200000
#define HELD 4096

#define check(condition)                                                              \
	do {                                                                          \
		if (!(condition)) {                                                   \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__,    \
				#condition);                                          \
			abort();                                                      \
		}                                                                     \
	} while (0)

struct block {
	u64 frame;
	unsigned int order;
};

enum reclaimed { INSTALLED, SOFT, HARD };

static struct llfree zone;
/* Whose a frame is, 0: nobody's; and what its owner has written there. */
static _Atomic(u32) owners[FRAMES];
static u64 content[FRAMES];
/* Of each area: whether a touch meets memory, and what the host knows. */
static _Atomic(u8) mapped[AREAS + 1];
static enum reclaimed reclaimed[AREAS + 1];
static pthread_mutex_t locks[AREAS + 1];
static atomic_bool done;

static u64 random_below(u64 *seed, u64 limit)
{
	*seed ^= *seed << 13;
	*seed ^= *seed >> 7;
	*seed ^= *seed << 17;
	return *seed % limit;
}

static unsigned int random_order(u64 *seed)
{
	static const u8 orders[] = { 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10 };

	return orders[random_below(seed, sizeof(orders))];
}

static void clear_evicted(u32 area)
{
	u16 seen = atomic_fetch_and(&zone.areas[area], (u16)~LLFREE_AREA_EVICTED);

	if (area_is_evicted(seen))
		atomic_fetch_sub(&zone.trees[area / LLFREE_TREE_AREAS],
				 1u << LLFREE_TREE_EVICTED_SHIFT);
}

/* Takes a free area: with A, or without. */
static bool reclaim_area(u32 area, bool hard)
{
	u16 seen = llf_load(&zone.areas[area]);
	u16 after;

	do {
		if (!area_is_free(seen))
			return false;
		after = seen | LLFREE_AREA_EVICTED;
		if (hard)
			after = (after & ~LLFREE_AREA_FREE_MASK) | LLFREE_AREA_ALLOCATED;
	} while (!zone_replace(&zone, area, &seen, after));
	if (!area_is_evicted(seen))
		atomic_fetch_add(&zone.trees[area / LLFREE_TREE_AREAS],
				 1u << LLFREE_TREE_EVICTED_SHIFT);
	return true;
}

static void return_area(u32 area)
{
	u16 seen = llf_load(&zone.areas[area]);

	check(area_is_allocated(seen) && area_is_evicted(seen));
	check(zone_replace(&zone, area, &seen,
			   (seen & ~LLFREE_AREA_ALLOCATED) | LLFREE_AREA_FRAMES));
}

/* The memory goes, and what was in it. */
static void empty(u32 area)
{
	u64 frame = (u64)area * LLFREE_AREA_FRAMES;
	u64 end = frame + LLFREE_AREA_FRAMES;

	for (; frame < end; frame++)
		content[frame] = 0;
}

static void soft_reclaim(u32 area)
{
	u16 seen;

	if (!reclaim_area(area, false))
		return;
	atomic_exchange(&mapped[area], false);
	seen = llf_load(&zone.areas[area]);
	if (area_is_free(seen) && area_is_evicted(seen)) {
		empty(area);
		reclaimed[area] = SOFT;
	} else {
		clear_evicted(area);
		atomic_exchange(&mapped[area], true);
	}
}

static void reclaim(u32 area, bool soft)
{
	pthread_mutex_lock(&locks[area]);
	if (reclaimed[area] == HARD) {
		return_area(area);
		reclaimed[area] = SOFT;
	} else if (soft && reclaimed[area] == INSTALLED) {
		soft_reclaim(area);
	} else if (reclaim_area(area, true)) {
		atomic_exchange(&mapped[area], false);
		empty(area);
		reclaimed[area] = HARD;
	}
	pthread_mutex_unlock(&locks[area]);
}

/* A fault: the host serves it when it has done what it was at. */
static void touch(void *context, u64 frame)
{
	u32 area = frame_area(frame);

	(void)context;
	check(llf_peek(&owners[frame]) == 0);
	if (atomic_fetch_or(&mapped[area], false))
		return;
	pthread_mutex_lock(&locks[area]);
	check(reclaimed[area] != HARD);
	if (reclaimed[area] == SOFT) {
		/* Memory first: who sees no flag does not touch. */
		atomic_store(&mapped[area], true);
		clear_evicted(area);
		reclaimed[area] = INSTALLED;
	}
	pthread_mutex_unlock(&locks[area]);
}

/* Orders nothing: that is for the allocator to do. */
static u32 swap_owner(u64 frame, u32 owner)
{
	return atomic_exchange_explicit(&owners[frame], owner, memory_order_relaxed);
}

static void take(struct block block, u32 owner)
{
	u64 frame;

	for (frame = block.frame; frame < block.frame + (1ull << block.order); frame++) {
		check(swap_owner(frame, owner) == 0);
		content[frame] = frame << 8 | owner;
	}
}

static void give(struct block block, u32 owner)
{
	u64 frame;

	for (frame = block.frame; frame < block.frame + (1ull << block.order); frame++) {
		check(content[frame] == (frame << 8 | owner));
		check(swap_owner(frame, 0) == owner);
	}
	check(llfree_put(&zone, block.frame, block.order) == 0);
}

/* One block of those held goes, or a half of it. */
static void put_one(struct block *held, u32 *count, u32 owner, u64 *seed)
{
	u32 index = random_below(seed, *count);
	struct block block = held[index];

	held[index] = held[--*count];
	if (block.order && random_below(seed, 4) == 0) {
		block.order--;
		held[(*count)++] = block;
		block.frame += 1ull << block.order;
	}
	give(block, owner);
}

static bool get_one(struct block *block, u32 owner, u64 *seed)
{
	s64 frame;

	block->order = random_order(seed);
	if (random_below(seed, 8) == 0) {
		block->frame = random_below(seed, FRAMES) >> block->order << block->order;
		return llfree_get_at(&zone, block->frame, block->order) == 0;
	}
	frame = llfree_get(&zone, block->order, random_below(seed, 2), owner);
	check(frame >= 0 || frame == LLFREE_ERR_MEMORY);
	block->frame = frame;
	return frame >= 0;
}

static void *guest(void *argument)
{
	u32 owner = (u32)(uintptr_t)argument;
	u64 seed = owner * 0x9e3779b9ull;
	struct block *held = calloc(HELD, sizeof(*held));
	u32 step, count = 0;

	check(held);
	for (step = 0; step < STEPS; step++) {
		if (count < HELD / 2 && random_below(&seed, 2) == 0) {
			if (get_one(&held[count], owner, &seed))
				take(held[count++], owner);
		} else if (count) {
			put_one(held, &count, owner, &seed);
		}
		if (random_below(&seed, 1024) == 0)
			llfree_drain(&zone);
	}
	while (count)
		give(held[--count], owner);
	free(held);
	return NULL;
}

static void *host(void *argument)
{
	u64 seed = 77;

	(void)argument;
	while (!atomic_load(&done))
		reclaim(random_below(&seed, AREAS), random_below(&seed, 2));
	return NULL;
}

static void check_free(u64 frames)
{
	u64 where;

	check(llfree_verify(&zone, &where) == 0);
	check(llfree_free_frames(&zone) == frames);
}

static bool all_are(u64 frame, unsigned int order, u32 owner)
{
	u64 end = frame + (1ull << order);

	for (; frame < end; frame++) {
		if (frame >= FRAMES || llf_peek(&owners[frame]) != owner)
			return false;
	}
	return true;
}

static u64 count_owned(u32 owner)
{
	u64 frame, count = 0;

	for (frame = 0; frame < FRAMES; frame++)
		count += llf_peek(&owners[frame]) == owner;
	return count;
}

static u64 frames_of(const struct llfree_summary *summary)
{
	u64 frames = 0;
	unsigned int order;

	for (order = 0; order <= LLFREE_MAX_ORDER; order++)
		frames += summary->blocks[order] << order;
	return frames;
}

/* What is looked at agrees with what is got. */
static void check_look(void)
{
	struct llfree_summary summary;
	unsigned int order;

	llfree_drain(&zone);
	llfree_summarize(&zone, &summary);
	check(summary.free == count_owned(0) && summary.claimed == 0);
	check(frames_of(&summary) == summary.free);
	check(summary.free_areas == llfree_free_areas(&zone));
	for (order = 0; order <= LLFREE_MAX_ORDER; order++) {
		bool has;
		s64 frame;

		/* Claims would hide blocks from the look. */
		llfree_drain(&zone);
		has = llfree_has(&zone, order, order);
		frame = llfree_get(&zone, order, 0, order);
		check(has == (frame >= 0));
		if (frame >= 0)
			check(llfree_put(&zone, frame, order) == 0);
	}
	llfree_drain(&zone);
}

/* One thread: each answer is foretold. */
static void check_alone(void)
{
	u64 frame, seed = 5;
	u32 step;

	for (step = 0; step < STEPS; step++) {
		struct block block = { .order = random_order(&seed) };
		bool was;

		if (random_below(&seed, 2)) {
			s64 got = llfree_get(&zone, block.order, step % 2, step);

			if (got < 0)
				continue;
			block.frame = got;
			check(all_are(got, block.order, 0));
			take(block, 1);
			continue;
		}
		block.frame = random_below(&seed, FRAMES) >> block.order << block.order;
		was = all_are(block.frame, block.order, 1);
		if (was)
			give(block, 1);
		else
			check(llfree_put(&zone, block.frame, block.order) < 0);
		check(llfree_put(&zone, block.frame, block.order) < 0);
		if (step % 4096 == 0) {
			check_free(count_owned(0));
			check_look();
		}
	}
	for (frame = 0; frame < FRAMES; frame++) {
		if (llf_peek(&owners[frame]))
			give((struct block){ .frame = frame }, 1);
	}
	check(llfree_put(&zone, FRAMES, 0) == LLFREE_ERR_FRAME);
	check(llfree_put(&zone, ~0ull, 3) == LLFREE_ERR_FRAME);
	check(llfree_get(&zone, 11, 0, 0) == LLFREE_ERR_ORDER);
	check(llfree_get_at(&zone, 1, 64) == LLFREE_ERR_ORDER);
	llfree_drain(&zone);
	check_free(FRAMES);
}

static void check_together(void)
{
	pthread_t guests[GUESTS], reclaimer;
	u64 index;

	atomic_store(&done, false);
	check(pthread_create(&reclaimer, NULL, host, NULL) == 0);
	for (index = 0; index < GUESTS; index++) {
		void *owner = (void *)(uintptr_t)(index + 1);

		check(pthread_create(&guests[index], NULL, guest, owner) == 0);
	}
	for (index = 0; index < GUESTS; index++)
		pthread_join(guests[index], NULL);
	atomic_store(&done, true);
	pthread_join(reclaimer, NULL);
	for (index = 0; index < AREAS; index++) {
		if (reclaimed[index] == HARD)
			return_area(index);
	}
	llfree_drain(&zone);
	check_free(FRAMES);
}

/* With slots for each guest, or with slots that all share. */
static void check_with(u32 cores)
{
	struct llfree_layout layout;
	void *region;

	check(llfree_layout(FRAMES, cores, &layout) == 0);
	/* To the byte, so that what is read or written beyond it shows. */
	region = aligned_alloc(64, layout.total);
	check(region);
	check(llfree_init(&zone, region, FRAMES, cores, touch, NULL) == 0);
	llfree_format(&zone, false);
	check_free(0);
	check(llfree_get(&zone, 0, 0, 0) == LLFREE_ERR_MEMORY);
	llfree_format(&zone, true);
	check_free(FRAMES);
	for (u32 area = 0; area <= AREAS; area++) {
		reclaimed[area] = INSTALLED;
		atomic_store(&mapped[area], true);
	}
	check_alone();
	check_together();
	free(region);
}

int main(void)
{
	for (u32 area = 0; area <= AREAS; area++)
		pthread_mutex_init(&locks[area], NULL);
	check_with(GUESTS);
	check_with(1);
	printf("%s: all of it holds\n", __FILE__);
	return 0;
}
