# Takes blocks of memory, checks what is in them, fills them, frees them.
#
# In:   rdi  the blocks' metadata, a page each
#       rsi  the first block
#       rdx  how many blocks, less one; a power of two, less one
#       rcx  log2 of a block's bytes
#       rbx  the mailbox: leave when its first word is not 0
#       r9   where its random numbers begin
# Out:  r8   blocks taken
#       r10  words that were not what they should have been
#
# Metadata: word 0 is 1 while somebody uses the block, else 0. The word at
# address A of the block is word 1 + word 2 * A.

        .intel_syntax noprefix
again:  cmp     qword ptr [rbx], 0
        jne     leave
        movabs  r13, 6364136223846793005
        imul    r9, r13                 # a block by chance
        inc     r9
        mov     rax, r9
        shr     rax, 33
        and     rax, rdx
        mov     rbp, rax                # rbp: its metadata
        shl     rbp, 12
        add     rbp, rdi
        mov     r12, rax                # r12 to r11: its memory
        shl     r12, cl
        add     r12, rsi
        mov     eax, 1
        shl     rax, cl
        lea     r11, [r12 + rax]
        mov     eax, 1                  # take it: the write that a watch stops
        xchg    [rbp], rax
        test    rax, rax
        jnz     again

        mov     r14, [rbp + 8]          # check it
        mov     r15, [rbp + 16]
        mov     rax, r12
check:  mov     r13, r15
        imul    r13, rax
        add     r13, r14
        cmp     r13, [rax]
        je      right
        inc     r10
right:  add     rax, 8
        cmp     rax, r11
        jne     check

        mov     [rbp + 8], r9           # fill it
        mov     qword ptr [rbp + 16], 1
        mov     rax, r12
fill:   lea     r13, [rax + r9]
        mov     [rax], r13
        add     rax, 8
        cmp     rax, r11
        jne     fill

        mov     qword ptr [rbp], 0      # free it
        inc     r8
        jmp     again

leave:  out     0x10, al
