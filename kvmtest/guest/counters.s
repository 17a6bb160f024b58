# Counts in a word of many pages, and in a table what each should say.
#
# In:   rdi  the first page; the last word of each is its own address
#       rsi  the table, a word for each page
#       rdx  how many pages, less one; a power of two, less one
#       rbp  which byte of a page its counter is at
#       rcx  how long it rests after each count
#       rbx  the mailbox: leave when its first word is not 0
#       r9   where its random numbers begin
# Out:  r8   counts
#       r10  counters and addresses that were not what they should have been

        .intel_syntax noprefix
        movabs  r13, 6364136223846793005
again:  imul    r9, r13                 # a page by chance
        inc     r9
        mov     rax, r9
        shr     rax, 33
        and     rax, rdx
        mov     r12, rax
        shl     r12, 12
        add     r12, rdi
        mov     r11, [rsi + rax * 8]
        cmp     [r12 + rbp], r11
        jne     wrong
        cmp     [r12 + 4088], r12
        jne     wrong
count:  inc     r11
        mov     [r12 + rbp], r11
        mov     [rsi + rax * 8], r11
        inc     r8
        mov     r14, rcx
rest:   dec     r14
        jns     rest
        cmp     qword ptr [rbx], 0
        je      again
        out     0x10, al

wrong:  inc     r10                     # each once: go on from what is there
        mov     r11, [r12 + rbp]
        mov     [r12 + 4088], r12
        jmp     count
