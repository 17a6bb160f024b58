/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The registration record (docs/vprobe.md), and the proof that this kernel made it. */
#ifndef OTHER_REGISTRATION_H
#define OTHER_REGISTRATION_H

#include "machine.h"

/* Makes room for the record, which is empty at first. */
void registration_start(void);
/* Registers. Returns false if that is so already. */
bool registration_make(void);
/* Withdraws. Returns false if nothing is registered. */
bool registration_withdraw(void);
/* Holds the proof up while the host has not acknowledged the record: at each tick. */
void registration_watch(void);
/* Prints the host's answer. Returns whether it has acknowledged the record. */
bool registration_print(void);

#endif
