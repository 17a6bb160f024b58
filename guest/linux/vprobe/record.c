// SPDX-License-Identifier: GPL-2.0
/*
 * Fills in the record, and reads the host's answer.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kernel.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/random.h>
#include <linux/string.h>
#include <linux/version.h>
#include <linux/vmalloc.h>

#include "vprobe.h"

#ifdef MAX_PAGE_ORDER
#define BUDDY_ORDER_MAX	MAX_PAGE_ORDER
#elif LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
#define BUDDY_ORDER_MAX	MAX_ORDER
#else
#define BUDDY_ORDER_MAX	(MAX_ORDER - 1)
#endif

/* CRC-32C, reflected. */
#define POLYNOMIAL	0x82f63b78

extern const u8 vprobe_page_free[], vprobe_page_free_end[];
extern const u8 vprobe_page_order[], vprobe_page_order_end[];

/* A checksum of one page, once in a while: a table would cost more than it saves. */
static u32 crc32c_of(const u8 *bytes, size_t count)
{
	u32 crc = ~0U;
	int bit;

	while (count--) {
		crc ^= *bytes++;
		for (bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
	}
	return ~crc;
}

static int copy_code(u8 *to, u8 *length, const u8 *code, const u8 *end)
{
	size_t bytes = end - code;

	if (!bytes || bytes > VPROBE_CODE_MAX)
		return -E2BIG;
	memcpy(to, code, bytes);
	*length = bytes;
	return 0;
}

/*
 * The record has a page of its own in the vmalloc area, where no other kernel that runs in this
 * memory later maps it. Returns an error pointer if there is no memory, or if the helpers are too
 * long.
 */
struct vprobe_record *vprobe_record_new(void)
{
	struct vprobe_record *record = vzalloc(PAGE_SIZE);
	int error;

	if (!record)
		return ERR_PTR(-ENOMEM);
	record->state = VPROBE_WITHDRAWN;
	record->version = VPROBE_VERSION;
	record->own_physical = (u64)vmalloc_to_pfn(record) << PAGE_SHIFT;
	record->own_virtual = (unsigned long)record;
	record->page_bytes = sizeof(struct page);
	record->max_order = BUDDY_ORDER_MAX;
	error = copy_code(record->page_free, &record->free_length, vprobe_page_free,
			  vprobe_page_free_end);
	if (!error)
		error = copy_code(record->page_order, &record->order_length, vprobe_page_order,
				  vprobe_page_order_end);
	if (error) {
		vfree(record);
		return ERR_PTR(error);
	}
	/* Nobody writes these bytes again: the proof watches them. */
	memcpy(record->magic, VPROBE_MAGIC, sizeof(record->magic));
	return record;
}

/*
 * Only for a record that was never registered. The host may still write its answer to one that was:
 * its look at the state and its write are two steps. So no other use of that page is safe, ever.
 */
void vprobe_record_free(struct vprobe_record *record)
{
	vfree(record);
}

/* Registers all online memory under a new token. */
int vprobe_record_register(struct vprobe_record *record)
{
	int count = vprobe_find_ranges(record->ranges);
	u64 token;

	if (count < 0)
		return count;
	do {
		get_random_bytes(&token, sizeof(token));
	} while (!token);
	record->token = token;
	record->range_count = count;
	record->length = offsetof(struct vprobe_record, ranges[count]);
	/* The checksum takes as zero what changes later. */
	record->checksum = 0;
	record->state = 0;
	record->acknowledgement = 0;
	record->answer = 0;
	record->checksum = crc32c_of((const u8 *)record, record->length);
	/* The state comes last: the host believes all the rest once it sees that. */
	smp_wmb();
	WRITE_ONCE(record->state, VPROBE_REGISTERED);
	return 0;
}

/* Returns when no later change of this kernel's metadata can come before the withdrawal. */
void vprobe_record_withdraw(struct vprobe_record *record)
{
	WRITE_ONCE(record->state, VPROBE_WITHDRAWN);
	smp_mb();
}

bool vprobe_record_is_registered(const struct vprobe_record *record)
{
	return READ_ONCE(record->state) == VPROBE_REGISTERED;
}

/* The answer is valid after this, because the host writes it before its acknowledgement. */
bool vprobe_record_is_answered(const struct vprobe_record *record)
{
	bool answered = READ_ONCE(record->acknowledgement) == record->token;

	smp_rmb();
	return answered;
}

static void log_helper(const char *name, u8 rule, u8 offset)
{
	static const char * const rules[] = {
		"it has an instruction that the host does not know",
		"it uses a register other than rax and rdi",
		"it reads other memory than the metadata of its page",
		"it writes to memory",
		"it does not go straight on",
		"it does not end with a plain ret",
		"it is too long",
	};

	pr_warn("the host refuses %s: %s, at byte %u\n", name,
		rule < ARRAY_SIZE(rules) ? rules[rule] : "it breaks an unknown rule", offset);
}

void vprobe_log_answer(u32 answer)
{
	static const char * const reasons[] = {
		[1] = "it does not know this version",
		[2] = "a field is invalid",
		[3] = "the ranges are invalid",
		[4] = "metadata is not in its memory",
		[7] = "it takes no registration of this virtual machine",
	};
	u8 kind = answer, reason = answer >> 8, rule = answer >> 16, offset = answer >> 24;

	if (kind == 1)
		pr_info("the host has accepted the registration\n");
	else if (kind != 2)
		pr_warn("the host gives an unknown answer: %#x\n", answer);
	else if (reason == 5)
		log_helper("page_free", rule, offset);
	else if (reason == 6)
		log_helper("page_order", rule, offset);
	else if (reason < ARRAY_SIZE(reasons) && reasons[reason])
		pr_warn("the host refuses the registration: %s\n", reasons[reason]);
	else
		pr_warn("the host refuses the registration: reason %u\n", reason);
}
