# Takes pages, fills, checks and frees them, and tells of each what it is.
#
# In:   rdi  the pages' metadata, two words each
#       rsi  the first page
#       rdx  how many pages, less one; a power of two, less one
#       rcx  how long it rests when a page is half full
#       rbx  the mailbox: leave when its first word is not 0
#       r9   where its random numbers begin
# Out:  r8   pages taken
#       r10  words that were not what they should have been
#
# Metadata: word 0 is 0 while the page is free, 1 from when it was taken until
# it is filled, 2 while it is in use. The word at address A of a page in use is
# word 1 + A.

        .intel_syntax noprefix
again:  cmp     qword ptr [rbx], 0
        jne     leave
        movabs  r13, 6364136223846793005
        imul    r9, r13                 # a page by chance
        inc     r9
        mov     rax, r9
        shr     rax, 33
        and     rax, rdx
        mov     rbp, rax                # rbp: its metadata
        shl     rbp, 4
        add     rbp, rdi
        mov     r12, rax                # r12 to r11: its memory
        shl     r12, 12
        add     r12, rsi
        lea     r11, [r12 + 4096]
        cmp     qword ptr [rbp], 2
        jne     take
        bt      r9, 60                  # free it, or
        jnc     free

        mov     r14, [rbp + 8]          # check it
        mov     rax, r12
check:  lea     r13, [r14 + rax]
        cmp     r13, [rax]
        je      right
        inc     r10
right:  add     rax, 8
        cmp     rax, r11
        jne     check
        jmp     again

free:   mov     qword ptr [rbp], 0
        jmp     again

take:   mov     qword ptr [rbp], 1
        mov     rax, r12
fill:   lea     r13, [rax + r9]
        mov     [rax], r13
        add     rax, 8
        test    eax, 2047
        jnz     full
        mov     r13, rcx
rest:   dec     r13
        jns     rest
full:   cmp     rax, r11
        jne     fill
        mov     [rbp + 8], r9
        mov     qword ptr [rbp], 2
        inc     r8
        jmp     again

leave:  out     0x10, al
