/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Page metadata, and the allocator of blocks. */
#ifndef OTHER_FRAMES_H
#define OTHER_FRAMES_H

#include "machine.h"
#include "memory.h"

#if FRAME_BYTES == 40
#define GREATEST_ORDER 10
#elif FRAME_BYTES == 96
#define GREATEST_ORDER 9
#else
#error "FRAME_BYTES is 40 or 96"
#endif

#define SIZE_LOG_OF_FRAME 12

enum kind {
	/* Not the first frame of any block. */
	KIND_INNER = 0,
	/* The kernel's own, for good. */
	KIND_KERNEL = 0x4b31,
	KIND_FREE = 0x0f2e,
	KIND_USED = 0x0f2f,
};

/* One frame's metadata. Links are frame numbers, and 0 is none. */
struct frame {
	u32 next;
	u32 previous;
	/* What was last written to the frame; 0 is nothing. */
	u64 stamp;
	u64 spare[(FRAME_BYTES - 24) / 8];
	u16 range;
	u16 kind;
	/* Of a block: the binary logarithm of its bytes. */
	u8 size_log;
	u8 unused[3];
};

_Static_assert(sizeof(struct frame) == FRAME_BYTES, "the size of one frame's metadata");

/* Frames with metadata in a row. */
struct frames {
	u64 first;
	u64 end;
	u64 physical;
	struct frame *metadata;
};

extern struct frames frames[RANGES_MAX];

/* Makes all metadata, and frees all RAM that is not used by then. */
void frames_start(void);
/* The metadata of a frame, or null. */
struct frame *frame_at(u64 number);
/* Takes a block. Returns the number of its first frame, or 0. */
u64 block_take(u32 order);
void block_free(u64 number, u32 order);
u64 blocks_free(u32 order);

/* The helpers, as the host is to have them. */
bool page_free(struct frame *frame);
unsigned long page_order(struct frame *frame);

#endif
