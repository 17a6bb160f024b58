/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "interrupts.h"
#include "registration.h"
#include "serial.h"

#define VECTORS 48
#define ENTRY_BYTES 16
#define CODE 0x08
#define INTERRUPT_GATE 0x8e
#define FIRST_CONTROLLER 0x20
#define SECOND_CONTROLLER 0xa0
#define INITIALIZE 0x11
#define FIRST_VECTOR 32
#define SECOND_VECTOR 40
#define MODE_8086 1
#define END_OF_INTERRUPT 0x20
#define ALL_BUT_TIMER 0xfe
#define ALL 0xff
#define TIMER_VECTOR FIRST_VECTOR
#define TIMER_MODE 0x43
#define TIMER_COUNT 0x40
#define RATE_GENERATOR 0x34
#define TIMER_HERTZ 1193182

struct gate {
	u16 low;
	u16 segment;
	u8 stack;
	u8 type;
	u16 middle;
	u32 high;
	u32 zero;
};

extern const u8 interrupt_entries[];

static struct gate gates[VECTORS];
volatile u64 ticks;

void interrupts_start(void)
{
	struct {
		u16 limit;
		u64 base;
	} __attribute__((packed)) pointer = { sizeof(gates) - 1, (u64)gates };
	u16 count = TIMER_HERTZ / TICKS_PER_SECOND;

	for (u32 i = 0; i < VECTORS; i++) {
		u64 entry = (u64)interrupt_entries + i * ENTRY_BYTES;

		gates[i] = (struct gate){
			.low = entry,
			.segment = CODE,
			.type = INTERRUPT_GATE,
			.middle = entry >> 16,
			.high = entry >> 32,
		};
	}
	asm volatile("lidt %0" : : "m"(pointer));
	out8(FIRST_CONTROLLER, INITIALIZE);
	out8(SECOND_CONTROLLER, INITIALIZE);
	out8(FIRST_CONTROLLER + 1, FIRST_VECTOR);
	out8(SECOND_CONTROLLER + 1, SECOND_VECTOR);
	out8(FIRST_CONTROLLER + 1, 1 << 2);
	out8(SECOND_CONTROLLER + 1, 2);
	out8(FIRST_CONTROLLER + 1, MODE_8086);
	out8(SECOND_CONTROLLER + 1, MODE_8086);
	out8(FIRST_CONTROLLER + 1, ALL_BUT_TIMER);
	out8(SECOND_CONTROLLER + 1, ALL);
	out8(TIMER_MODE, RATE_GENERATOR);
	out8(TIMER_COUNT, count & 0xff);
	out8(TIMER_COUNT, count >> 8);
	enable_interrupts();
}

/* Called by interrupt_common. */
void interrupt(u64 vector, u64 error, u64 instruction);
void interrupt(u64 vector, u64 error, u64 instruction)
{
	u64 address;

	if (vector == TIMER_VECTOR) {
		ticks++;
		registration_watch();
		out8(FIRST_CONTROLLER, END_OF_INTERRUPT);
	}
	if (vector >= FIRST_VECTOR)
		return;
	asm volatile("mov %%cr2, %0" : "=r"(address));
	print_named("\nerror exception", vector);
	print(" code ");
	print_hex(error);
	print(" at ");
	print_hex(instruction);
	print(" address ");
	print_hex(address);
	print("\n");
	for (;;)
		wait_for_interrupt();
}
