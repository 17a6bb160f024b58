/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "content.h"
#include "frames.h"
#include "interrupts.h"

#define WORDS (PAGE_BYTES / 8)
#define HELD_MAX 4096
#define LOOP_HELD 48

struct held {
	u64 number;
	u32 order;
};

static struct held held[HELD_MAX];
static u64 held_count;
/* What the loop holds. */
static struct held loop_held[LOOP_HELD];
static u32 loop_count;
static u64 last_stamp;

/* What belongs into the word at this address of a frame with this stamp. */
static inline u64 pattern(u64 address, u64 stamp)
{
	return ((address ^ stamp << 40) * 0x9e3779b97f4a7c15ull) | 1;
}

/* Looks at a frame of a block that was free: it has kept all, or is empty. */
static void look_at_free(u64 number, struct found *found)
{
	const u64 *words = at_physical(number * PAGE_BYTES);
	u64 stamp = frame_at(number)->stamp;
	u32 kept = 0, zero = 0;

	if (!stamp)
		return;
	for (u32 i = 0; i < WORDS; i++) {
		kept += words[i] == pattern(number * PAGE_BYTES + i * 8, stamp);
		zero += words[i] == 0;
	}
	if (zero == WORDS)
		found->zeroed++;
	else
		found->wrong += WORDS - (kept > zero ? kept : zero);
}

static void fill(u64 number, u64 stamp)
{
	u64 *words = at_physical(number * PAGE_BYTES);

	frame_at(number)->stamp = stamp;
	for (u32 i = 0; i < WORDS; i++)
		words[i] = pattern(number * PAGE_BYTES + i * 8, stamp);
}

static u64 wrong_in_frame(u64 number)
{
	const u64 *words = at_physical(number * PAGE_BYTES);
	u64 stamp = frame_at(number)->stamp, wrong = 0;

	for (u32 i = 0; i < WORDS; i++)
		wrong += words[i] != pattern(number * PAGE_BYTES + i * 8, stamp);
	return wrong;
}

static u64 wrong_in_block(struct held block)
{
	u64 wrong = 0;

	for (u64 i = 0; i < 1ull << block.order; i++)
		wrong += wrong_in_frame(block.number + i);
	return wrong;
}

/* Takes a block, looks at what it contains, and fills it. Returns false if there is none. */
static bool take(u32 order, struct held *block, struct found *found)
{
	u64 number = block_take(order);

	if (!number)
		return false;
	last_stamp++;
	for (u64 i = 0; i < 1ull << order; i++) {
		look_at_free(number + i, found);
		fill(number + i, last_stamp);
	}
	found->blocks++;
	*block = (struct held){ number, order };
	return true;
}

struct found content_take(u64 count)
{
	struct found found = { 0 };

	while (found.blocks < count && held_count < HELD_MAX) {
		if (!take(GREATEST_ORDER, &held[held_count], &found))
			break;
		held_count++;
	}
	return found;
}

struct found content_check(void)
{
	struct found found = { .blocks = held_count + loop_count };

	for (u64 i = 0; i < held_count; i++)
		found.wrong += wrong_in_block(held[i]);
	for (u32 i = 0; i < loop_count; i++)
		found.wrong += wrong_in_block(loop_held[i]);
	return found;
}

u64 content_give(u64 count)
{
	u64 given = 0;

	for (; given < count && held_count; given++) {
		held_count--;
		block_free(held[held_count].number, held[held_count].order);
	}
	return given;
}

struct found content_loop(u64 seconds)
{
	struct found found = { 0 };
	u64 end = ticks + seconds * TICKS_PER_SECOND;

	while (ticks < end) {
		u64 random = random_number();
		u32 order = (random >> 8) % (GREATEST_ORDER + 1);

		if ((random & 1 || !loop_count) && loop_count < LOOP_HELD &&
		    take(order, &loop_held[loop_count], &found)) {
			loop_count++;
		} else if (loop_count) {
			struct held *block = &loop_held[(random >> 16) % loop_count];

			found.wrong += wrong_in_block(*block);
			block_free(block->number, block->order);
			*block = loop_held[--loop_count];
		}
	}
	return found;
}

void content_tidy(void)
{
	while (loop_count) {
		struct held block = loop_held[--loop_count];

		block_free(block.number, block.order);
	}
}
