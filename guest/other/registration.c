/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "registration.h"
#include "frames.h"
#include "serial.h"

#define MAGIC 0x424f525056424245ull
#define VERSION 1
#define STATE_REGISTERED 1
#define STATE_WITHDRAWN 2
#define CODE_BYTES 64
/* Castagnoli's polynomial, reflected. */
#define POLYNOMIAL 0x82f63b78u
/* Debug register 0, of both kinds: for this task and for all. */
#define BREAKPOINT_0 0x3ull
/* The bit of DR7 that always reads as one. */
#define DR7_NONE 0x400ull

struct record_range {
	u64 begin;
	u64 end;
	u64 first_frame;
	u64 end_frame;
};

struct record {
	u64 magic;
	u32 version;
	u32 length;
	u64 token;
	u64 physical;
	u64 address;
	u32 checksum;
	u32 state;
	u64 acknowledgement;
	u32 answer;
	u16 page_bytes;
	u8 greatest_order;
	u8 ranges;
	u8 free_bytes;
	u8 order_bytes;
	u8 zero[6];
	u8 page_free[CODE_BYTES];
	u8 page_order[CODE_BYTES];
	struct record_range range[RANGES_MAX];
};

_Static_assert(offsetof(struct record, acknowledgement) == 48, "docs/vprobe.md");
_Static_assert(offsetof(struct record, page_free) == 72, "docs/vprobe.md");
_Static_assert(offsetof(struct record, range) == 200, "docs/vprobe.md");

extern const u8 page_free_begin[], page_free_end[];
extern const u8 page_order_begin[], page_order_end[];

static volatile struct record *const record = (volatile struct record *)RECORD_BASE;
static u64 physical;
static u64 token;
static bool registered;
static bool armed;

u64 random_number(void)
{
	static u64 state;

	state += time_stamp() | 1;
	u64 number = state * 0x9e3779b97f4a7c15ull;

	number ^= number >> 29;
	return number * 0xbf58476d1ce4e5b9ull ^ number >> 32;
}

static u32 crc32c(const u8 *bytes, u32 length)
{
	u32 sum = ~0u;

	for (u32 i = 0; i < length; i++) {
		sum ^= bytes[i];
		for (u32 bit = 0; bit < 8; bit++)
			sum = sum >> 1 ^ (sum & 1 ? POLYNOMIAL : 0);
	}
	return ~sum;
}

static void arm(bool on)
{
	u64 address = on ? RECORD_BASE : 0;
	u64 control = on ? DR7_NONE | BREAKPOINT_0 : DR7_NONE;

	asm volatile("mov %0, %%dr0" : : "r"(address));
	asm volatile("mov %0, %%dr7" : : "r"(control));
	armed = on;
}

void registration_start(void)
{
	physical = take_early(PAGE_BYTES);
	/* The page may hold the record of the system before a reset. Nobody may find that mapped. */
	memset(at_physical(physical), 0, PAGE_BYTES);
	map_page(RECORD_BASE, physical);
}

/* Fills in all that the checksum covers. */
static void fill(struct record *new)
{
	new->magic = MAGIC;
	new->version = VERSION;
	new->length = offsetof(struct record, range) + ram_count * sizeof(new->range[0]);
	new->token = token;
	new->physical = physical;
	new->address = RECORD_BASE;
	new->page_bytes = FRAME_BYTES;
	new->greatest_order = GREATEST_ORDER;
	new->ranges = ram_count;
	new->free_bytes = page_free_end - page_free_begin;
	new->order_bytes = page_order_end - page_order_begin;
	memcpy(new->page_free, page_free_begin, new->free_bytes);
	memcpy(new->page_order, page_order_begin, new->order_bytes);
	for (u32 i = 0; i < ram_count; i++) {
		u64 count = frames[i].end - frames[i].first;

		new->range[i] = (struct record_range){
			frames[i].physical, frames[i].physical + count * FRAME_BYTES,
			frames[i].first, frames[i].end
		};
	}
}

bool registration_make(void)
{
	struct record *new = at_physical(physical);
	u32 checksum;

	if (registered)
		return false;
	record->magic = 0;
	memset(new, 0, PAGE_BYTES);
	token = random_number() | 1;
	fill(new);
	checksum = crc32c((const u8 *)new, new->length);
	disable_interrupts();
	registered = true;
	arm(true);
	enable_interrupts();
	/* The page is a record from its checksum on, so this comes last. */
	record->state = STATE_REGISTERED;
	record->checksum = checksum;
	return true;
}

bool registration_withdraw(void)
{
	if (!registered)
		return false;
	disable_interrupts();
	record->state = STATE_WITHDRAWN;
	registered = false;
	arm(false);
	enable_interrupts();
	return true;
}

void registration_watch(void)
{
	bool acknowledged = registered && record->acknowledgement == token;

	if (registered && armed == acknowledged)
		arm(!acknowledged);
}

bool registration_print(void)
{
	print_named("state", record->state);
	print("\ntoken ");
	print_hex(token);
	print("\nacknowledgement ");
	print_hex(record->acknowledgement);
	print("\nanswer ");
	print_hex(record->answer);
	print("\n");
	return registered && record->acknowledgement == token;
}
