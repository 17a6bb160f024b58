# Counts in a word of memory and in a register at once.
#
# In:   rdi  the word
#       rbx  the mailbox: leave when its first word is not 0
# Out:  r8   what the word should say

        .intel_syntax noprefix
again:  inc     qword ptr [rdi]
        inc     r8
        cmp     qword ptr [rbx], 0
        je      again
        out     0x10, al
