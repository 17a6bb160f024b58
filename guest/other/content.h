/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Blocks in use, and whether they contain what was written to them. */
#ifndef OTHER_CONTENT_H
#define OTHER_CONTENT_H

#include "machine.h"

/* What was found in memory. */
struct found {
	/* Words that are neither what was last written nor, in a block that was free, zero. */
	u64 wrong;
	/* Frames of blocks that were free and lost what had been written to them. */
	u64 zeroed;
	/* Blocks taken. */
	u64 blocks;
};

/* Takes blocks of the greatest order and fills them, as many as there are. */
struct found content_take(u64 count);
/* Checks all blocks that were taken and not given. */
struct found content_check(void);
/* Frees the blocks taken last. Returns how many there were. */
u64 content_give(u64 count);
/* Takes and frees blocks of all sizes at random. Some of them stay taken. */
struct found content_loop(u64 seconds);
/* Frees what loops have left. */
void content_tidy(void);

#endif
