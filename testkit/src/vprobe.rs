//! What a guest registers with its host (`docs/vprobe.md`): a record, made independently of the
//! crate that reads it, and a processor that executes helpers one by one.

pub mod processor;
pub mod registration;

pub use registration::{Registration, seal};

/// The helper `page_free` in figure 6 of V-Probe's paper: the type, in the word at 48, is that of
/// a free block.
pub const PAGE_FREE: [u8; 17] = [
    0x8b, 0x47, 0x30, // mov eax, [rdi+0x30]
    0x25, 0x80, 0x00, 0x00, 0xf0, // and eax, 0xf0000080
    0x3d, 0x00, 0x00, 0x00, 0xf0, // cmp eax, 0xf0000000
    0x0f, 0x94, 0xc0, // sete al
    0xc3, // ret
];

/// The helper `page_order` there: the word at 40.
pub const PAGE_ORDER: [u8; 5] = [
    0x48, 0x8b, 0x47, 0x28, // mov rax, [rdi+0x28]
    0xc3, // ret
];
