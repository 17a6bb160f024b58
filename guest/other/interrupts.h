/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The timer, and the end at an exception. */
#ifndef OTHER_INTERRUPTS_H
#define OTHER_INTERRUPTS_H

#include "machine.h"

#define TICKS_PER_SECOND 100

/* Ticks since the start. */
extern volatile u64 ticks;

void interrupts_start(void);

#endif
