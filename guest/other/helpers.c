/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The helpers: this file's compiler options keep the six rules of docs/vprobe.md. */
#include "frames.h"

bool page_free(struct frame *frame)
{
	return frame->kind == KIND_FREE;
}

unsigned long page_order(struct frame *frame)
{
	return (unsigned long)frame->size_log - SIZE_LOG_OF_FRAME;
}
