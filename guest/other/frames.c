/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "frames.h"

struct frames frames[RANGES_MAX];
static u32 heads[GREATEST_ORDER + 1];
static u64 counts[GREATEST_ORDER + 1];

struct frame *frame_at(u64 number)
{
	for (u32 i = 0; i < ram_count; i++) {
		if (number >= frames[i].first && number < frames[i].end)
			return &frames[i].metadata[number - frames[i].first];
	}
	return NULL;
}

/* Makes a block free. What the host reads is written last. */
static void link(u64 number, u32 order)
{
	struct frame *frame = frame_at(number);

	frame->size_log = order + SIZE_LOG_OF_FRAME;
	frame->previous = 0;
	frame->next = heads[order];
	if (frame->next)
		frame_at(frame->next)->previous = number;
	heads[order] = number;
	counts[order]++;
	*(volatile u16 *)&frame->kind = KIND_FREE;
}

/* Takes a block off its list. What brings its memory back is written first. */
static void unlink(u64 number, u32 order, enum kind kind)
{
	struct frame *frame = frame_at(number);

	*(volatile u16 *)&frame->kind = kind;
	if (frame->previous)
		frame_at(frame->previous)->next = frame->next;
	else
		heads[order] = frame->next;
	if (frame->next)
		frame_at(frame->next)->previous = frame->previous;
	frame->next = 0;
	frame->previous = 0;
	counts[order]--;
}

u64 block_take(u32 order)
{
	u32 found = order;
	u64 number;

	while (found <= GREATEST_ORDER && !heads[found])
		found++;
	if (found > GREATEST_ORDER)
		return 0;
	number = heads[found];
	unlink(number, found, KIND_USED);
	while (found > order) {
		found--;
		link(number + (1ull << found), found);
	}
	frame_at(number)->size_log = order + SIZE_LOG_OF_FRAME;
	asm volatile("" : : : "memory");
	return number;
}

void block_free(u64 number, u32 order)
{
	frame_at(number)->kind = KIND_INNER;
	for (; order < GREATEST_ORDER; order++) {
		u64 buddy = number ^ 1ull << order;
		struct frame *frame = frame_at(buddy);

		if (!frame || frame->kind != KIND_FREE ||
		    frame->size_log != order + SIZE_LOG_OF_FRAME)
			break;
		unlink(buddy, order, KIND_INNER);
		number &= ~(1ull << order);
	}
	link(number, order);
}

u64 blocks_free(u32 order)
{
	return counts[order];
}

static void free_all(u64 first, u64 end)
{
	while (first < end) {
		u32 order = 0;

		while (order < GREATEST_ORDER && !(first & 1ull << order) &&
		       first + (2ull << order) <= end)
			order++;
		block_free(first, order);
		first += 1ull << order;
	}
}

void frames_start(void)
{
	for (u32 i = 0; i < ram_count; i++) {
		u64 bytes = (ram[i].end - ram[i].first) * FRAME_BYTES;
		u64 physical = i ? ram[i].first * PAGE_BYTES : take_early(bytes);

		frames[i] = (struct frames){
			ram[i].first, ram[i].end, physical, at_physical(physical)
		};
		memset(frames[i].metadata, 0, bytes);
	}
	for (u32 i = 0; i < ram_count; i++) {
		u64 bytes = (ram[i].end - ram[i].first) * FRAME_BYTES;
		u64 used = i ? ram[i].first + (bytes + PAGE_BYTES - 1) / PAGE_BYTES : early_end();

		for (u64 number = ram[i].first; number < ram[i].end; number++) {
			frame_at(number)->range = i;
			if (number < used)
				frame_at(number)->kind = KIND_KERNEL;
		}
		free_all(used, ram[i].end);
	}
}
