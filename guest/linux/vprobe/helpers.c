// SPDX-License-Identifier: GPL-2.0
/*
 * The two helpers. The host reads free memory by their machine code, which this kernel never
 * runs. See Kbuild for how they get into the module.
 */
#include <linux/mm.h>

bool page_free(struct page *page);
unsigned long page_order(struct page *page);

bool page_free(struct page *page)
{
	return PageBuddy(page);
}

unsigned long page_order(struct page *page)
{
	return page_private(page);
}
