// SPDX-License-Identifier: GPL-2.0
/*
 * Where the page metadata of all online memory is.
 */
#include <linux/memory_hotplug.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/nodemask.h>
#include <linux/sched.h>
#include <linux/string.h>
#include <asm/pgtable_types.h>

#include "vprobe.h"

/* Memory is present or absent in whole subsections. */
#define STEP_FRAMES	PAGES_PER_SUBSECTION
#define FRAMES_PER_PAGE	(PAGE_SIZE / sizeof(struct page))

struct finder {
	struct vprobe_range *ranges;
	int count;
	struct vprobe_range run;	/* the range that is still growing */
};

static u64 frames(const struct vprobe_range *range)
{
	return range->behind - range->first;
}

/* If there are too many ranges, those stay that describe the most frames. */
static void finish_run(struct finder *finder)
{
	int index, smallest = 0;

	if (!frames(&finder->run))
		return;
	if (finder->count == VPROBE_RANGES_MAX) {
		for (index = 1; index < finder->count; index++)
			if (frames(&finder->ranges[index]) < frames(&finder->ranges[smallest]))
				smallest = index;
		if (frames(&finder->run) <= frames(&finder->ranges[smallest]))
			return;
		finder->count--;
		memmove(&finder->ranges[smallest], &finder->ranges[smallest + 1],
			(finder->count - smallest) * sizeof(*finder->ranges));
	}
	finder->ranges[finder->count++] = finder->run;
}

/* Adds one page of metadata. */
static int add_page(struct finder *finder, unsigned long pfn)
{
	u64 start = slow_virt_to_phys(pfn_to_page(pfn));
	struct vprobe_range *run = &finder->run;

	/*
	 * One page serves as the metadata of several parts of a huge page: this kernel saves
	 * metadata of huge pages, and moves the rest of it about at run time.
	 */
	if (frames(run) && start == run->end - PAGE_SIZE)
		return -EBUSY;
	if (!frames(run) || run->behind != pfn || run->end != start) {
		finish_run(finder);
		run->start = start;
		run->first = pfn;
	}
	run->end = start + PAGE_SIZE;
	run->behind = pfn + FRAMES_PER_PAGE;
	return 0;
}

static int add_step(struct finder *finder, unsigned long first)
{
	unsigned long pfn;
	int error;

	for (pfn = first; pfn < first + STEP_FRAMES; pfn += FRAMES_PER_PAGE) {
		error = add_page(finder, pfn);
		if (error)
			return error;
	}
	return 0;
}

static unsigned long spanned_end(void)
{
	unsigned long end = 0;
	int nid;

	for_each_online_node(nid)
		end = max(end, pgdat_end_pfn(NODE_DATA(nid)));
	return end;
}

/*
 * Fills in up to VPROBE_RANGES_MAX ranges, whose frames ascend. The caller keeps memory from
 * going online or offline. Returns the number of ranges, or an error.
 */
int vprobe_find_ranges(struct vprobe_range *ranges)
{
	struct finder finder = { .ranges = ranges };
	unsigned long pfn, end = spanned_end();
	int error;

	for (pfn = 0; pfn < end; pfn += STEP_FRAMES) {
		if (!(pfn % PAGES_PER_SECTION))
			cond_resched();
		if (!pfn_valid(pfn) || !pfn_to_online_page(pfn))
			continue;
		error = add_step(&finder, pfn);
		if (error)
			return error;
	}
	finish_run(&finder);
	return finder.count ? finder.count : -ENODATA;
}
