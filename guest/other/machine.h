/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Numbers, and instructions that C does not have. */
#ifndef OTHER_MACHINE_H
#define OTHER_MACHINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

static inline void out8(u16 port, u8 value)
{
	asm volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static inline void out16(u16 port, u16 value)
{
	asm volatile("outw %0, %1" : : "a"(value), "Nd"(port));
}

static inline u8 in8(u16 port)
{
	u8 value;

	asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
	return value;
}

static inline void disable_interrupts(void)
{
	asm volatile("cli" : : : "memory");
}

static inline void enable_interrupts(void)
{
	asm volatile("sti" : : : "memory");
}

static inline void wait_for_interrupt(void)
{
	asm volatile("hlt" : : : "memory");
}

static inline u64 time_stamp(void)
{
	u32 low, high;

	asm volatile("rdtsc" : "=a"(low), "=d"(high));
	return (u64)high << 32 | low;
}

/* A number that differs from one call to the next. */
u64 random_number(void);

#endif
