/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The registration record: one page of memory, in which this kernel tells its host where the
 * page metadata is, and how to read it.
 */
#ifndef VPROBE_H
#define VPROBE_H

#include <linux/build_bug.h>
#include <linux/stddef.h>
#include <linux/types.h>

#define VPROBE_MAGIC		"EBBVPROB"
#define VPROBE_VERSION		1
#define VPROBE_CODE_MAX		64
#define VPROBE_RANGES_MAX	121

enum vprobe_state {
	VPROBE_REGISTERED = 1,
	VPROBE_WITHDRAWN = 2,
};

/* Guest-physical bytes [start, end) hold the metadata of the frames [first, behind). */
struct vprobe_range {
	u64 start;
	u64 end;
	u64 first;
	u64 behind;
};

/* All numbers are little endian, as on this processor. */
struct vprobe_record {
	u8 magic[8];
	u32 version;
	u32 length;
	u64 token;
	u64 own_physical;
	u64 own_virtual;
	u32 checksum;
	u32 state;
	u64 acknowledgement;	/* the host's */
	u32 answer;		/* the host's */
	u16 page_bytes;
	u8 max_order;
	u8 range_count;
	u8 free_length;
	u8 order_length;
	u8 zero[6];
	u8 page_free[VPROBE_CODE_MAX];
	u8 page_order[VPROBE_CODE_MAX];
	struct vprobe_range ranges[VPROBE_RANGES_MAX];
};

static_assert(offsetof(struct vprobe_record, checksum) == 40);
static_assert(offsetof(struct vprobe_record, answer) == 56);
static_assert(offsetof(struct vprobe_record, page_free) == 72);
static_assert(offsetof(struct vprobe_record, ranges) == 200);
static_assert(sizeof(struct vprobe_record) <= 4096);

/* hugepages.c */
int vprobe_hugepages_open(void);
int vprobe_hugepages_check(void);
void vprobe_hugepages_close(void);

/* ranges.c */
int vprobe_find_ranges(struct vprobe_range *ranges);

/* record.c */
struct vprobe_record *vprobe_record_new(void);
void vprobe_record_free(struct vprobe_record *record);
int vprobe_record_register(struct vprobe_record *record);
void vprobe_record_withdraw(struct vprobe_record *record);
bool vprobe_record_is_registered(const struct vprobe_record *record);
bool vprobe_record_is_answered(const struct vprobe_record *record);
void vprobe_log_answer(u32 answer);

/* proof.c */
void vprobe_prove(const struct vprobe_record *record, bool wanted);

#endif
