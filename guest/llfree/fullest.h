/* SPDX-License-Identifier: GPL-2.0 OR MIT */
/* The fullest of some trees, or of a tree's areas. */
#ifndef LLFREE_FULLEST_H
#define LLFREE_FULLEST_H

#include "words.h"

/* All areas of a tree fit. */
#define FULLEST_MAX LLFREE_TREE_AREAS

/* Those with the fewest free frames first; of equals, as they came. */
struct fullest {
	u32 free[FULLEST_MAX];
	u32 index[FULLEST_MAX];
	u32 count;
};

/* Where there is no room, the emptiest is left out. */
static inline void fullest_add(struct fullest *fullest, u32 free, u32 index)
{
	u32 place = fullest->count;
	u32 at;

	while (place && fullest->free[place - 1] > free)
		place--;
	if (place == FULLEST_MAX)
		return;
	if (fullest->count < FULLEST_MAX)
		fullest->count++;
	for (at = fullest->count - 1; at > place; at--) {
		fullest->free[at] = fullest->free[at - 1];
		fullest->index[at] = fullest->index[at - 1];
	}
	fullest->free[place] = free;
	fullest->index[place] = index;
}

#endif /* LLFREE_FULLEST_H */
