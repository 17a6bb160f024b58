/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* RAM as the boot loader reports it, and where this kernel maps it. */
#ifndef OTHER_MEMORY_H
#define OTHER_MEMORY_H

#include "machine.h"

#define PAGE_BYTES 4096ull
/* All RAM, in large pages. */
#define DIRECT_BASE 0xffffc00000000000ull
/* The record, in a page of its own. */
#define RECORD_BASE 0xfffff00000000000ull
#define RANGES_MAX 8

/* RAM from 1 MiB on, in whole frames. */
struct ram {
	u64 first;
	u64 end;
};

extern struct ram ram[RANGES_MAX];
extern u32 ram_count;

static inline void *at_physical(u64 address)
{
	return (void *)(DIRECT_BASE + address);
}

/* Reads the memory map and maps RAM. Returns false if there is no map. */
bool memory_start(u64 start_info);
/* Takes memory behind the kernel, which is never freed. Returns its physical address. */
u64 take_early(u64 bytes);
/* The frame behind all that was taken so far. */
u64 early_end(void);
/* Maps one page. */
void map_page(u64 address, u64 physical);
void *memset(void *to, int byte, size_t bytes);
void *memcpy(void *to, const void *from, size_t bytes);

#endif
