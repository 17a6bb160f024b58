/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The way from the PVH entry point to 64-bit code in the upper half, and the entries of interrupts. */
#define KERNEL_BASE 0xffffffff80000000
#define PHYSICAL(symbol) ((symbol) - KERNEL_BASE)
#define PRESENT_WRITABLE 0x3
#define LARGE 0x80
#define CR0_PROTECTED 0x1
#define CR0_PAGING 0x80000000
#define CR4_PAE 0x20
#define EFER 0xc0000080
#define EFER_LONG 0x100
#define CODE 0x08
#define DATA 0x10
#define STACK_BYTES 16384
/* Xen's note of this number names the physical address of a 32-bit entry point. */
#define PHYS32_ENTRY 18

	.section .note.Xen, "a", @note
	.balign 4
	.long 4, 8, PHYS32_ENTRY
	.asciz "Xen"
	.quad entry_physical

	.section .start, "ax"
	.code32
	.global entry
/* ebx: physical address of what the boot loader says. No paging, flat segments. */
entry:
	cli
	cld
	mov $PHYSICAL(bss_begin), %edi
	mov $PHYSICAL(bss_end), %ecx
	sub %edi, %ecx
	xor %eax, %eax
	rep stosb

	/* The first GiB in large pages, at its own address and at KERNEL_BASE. */
	mov $PHYSICAL(first_gib), %edi
	mov $(PRESENT_WRITABLE | LARGE), %eax
	mov $512, %ecx
1:	mov %eax, (%edi)
	add $0x200000, %eax
	add $8, %edi
	loop 1b
	mov $PHYSICAL(first_gib) + PRESENT_WRITABLE, %eax
	mov %eax, PHYSICAL(kernel_gibs)
	mov %eax, PHYSICAL(kernel_gibs) + 510 * 8
	mov $PHYSICAL(kernel_gibs) + PRESENT_WRITABLE, %eax
	mov %eax, PHYSICAL(page_table)
	mov %eax, PHYSICAL(page_table) + 511 * 8

	mov $PHYSICAL(page_table), %eax
	mov %eax, %cr3
	mov %cr4, %eax
	or $CR4_PAE, %eax
	mov %eax, %cr4
	mov $EFER, %ecx
	rdmsr
	or $EFER_LONG, %eax
	wrmsr
	mov %cr0, %eax
	or $(CR0_PAGING | CR0_PROTECTED), %eax
	mov %eax, %cr0
	lgdt PHYSICAL(gdt_pointer)
	ljmp $CODE, $PHYSICAL(low)

	.code64
low:
	movabs $high, %rax
	jmp *%rax
high:
	mov $DATA, %eax
	mov %eax, %ds
	mov %eax, %es
	mov %eax, %ss
	mov $stack_end, %rsp
	lgdt gdt_pointer_high
	/* Nothing is mapped in the lower half from now on. */
	movq $0, page_table
	movq $0, kernel_gibs
	mov %cr3, %rax
	mov %rax, %cr3
	mov %ebx, %edi
	call kernel
1:	hlt
	jmp 1b

	.balign 8
gdt:
	.quad 0
	.quad 0x00af9b000000ffff
	.quad 0x00cf93000000ffff
gdt_end:
gdt_pointer:
	.word gdt_end - gdt - 1
	.long PHYSICAL(gdt)
gdt_pointer_high:
	.word gdt_end - gdt - 1
	.quad gdt

/* An entry of 16 bytes for each vector: exceptions and the interrupt controller's. */
	.balign 16
	.global interrupt_entries
interrupt_entries:
	vector = 0
	.rept 48
	.balign 16
	.if (vector != 8) && ((vector < 10) || (vector > 14)) && (vector != 17)
	push $0
	.endif
	push $vector
	jmp interrupt_common
	vector = vector + 1
	.endr

	.balign 16
interrupt_common:
	push %rax
	push %rcx
	push %rdx
	push %rsi
	push %rdi
	push %r8
	push %r9
	push %r10
	push %r11
	cld
	mov 72(%rsp), %rdi
	mov 80(%rsp), %rsi
	mov 88(%rsp), %rdx
	sub $8, %rsp
	call interrupt
	add $8, %rsp
	pop %r11
	pop %r10
	pop %r9
	pop %r8
	pop %rdi
	pop %rsi
	pop %rdx
	pop %rcx
	pop %rax
	add $16, %rsp
	iretq

	.bss
	.balign 4096
	.global page_table
page_table:
	.skip 4096
kernel_gibs:
	.skip 4096
first_gib:
	.skip 4096
	.skip STACK_BYTES
stack_end:

	.section .note.GNU-stack, "", @progbits
