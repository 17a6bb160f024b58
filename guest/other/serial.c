/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include "serial.h"

#define PORT 0x3f8
#define DATA (PORT + 0)
#define INTERRUPTS (PORT + 1)
#define FIFO (PORT + 2)
#define LINE (PORT + 3)
#define MODEM (PORT + 4)
#define STATUS (PORT + 5)
#define DIVISOR_ACCESS 0x80
#define EIGHT_BITS 0x03
#define FIFO_ENABLED_CLEARED 0x07
#define READY_TO_TALK 0x03
#define RECEIVED 0x01
#define CAN_SEND 0x20

void serial_start(void)
{
	out8(INTERRUPTS, 0);
	out8(LINE, DIVISOR_ACCESS);
	out8(DATA, 1);
	out8(INTERRUPTS, 0);
	out8(LINE, EIGHT_BITS);
	out8(FIFO, FIFO_ENABLED_CLEARED);
	out8(MODEM, READY_TO_TALK);
}

int serial_read(void)
{
	return in8(STATUS) & RECEIVED ? in8(DATA) : -1;
}

void print(const char *text)
{
	for (; *text; text++) {
		while (!(in8(STATUS) & CAN_SEND))
			;
		out8(DATA, *text);
	}
}

static void print_digits(u64 number, u32 base)
{
	char digits[24];
	char *at = &digits[sizeof(digits) - 1];

	*at = 0;
	do {
		*--at = "0123456789abcdef"[number % base];
		number /= base;
	} while (number);
	print(at);
}

void print_number(u64 number)
{
	print_digits(number, 10);
}

void print_hex(u64 number)
{
	print("0x");
	print_digits(number, 16);
}

void print_named(const char *text, u64 number)
{
	print(text);
	print(" ");
	print_number(number);
}
