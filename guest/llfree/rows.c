// SPDX-License-Identifier: GPL-2.0 OR MIT
#include "rows.h"

/*
 * Who has a claim may meet others' claims before its own; each takes some
 * frame, so the rows are looked through again, but not for ever.
 */
#define ROUNDS 4

/* The first aligned run of 2^order set bits, or -1. */
static int first_run(u64 free, unsigned int order)
{
	/* Bit n of the mask for order o is set for n divisible by 2^o. */
	static const u64 starts[ROW_ORDER + 1] = {
		~0ull,
		0x5555555555555555ull,
		0x1111111111111111ull,
		0x0101010101010101ull,
		0x0001000100010001ull,
		0x0000000100000001ull,
		1,
	};
	unsigned int step;

	for (step = 0; step < order; step++)
		free &= free >> (1u << step);
	free &= starts[order];
	return free ? (int)llf_first_set(free) : -1;
}

static int take_run(llf_u64 *row, unsigned int order, u64 flip)
{
	u64 seen = llf_load(row);

	for (;;) {
		int bit = first_run(~(seen ^ flip), order);

		if (bit < 0 || llf_replace(row, &seen, seen ^ row_run(bit, order)))
			return bit;
	}
}

static bool take_rows_at(llf_u64 *rows, u32 first, u32 count, u64 flip)
{
	u32 taken;

	for (taken = 0; taken < count; taken++) {
		u64 free = flip;

		if (!llf_replace(&rows[first + taken], &free, ~flip))
			break;
	}
	if (taken == count)
		return true;
	/* They are ours whole, so nobody else changes them. */
	while (taken--)
		llf_store(&rows[first + taken], flip);
	return false;
}

static int take_rows(llf_u64 *rows, u32 count, u64 flip)
{
	u32 first;

	for (first = 0; first < LLFREE_AREA_ROWS; first += count) {
		if (take_rows_at(rows, first, count, flip))
			return first * LLFREE_ROW_FRAMES;
	}
	return -1;
}

int llf_rows_take(llf_u64 *rows, u32 start, unsigned int order, u64 flip)
{
	u32 steps = LLFREE_AREA_ROWS * (order ? 1 : ROUNDS);
	u32 step;

	if (order > ROW_ORDER)
		return take_rows(rows, 1u << (order - ROW_ORDER), flip);
	for (step = 0; step < steps; step++) {
		u32 row = (start + step) % LLFREE_AREA_ROWS;
		int bit = order ? take_run(&rows[row], order, flip) :
				  row_take(&rows[row], llf_load(&rows[row]), flip);

		if (bit >= 0)
			return row * LLFREE_ROW_FRAMES + bit;
	}
	return -1;
}

bool llf_rows_take_at(llf_u64 *rows, u32 first, unsigned int order, u64 flip)
{
	u32 row = first / LLFREE_ROW_FRAMES;
	u64 run, seen;

	if (order > ROW_ORDER)
		return take_rows_at(rows, row, 1u << (order - ROW_ORDER), flip);
	run = row_run(first, order);
	seen = llf_load(&rows[row]);
	while (((seen ^ flip) & run) == 0) {
		if (llf_replace(&rows[row], &seen, seen ^ run))
			return true;
	}
	return false;
}

u16 llf_rows_give_many(llf_u64 *rows, u32 first, unsigned int order, u64 flip)
{
	u32 row = first / LLFREE_ROW_FRAMES;
	u32 end = row + (1u << (order - ROW_ORDER));
	u16 freed = 0;

	if (!llf_rows_are(rows, first, order, flip, false))
		return 0;
	for (; row < end; row++) {
		u64 taken = ~flip;

		if (llf_replace(&rows[row], &taken, flip))
			freed += LLFREE_ROW_FRAMES;
		else if (!freed)
			/* Whoever is first at the first row frees the block. */
			return 0;
	}
	return freed;
}

bool llf_rows_are(llf_u64 *rows, u32 first, unsigned int order, u64 flip, bool free)
{
	u32 row = first / LLFREE_ROW_FRAMES;
	u64 run = order > ROW_ORDER ? ~0ull : row_run(first, order);
	u32 end = row + (order > ROW_ORDER ? 1u << (order - ROW_ORDER) : 1);

	for (; row < end; row++) {
		if (((llf_load(&rows[row]) ^ flip) & run) != (free ? 0 : run))
			return false;
	}
	return true;
}

bool llf_rows_have(llf_u64 *rows, unsigned int order, u64 flip)
{
	u32 first = 0;

	while (first < LLFREE_AREA_FRAMES) {
		if (order > ROW_ORDER ? llf_rows_are(rows, first, order, flip, true) :
		    first_run(~(llf_load(&rows[first / LLFREE_ROW_FRAMES]) ^ flip), order) >= 0)
			return true;
		first += order > ROW_ORDER ? 1u << order : LLFREE_ROW_FRAMES;
	}
	return false;
}

/* Of one row. */
static void count_runs(u64 free, u64 *blocks)
{
	unsigned int order = ROW_ORDER;

	while (free) {
		int bit = first_run(free, order);

		if (bit < 0) {
			order--;
			continue;
		}
		free &= ~row_run(bit, order);
		blocks[order]++;
	}
}

void llf_rows_count_blocks(llf_u64 *rows, u64 flip, u64 *blocks)
{
	u32 first = 0;

	while (first < LLFREE_AREA_FRAMES) {
		unsigned int order = first ? llf_first_set(first) : LLFREE_HUGE_ORDER;

		while (order > ROW_ORDER && !llf_rows_are(rows, first, order, flip, true))
			order--;
		if (order > ROW_ORDER)
			blocks[order]++;
		else
			count_runs(~(llf_load(&rows[first / LLFREE_ROW_FRAMES]) ^ flip), blocks);
		first += order > ROW_ORDER ? 1u << order : LLFREE_ROW_FRAMES;
	}
}

u32 llf_rows_count_free(llf_u64 *rows, u64 flip)
{
	u32 row, free = 0;

	for (row = 0; row < LLFREE_AREA_ROWS; row++)
		free += llf_count_set(~(llf_load(&rows[row]) ^ flip));
	return free;
}
