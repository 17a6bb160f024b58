/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/*
 * LLFree: a page-frame allocator without locks, whose state the host works on
 * too. Frames count from the zone's first, which is at a multiple of
 * LLFREE_ZONE_ALIGN_FRAMES.
 */
#ifndef LLFREE_H
#define LLFREE_H

#include "llfree_layout.h"

enum llfree_error {
	/* There are no blocks of this order. */
	LLFREE_ERR_ORDER = -1,
	/* No block of this order begins at this frame. */
	LLFREE_ERR_FRAME = -2,
	/* No block of this order is free. */
	LLFREE_ERR_MEMORY = -3,
	/* The block is in use, or a part of it is. */
	LLFREE_ERR_TAKEN = -4,
	/* The block is not allocated as a whole, or is the host's. */
	LLFREE_ERR_NOT_ALLOCATED = -5,
	/* A zone cannot have this size, or begin there. */
	LLFREE_ERR_LAYOUT = -6,
	/* Words contradict each other. */
	LLFREE_ERR_DISAGREE = -7,
};

/* A zone. Filled by llfree_init(); nobody else writes it. */
struct llfree {
	llf_u64 *bits;
	llf_u16 *areas;
	llf_u32 *trees;
	llf_u64 *slots;
	u64 frames;
	/* Those that have slots of their own, or 1: all share the slots. */
	u32 cores;
	u32 area_count;
	u32 tree_count;
	/*
	 * Writes to an allocated frame that may have no memory behind it, and
	 * comes back when it has. The content is not to be changed: OR nothing
	 * into it. NULL where no host takes memory away.
	 */
	void (*touch)(void *context, u64 frame);
	void *context;
};

/* What a zone holds; exact while nothing changes. */
struct llfree_summary {
	/* Frames. */
	u64 free;
	/* Of these, frames that slots have claimed. */
	u64 claimed;
	/* Areas that are free as a whole, and of these those without memory. */
	u64 free_areas;
	u64 evicted_areas;
	/* Areas that are the host's. */
	u64 hosts_areas;
	/* Free blocks by order, none of which is part of a greater one. */
	u64 blocks[LLFREE_MAX_ORDER + 1];
};

/* Where the parts of a zone's state lie in one region, bytes from its start. */
struct llfree_layout {
	u64 bits;
	u64 areas;
	u64 trees;
	u64 slots;
	u64 total;
};

/* What the header says; addresses are guest-physical. */
struct llfree_header {
	u64 base_frame;
	u64 frames;
	u32 cores;
	u64 bits;
	u64 areas;
	u64 trees;
	u64 slots;
};

/* 0, or LLFREE_ERR_LAYOUT. */
int llfree_layout(u64 frames, u32 cores, struct llfree_layout *layout);

/* Publishes a zone to the host. 0, or LLFREE_ERR_LAYOUT. */
int llfree_write_header(llf_u64 *words, const struct llfree_header *header);

/*
 * Over a region of llfree_layout()'s total size, 64-byte aligned, that has the
 * state already or gets it by llfree_format(). 0, or LLFREE_ERR_LAYOUT.
 */
int llfree_init(struct llfree *zone, void *region, u64 frames, u32 cores,
		void (*touch)(void *context, u64 frame), void *context);

/* Writes all the state but the header: all frames free, or all allocated. */
void llfree_format(struct llfree *zone, bool free);

/*
 * A free block of 2^order frames, with memory behind it: its first frame, or
 * LLFREE_ERR_ORDER or LLFREE_ERR_MEMORY. @kind is LLFREE_KIND_UNMOVABLE or
 * _MOVABLE; blocks of order 9 and more are of a kind by themselves. @core: whose
 * slots to use; any number will do, and any number of threads may use the same.
 */
s64 llfree_get(struct llfree *zone, unsigned int order, unsigned int kind, unsigned int core);

/* The block that begins at @frame. 0, or LLFREE_ERR_ORDER, _FRAME or _TAKEN. */
int llfree_get_at(struct llfree *zone, u64 frame, unsigned int order);

/*
 * Frees a block; parts of a greater one may be freed one by one. 0, or
 * LLFREE_ERR_ORDER, _FRAME or _NOT_ALLOCATED: of two who free a block at once,
 * one is told.
 */
int llfree_put(struct llfree *zone, u64 frame, unsigned int order);

/* Gives all reservations back. */
void llfree_drain(struct llfree *zone);

/* Whether every frame of a block is free at this moment; no such block: false. */
bool llfree_is_free(struct llfree *zone, u64 frame, unsigned int order);

/*
 * Whether llfree_get() would find a block, near @core's slots first. Claims of
 * slots may hide one.
 */
bool llfree_has(struct llfree *zone, unsigned int order, unsigned int core);

/* Looks at all of a zone. */
void llfree_summarize(struct llfree *zone, struct llfree_summary *summary);

/* Free frames, and areas that are free as a whole; exact while nothing changes. */
u64 llfree_free_frames(struct llfree *zone);
u64 llfree_free_areas(struct llfree *zone);

/*
 * While nothing changes: whether trees, areas and bits agree. 0, or
 * LLFREE_ERR_DISAGREE and the area or tree.
 */
int llfree_verify(struct llfree *zone, u64 *where);

#endif /* LLFREE_H */
