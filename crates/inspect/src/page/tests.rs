//! Tests of what a `struct page` tells, by kernel.

use super::*;
use ebb_units::Gpa;

const COMMON: &str = "SIZE(page)=64\nOFFSET(page.flags)=0\nOFFSET(page.lru)=8\n\
    OFFSET(page.mapping)=24\nOFFSET(page.private)=40\nOFFSET(page._mapcount)=48\n\
    LENGTH(zone.free_area)=11\n";
const SMALL_BITS: &str = "OFFSET(page.compound_head)=8\nOFFSET(page.compound_dtor)=16\n\
    NUMBER(PG_slab)=9\nNUMBER(PG_head_mask)=65536\nNUMBER(HUGETLB_PAGE_DTOR)=2\n\
    NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=-129\nNUMBER(PAGE_OFFLINE_MAPCOUNT_VALUE)=-257\n";
/// A note of 6.11: bits from the top, still cleared to mark a type.
const LARGE_BITS: &str = "OFFSET(page.compound_head)=8\nNUMBER(PG_head_mask)=64\n\
    NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=-1073741825\n\
    NUMBER(PAGE_OFFLINE_MAPCOUNT_VALUE)=-536870913\n\
    NUMBER(PAGE_HUGETLB_MAPCOUNT_VALUE)=-67108865\n\
    NUMBER(PAGE_SLAB_MAPCOUNT_VALUE)=-33554433\n";
const TOP_BYTE: &str = "OFFSET(page.compound_info)=8\nNUMBER(PG_head_mask)=64\n\
    NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=-268435456\n\
    NUMBER(PAGE_OFFLINE_MAPCOUNT_VALUE)=-251658240\n\
    NUMBER(PAGE_HUGETLB_MAPCOUNT_VALUE)=-201326592\n\
    NUMBER(PAGE_SLAB_MAPCOUNT_VALUE)=-184549376\n";

fn layout(release: &str, lines: &str) -> PageLayout {
    let text = format!("OSRELEASE={release}\n{COMMON}{lines}");
    let note = Note::parse(Gpa(0), text.into()).expect("a note");
    PageLayout::new(&note).expect("a known layout")
}

/// A page in use, of no particular kind, with the given words by offset.
fn page(words: &[(usize, u64)]) -> PageWords {
    let page = PageWords::default();
    page[6].store(0xffff_ffff, Relaxed);
    for &(offset, word) in words {
        page[offset / 8].store(word, Relaxed);
    }
    page
}

fn typed(layout: &PageLayout, kind: u32) -> PageKind {
    layout.decode(&page(&[(48, kind.into()), (40, 9)]), None)
}

#[test]
fn page_types_of_each_kernel() {
    let free = PageKind::Free { order: 9 };
    let small = [(!0x80, free), (!0x100, PageKind::Offline)];
    for (release, table, lines) in [
        ("5.10.0-32-cloud-amd64", !0x400, SMALL_BITS),
        ("5.11.0", !0x200, SMALL_BITS),
        ("6.1.0-50-cloud-amd64", !0x200, SMALL_BITS),
    ] {
        let layout = layout(release, lines);
        for (kind, want) in small.into_iter().chain([(table, PageKind::Table)]) {
            assert_eq!(typed(&layout, kind), want, "{release} {kind:#x}");
        }
    }
    // 5.10 marks pages charged to a cgroup with the bit that later marks a page table.
    assert_eq!(typed(&layout("5.10.0", SMALL_BITS), !0x200), PageKind::Other);
    assert_eq!(typed(&layout("5.10.0", SMALL_BITS), !0x600), PageKind::Table);

    let later = layout("6.11.0", LARGE_BITS);
    let newest = layout("6.12.107", TOP_BYTE);
    for (bit, byte, want) in [
        (0x4000_0000u32, 0xf0u32, free),
        (0x2000_0000, 0xf1, PageKind::Offline),
        (0x1000_0000, 0xf2, PageKind::Table),
        (0x0800_0000, 0xf3, PageKind::Other),
        (0x0400_0000, 0xf4, PageKind::Hugetlb),
        (0x0200_0000, 0xf5, PageKind::Slab),
    ] {
        assert_eq!(typed(&later, !bit), want, "6.11 {bit:#x}");
        assert_eq!(typed(&newest, byte << 24), want, "6.12 {byte:#x}");
    }
    // The low bits belong to the type.
    assert_eq!(typed(&newest, 0xf500_0007), PageKind::Slab);
}

#[test]
fn flags_and_second_pages_of_older_kernels() {
    let layout = layout("6.1.0", SMALL_BITS);
    let (slab, head) = (1 << 9, 65536);
    assert_eq!(layout.decode(&page(&[(0, slab)]), None), PageKind::Slab);
    let (first, second) = (page(&[(0, head)]), page(&[(8, 1), (16, 2)]));
    assert_eq!(layout.decode(&first, Some(&second)), PageKind::Hugetlb);
    assert_eq!(layout.decode(&first, None), PageKind::Other);
    assert_eq!(layout.decode(&first, Some(&page(&[(8, 1), (16, 1)]))), PageKind::Other);
    assert_eq!(layout.decode(&second, None), PageKind::Tail);
    assert_eq!(layout.decode(&page(&[]), Some(&second)), PageKind::Other);
}

#[test]
fn hugetlb_by_a_flag_of_the_second_page() {
    let lines = SMALL_BITS.replace("HUGETLB_PAGE_DTOR)=2", "PG_hugetlb)=8");
    let layout = layout("6.6.0", &lines);
    let first = page(&[(0, 65536)]);
    assert_eq!(layout.decode(&first, Some(&page(&[(0, 1 << 8)]))), PageKind::Hugetlb);
    assert_eq!(layout.decode(&first, Some(&page(&[(0, 1 << 7)]))), PageKind::Other);
}

#[test]
fn anonymous_and_file_by_mapping() {
    let layout = layout("6.12.0", TOP_BYTE);
    let pointer = 0xffff_8880_1234_5000;
    let kind = |mapcount, flags, mapping| {
        layout.decode(&page(&[(0, flags), (48, mapcount), (24, mapping)]), None)
    };
    assert_eq!(kind(0, 0, pointer | 1), PageKind::Anonymous);
    assert_eq!(kind(3, 0, pointer | 3), PageKind::Anonymous);
    assert_eq!(kind(0xffff_ffff, 0, pointer | 1), PageKind::Other, "not mapped");
    assert_eq!(kind(0xffff_ffff, 64, pointer | 1), PageKind::Anonymous, "a folio's head");
    assert_eq!(kind(0xffff_ffff, 0, pointer), PageKind::File);
    assert_eq!(kind(0xffff_ffff, 0, pointer | 2), PageKind::Other, "a driver's, movable");
    assert_eq!(kind(0xffff_ffff, 0, 0x1000), PageKind::Other, "no pointer");
}

#[test]
fn the_upper_half_of_a_word_is_another_field() {
    let layout = layout("6.12.0", TOP_BYTE);
    let refcount = 7 << 32;
    assert_eq!(layout.free_order(&page(&[(48, 0xf000_0000 | refcount)])), Some(0));
    assert_eq!(layout.free_order(&page(&[(48, 0xf000_0001)])), None);
}
