/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The console: the first serial port, polled. */
#ifndef OTHER_SERIAL_H
#define OTHER_SERIAL_H

#include "machine.h"

void serial_start(void);
/* Returns a character that has come, or -1. */
int serial_read(void);
void print(const char *text);
void print_number(u64 number);
void print_hex(u64 number);
/* Prints `text`, a space and the number. */
void print_named(const char *text, u64 number);

#endif
