/* SPDX-License-Identifier: GPL-2.0 */
/* The machine code of the helpers, as data. */

	.section .rodata
	.globl vprobe_page_free, vprobe_page_free_end
	.globl vprobe_page_order, vprobe_page_order_end
vprobe_page_free:
	.incbin "page_free.bin"
vprobe_page_free_end:
vprobe_page_order:
	.incbin "page_order.bin"
vprobe_page_order_end:

	.section .note.GNU-stack, "", @progbits
