/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "memory.h"

#define KERNEL_BASE 0xffffffff80000000ull
#define MIB (1ull << 20)
#define PRESENT_WRITABLE 0x3
#define LARGE 0x80
#define LARGE_BYTES (2 * MIB)
#define ADDRESS_BITS 0x000ffffffffff000ull
#define START_MAGIC 0x336ec578
#define TYPE_RAM 1

/* What the boot loader says: Xen's hvm_start_info, version 1. */
struct start_info {
	u32 magic;
	u32 version;
	u32 flags;
	u32 modules;
	u64 module_list;
	u64 command_line;
	u64 rsdp;
	u64 map;
	u32 map_entries;
	u32 reserved;
};

struct map_entry {
	u64 address;
	u64 bytes;
	u32 type;
	u32 reserved;
};

extern u64 page_table[512];
extern u8 bss_end[];

struct ram ram[RANGES_MAX];
u32 ram_count;
static u64 early;

void *memset(void *to, int byte, size_t bytes)
{
	void *at = to;

	asm volatile("rep stosb" : "+D"(at), "+c"(bytes) : "a"(byte) : "memory");
	return to;
}

void *memcpy(void *to, const void *from, size_t bytes)
{
	void *at = to;

	asm volatile("rep movsb" : "+D"(at), "+S"(from), "+c"(bytes) : : "memory");
	return to;
}

static void *in_kernel_map(u64 physical)
{
	return (void *)(KERNEL_BASE + physical);
}

u64 take_early(u64 bytes)
{
	u64 taken = early;

	early += (bytes + PAGE_BYTES - 1) & -PAGE_BYTES;
	return taken;
}

u64 early_end(void)
{
	return early / PAGE_BYTES;
}

/* The next table below an entry. */
static u64 *below(u64 *entry)
{
	if (!*entry) {
		u64 table = take_early(PAGE_BYTES);

		memset(in_kernel_map(table), 0, PAGE_BYTES);
		*entry = table | PRESENT_WRITABLE;
	}
	return in_kernel_map(*entry & ADDRESS_BITS);
}

static u64 *large_entry(u64 address)
{
	u64 *gibs = below(&page_table[address >> 39 & 511]);

	return &below(&gibs[address >> 30 & 511])[address >> 21 & 511];
}

void map_page(u64 address, u64 physical)
{
	u64 *pages = below(large_entry(address));

	pages[address >> 12 & 511] = physical | PRESENT_WRITABLE;
	asm volatile("invlpg (%0)" : : "r"(address) : "memory");
}

static void map_range(u64 begin, u64 end)
{
	for (begin &= -LARGE_BYTES; begin < end; begin += LARGE_BYTES)
		*large_entry(DIRECT_BASE + begin) = begin | PRESENT_WRITABLE | LARGE;
}

bool memory_start(u64 address)
{
	const struct start_info *info = in_kernel_map(address);
	const struct map_entry *map = in_kernel_map(info->map);

	if (info->magic != START_MAGIC || info->version < 1)
		return false;
	early = (u64)bss_end - KERNEL_BASE;
	for (u32 i = 0; i < info->map_entries && ram_count < RANGES_MAX; i++) {
		u64 begin = map[i].address, end = begin + map[i].bytes;

		begin = begin < MIB ? MIB : (begin + PAGE_BYTES - 1) & -PAGE_BYTES;
		end &= -PAGE_BYTES;
		if (map[i].type != TYPE_RAM || end <= begin)
			continue;
		map_range(begin, end);
		ram[ram_count++] = (struct ram){ begin / PAGE_BYTES, end / PAGE_BYTES };
	}
	return ram_count > 0;
}
