/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * The bit field of one area: eight rows of 64 frames. A row XOR @flip
 * (area_flip()) has a set bit for each allocated frame. It cannot change while
 * somebody has a claim on a frame of the area, or a frame.
 */
#ifndef LLFREE_ROWS_H
#define LLFREE_ROWS_H

#include "words.h"

#define ROW_ORDER 6

/* 2^order bits from bit @first on, all of one row. */
static __always_inline u64 row_run(u32 first, unsigned int order)
{
	return ~0ull >> (LLFREE_ROW_FRAMES - (1u << order)) << (first % LLFREE_ROW_FRAMES);
}

/* Takes the first free frame of a row; its bit, or -1. */
static __always_inline int row_take(llf_u64 *row, u64 seen, u64 flip)
{
	while ((seen ^ flip) != ~0ull) {
		u32 bit = llf_first_set(~(seen ^ flip));

		if (llf_replace(row, &seen, seen ^ 1ull << bit))
			return bit;
	}
	return -1;
}

/*
 * Takes an aligned block of order 0 to 9, beginning at row @start; its first
 * frame in the area, or -1.
 */
int llf_rows_take(llf_u64 *rows, u32 start, unsigned int order, u64 flip);

/* Takes the block that begins at frame @first of the area; orders 0 to 8. */
bool llf_rows_take_at(llf_u64 *rows, u32 first, unsigned int order, u64 flip);

/* As llf_rows_give(), for orders 7 to 9. */
u16 llf_rows_give_many(llf_u64 *rows, u32 first, unsigned int order, u64 flip);

/* Whether all frames of a block are free, or allocated; orders 0 to 9. */
bool llf_rows_are(llf_u64 *rows, u32 first, unsigned int order, u64 flip, bool free);

/* Whether a block of this order is free in the area; orders 0 to 9. */
bool llf_rows_have(llf_u64 *rows, unsigned int order, u64 flip);

/*
 * Adds to blocks[n] the free blocks of order n, none of which is part of a
 * greater one; orders 0 to 9.
 */
void llf_rows_count_blocks(llf_u64 *rows, u64 flip, u64 *blocks);

/* How many frames are free. */
u32 llf_rows_count_free(llf_u64 *rows, u64 flip);

/*
 * Frees the block that begins at frame @first of the area; orders 0 to 9. The
 * frames freed: all, or none, or, when somebody frees parts of the same block
 * at the same time, those that we were the first to free.
 */
static __always_inline u16 llf_rows_give(llf_u64 *rows, u32 first, unsigned int order, u64 flip)
{
	llf_u64 *row = &rows[first / LLFREE_ROW_FRAMES];
	u64 run, seen;

	if (unlikely(order > ROW_ORDER))
		return llf_rows_give_many(rows, first, order, flip);
	run = row_run(first, order);
	seen = llf_load(row);
	while (((seen ^ flip) & run) == run) {
		if (llf_replace(row, &seen, seen ^ run))
			return 1u << order;
	}
	return 0;
}

#endif /* LLFREE_ROWS_H */
