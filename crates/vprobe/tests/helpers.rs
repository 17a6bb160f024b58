//! Helpers as compilers make them, evaluated over many pages.

use ebb_vprobe::*;
use testkit::vprobe::{PAGE_FREE, PAGE_ORDER};

const BUDDY: u32 = 0xf000_0000;

/// Metadata of one page: its type at byte 48, beside a reference count, and its order at byte 40.
fn page(kind: u32, order: u64) -> [u64; 8] {
    [u64::MAX, 1, 2, 3, 4, order, u64::from(kind) | 7 << 32, 0x8000_0000_0000_0000]
}

fn evaluate(kind: Kind, code: &[u8], pages: &[u64]) -> Vec<u64> {
    let helper = Helper::new(kind, code, PageSize::new(64).unwrap());
    let mut values = vec![5; 3];
    helper.unwrap_or_else(|refusal| panic!("{refusal}")).evaluate(pages, &mut values);
    values
}

fn types(code: &[u8], types: &[u32]) -> Vec<u64> {
    let pages: Vec<u64> = types.iter().flat_map(|&kind| page(kind, 0)).collect();
    evaluate(Kind::PageFree, code, &pages)
}

#[test]
fn the_helpers_of_the_paper() {
    let free = [BUDDY, BUDDY | 0x7f, BUDDY | 0x80, u32::MAX, 0, 0x7000_0000, 0xff7f_ff7f];
    assert_eq!(types(&PAGE_FREE, &free), [1, 1, 0, 0, 0, 0, 1]);
    let pages: Vec<u64> = [0, 9, u64::MAX].into_iter().flat_map(|order| page(0, order)).collect();
    assert_eq!(evaluate(Kind::PageOrder, &PAGE_ORDER, &pages), [0, 9, u64::MAX]);
}

/// `PageBuddy` since Linux 6.12: the top byte of the type is 0xf0.
#[test]
fn the_type_in_the_top_byte() {
    let ways: [&[u8]; 6] = [
        // endbr64; mov eax, [rdi+48]; shr eax, 24; cmp eax, 0xf0; sete al
        &[
            0xf3, 0x0f, 0x1e, 0xfa, 0x8b, 0x47, 0x30, 0xc1, 0xe8, 0x18, 0x3d, 0xf0, 0, 0, 0, 0x0f,
            0x94, 0xc0, 0xc3,
        ],
        // cmp byte [rdi+51], 0xf0; sete al
        &[0x80, 0x7f, 0x33, 0xf0, 0x0f, 0x94, 0xc0, 0xc3],
        // xor eax, eax; cmp byte [rdi+51], 0xf0; sete al
        &[0x31, 0xc0, 0x80, 0x7f, 0x33, 0xf0, 0x0f, 0x94, 0xc0, 0xc3],
        // mov eax, [rdi+48]; and eax, 0xff000000; cmp eax, 0xf0000000; sete al; movzx eax, al
        &[
            0x8b, 0x47, 0x30, 0x25, 0, 0, 0, 0xff, 0x3d, 0, 0, 0, 0xf0, 0x0f, 0x94, 0xc0, 0x0f,
            0xb6, 0xc0, 0xc3,
        ],
        // movzx eax, byte [rdi+51]; lea eax, [rax-0xf0]; cmp eax, 1; sbb eax, eax; neg eax
        &[
            0x0f, 0xb6, 0x47, 0x33, 0x8d, 0x80, 0x10, 0xff, 0xff, 0xff, 0x83, 0xf8, 0x01, 0x19,
            0xc0, 0xf7, 0xd8, 0xc3,
        ],
        // a nop of 5 bytes; mov eax, [rdi+48]; xor eax, 0xf0000000; cmp eax, 0xffffff; setbe al
        &[
            0x0f, 0x1f, 0x44, 0x00, 0x00, 0x8b, 0x47, 0x30, 0x35, 0, 0, 0, 0xf0, 0x3d, 0xff, 0xff,
            0xff, 0, 0x0f, 0x96, 0xc0, 0xc3,
        ],
    ];
    for code in ways {
        let kinds = [BUDDY, BUDDY | 0xff_ffff, 0xf100_0000, 0xef00_0000, 0x7000_0000, 0, u32::MAX];
        assert_eq!(types(code, &kinds), [1, 1, 0, 0, 0, 0, 0], "{code:x?}");
    }
}

#[test]
fn a_bool_is_what_al_has() {
    // mov eax, [rdi+48]; al alone counts.
    let code = [0x8b, 0x47, 0x30, 0xc3];
    assert_eq!(types(&code, &[0, 1, 2, 0x100, 0x180, 0xff00]), [0, 1, 1, 0, 1, 0]);
}

#[test]
fn a_read_may_lie_in_two_words() {
    let pages = page(0xdead_beef, 0x1122_3344_5566_7788);
    let read = |code: &[u8]| evaluate(Kind::PageOrder, code, &pages);
    assert_eq!(read(&[0x48, 0x8b, 0x47, 0x2c, 0xc3]), [0xdead_beef_1122_3344]);
    assert_eq!(read(&[0x0f, 0xb7, 0x47, 0x2f, 0xc3]), [0xef11]);
    assert_eq!(read(&[0x48, 0x63, 0x47, 0x2e, 0xc3]), [0xffff_ffff_beef_1122]);
}

#[test]
fn every_page_has_its_value() {
    for count in [0, 1, 63, 64, 65, 128, 200] {
        let mut pages: Vec<u64> = (0..count).flat_map(|order| page(0, order)).collect();
        // What is no whole page is left out.
        pages.extend([9; 7]);
        let expected: Vec<u64> = (0..count).collect();
        assert_eq!(evaluate(Kind::PageOrder, &PAGE_ORDER, &pages), expected);
    }
}

#[test]
fn a_constant_is_one_for_every_page() {
    // mov eax, 3
    let code = [0xb8, 3, 0, 0, 0, 0xc3];
    assert_eq!(evaluate(Kind::PageOrder, &code, &[0; 16]), [3, 3]);
    assert_eq!(evaluate(Kind::PageFree, &code, &[0; 16]), [1, 1]);
}
