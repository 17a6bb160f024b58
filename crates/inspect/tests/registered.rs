//! A made-up kernel that has registered its page metadata.

use ebb_inspect::{
    BuddyBlock, ChosenBlocks, FreeBlocks, GuestMemory, NotRegistered, Registered, Request,
    answer_record, find_records, may_hold_record,
};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_units::{FrameRange, Gfn, Gpa};
use ebb_vprobe::{ACKNOWLEDGEMENT_AT, Answer, STATE_AT};
use testkit::forge::{self, Forge};
use testkit::vprobe::Registration;

/// Where the record is.
const AT: Gpa = Gpa(0x78_0000);
/// Offset of the order in `struct page`.
const PRIVATE: u64 = 40;
const NO_RESERVE: Request = Request { min_order: 6, reserve_bytes: 0, want_bytes: u64::MAX };

fn registration() -> Registration {
    forge::registration(AT)
}

fn write(forge: &Forge, at: Gpa, registration: &Registration) {
    for (index, word) in (0..).zip(registration.words(at.0)) {
        forge.mem.set(Gpa(at.0 + 8 * index), word);
    }
}

/// A kernel with free blocks that has registered.
fn registered() -> (Forge, Registered) {
    let forge = Forge::with_free_blocks(4);
    write(&forge, AT, &registration());
    let registered = Registered::read(&forge.mem, AT).expect("a valid record");
    (forge, registered)
}

fn victims(
    forge: &Forge,
    registered: &Registered,
    request: Request,
) -> (Vec<BuddyBlock>, ChosenBlocks) {
    let mut blocks = Vec::new();
    let chosen = registered.victims(&forge.mem, request, &mut blocks);
    assert_eq!(chosen.bytes, blocks.iter().map(|block| block.frames().bytes()).sum::<u64>());
    (blocks, chosen)
}

fn block(head: u64, order: u8) -> BuddyBlock {
    BuddyBlock { head: Gfn(head), order }
}

#[test]
fn all_free_blocks_are_found_from_the_highest_down() {
    let (forge, registered) = registered();
    let of_nine = [15, 14, 13].map(|index| block(index * 1024, 9));
    let of_ten = (4..=12).rev().map(|index| block(index * 1024, 10));
    let expected: Vec<BuddyBlock> = of_nine.into_iter().chain(of_ten).collect();
    assert_eq!(victims(&forge, &registered, NO_RESERVE).0, expected);
    let ten = Request { min_order: 10, ..NO_RESERVE };
    assert_eq!(victims(&forge, &registered, ten).0, expected[3..]);
    let some = Request { want_bytes: 5 << 20, ..NO_RESERVE };
    assert_eq!(victims(&forge, &registered, some).0, expected[..3]);
}

#[test]
fn the_lowest_blocks_are_left_to_the_guest() {
    let (forge, registered) = registered();
    let request = Request { reserve_bytes: 6 << 20, ..NO_RESERVE };
    let (blocks, chosen) = victims(&forge, &registered, request);
    assert_eq!(chosen.reserved_bytes, 8 << 20);
    assert_eq!(blocks.last(), Some(&block(6 * 1024, 10)));
    let all = Request { reserve_bytes: u64::MAX, ..NO_RESERVE };
    assert_eq!(victims(&forge, &registered, all).0, []);
}

#[test]
fn a_head_is_read_anew_each_time() {
    let (forge, registered) = registered();
    let metadata = Gpa(forge::MEMMAP.0 + 4096 * forge::PAGE_BYTES).gfn();
    let head = registered.head(&forge.mem, Gfn(4096)).expect("a free block");
    assert_eq!((head.order, head.metadata), (10, metadata));
    assert_eq!(registered.head(&forge.mem, Gfn(4097)), None);
    forge.mem.set(forge.page(Gfn(4096), PRIVATE), 9);
    assert_eq!(registered.head(&forge.mem, Gfn(4096)).map(|head| head.order), Some(9));
}

/// An order above the record's greatest, one of which the head is not aligned, and one that leads
/// behind the range.
#[test]
fn impossible_blocks_are_none() {
    let (mut forge, registered) = registered();
    for (head, order) in [(4096, 11), (4096 + 512, 10), (4096, u64::MAX), (15 * 1024, 64)] {
        forge.free_list(0, 9, 0, &[Gfn(head)]);
        forge.mem.set(forge.page(Gfn(head), PRIVATE), order);
        assert_eq!(registered.head(&forge.mem, Gfn(head)), None, "{head} {order}");
    }
}

#[test]
fn blocks_within_a_block_are_not_counted_twice() {
    let (mut forge, registered) = registered();
    let before = victims(&forge, &registered, NO_RESERVE).1;
    forge.free_list(0, 6, 0, &[Gfn(4096 + 64), Gfn(4096 + 512)]);
    assert_eq!(victims(&forge, &registered, NO_RESERVE).1, before);
}

/// A head whose metadata lies in two frames can be taken by a write to either.
#[test]
fn a_block_with_metadata_in_two_frames_is_left_alone() {
    let forge = Forge::new(4);
    let odd = |page_bytes: u16| {
        let frames = 4096;
        let end = forge::MEMMAP.0 + frames * u64::from(page_bytes);
        let ranges = vec![[forge::MEMMAP.0, end, 0, frames]];
        // mov rax, [rdi]; ret
        let code = vec![0x48, 0x8b, 0x07, 0xc3];
        let (page_free, page_order) = (code.clone(), code);
        let base = registration();
        let odd = Registration { page_bytes, ranges, page_free, page_order, ..base };
        write(&forge, AT, &odd);
        Registered::read(&forge.mem, AT).expect("a valid record")
    };
    assert_eq!([8, 40, 64, 96, 512].map(|bytes| odd(bytes).least_order()), [9, 7, 6, 6, 3]);
    let of_56 = odd(56);
    let frame_of = |gfn| of_56.metadata_frame(Gfn(gfn));
    assert_eq!(frame_of(72), Some(forge::MEMMAP.gfn()));
    assert_eq!(frame_of(73), None);
    assert_eq!(frame_of(74), Some(Gfn(forge::MEMMAP.gfn().0 + 1)));
    assert_eq!(frame_of(4096), None);
}

#[test]
fn a_withdrawn_or_replaced_record_is_not_in_force() {
    let (forge, registered) = registered();
    assert!(registered.is_in_force(&forge.mem));
    let state = Gpa(AT.0 + STATE_AT / 8 * 8);
    let word = forge.mem.word(state).expect("RAM");
    forge.mem.set(state, word & u64::from(u32::MAX) | 2 << 32);
    assert!(!registered.is_in_force(&forge.mem));
    assert_eq!(Registered::read(&forge.mem, AT).err(), Some(NotRegistered::Withdrawn));
    forge.mem.set(state, word);
    assert!(registered.is_in_force(&forge.mem));
    write(&forge, AT, &Registration { token: 5, ..registration() });
    assert!(!registered.is_in_force(&forge.mem));
    let other = Registered::read(&forge.mem, AT).expect("a valid record");
    assert_ne!(other.digest(), registered.digest());
}

#[test]
fn an_answer_goes_only_to_the_record_that_was_read() {
    let (forge, registered) = registered();
    assert!(registered.answer(&forge.mem, Answer::Accepted));
    let acknowledgement = forge.mem.word(Gpa(AT.0 + ACKNOWLEDGEMENT_AT));
    assert_eq!(acknowledgement, Some(registration().token));
    // The answer is no part of what is sealed.
    assert_eq!(Registered::read(&forge.mem, AT).as_ref(), Ok(&registered));
    assert!(answer_record(&forge.mem, AT, registration().token, None), "it is taken back");
    assert!(!answer_record(&forge.mem, AT, registration().token, None), "it was taken back");
    assert_eq!(forge.mem.word(Gpa(AT.0 + ACKNOWLEDGEMENT_AT)), Some(0));
    write(&forge, AT, &Registration { token: 5, ..registration() });
    assert!(!registered.answer(&forge.mem, Answer::Accepted));
    assert_eq!(forge.mem.word(Gpa(AT.0 + ACKNOWLEDGEMENT_AT)), Some(0));
}

#[test]
fn a_withdrawn_record_is_not_answered() {
    let (forge, registered) = registered();
    let state = Gpa(AT.0 + STATE_AT / 8 * 8);
    let word = forge.mem.word(state).expect("RAM");
    forge.mem.set(state, word & u64::from(u32::MAX) | 2 << 32);
    assert!(!registered.answer(&forge.mem, Answer::Accepted));
    assert_eq!(forge.mem.word(Gpa(AT.0 + ACKNOWLEDGEMENT_AT)), Some(0));
}

/// All of it would be kept resident, and read by every look.
#[test]
fn more_metadata_than_ram_can_have_is_refused() {
    let forge = Forge::new(4);
    let of = |bytes: u16, frames: u64| {
        let end = forge::MEMMAP.0 + frames * u64::from(bytes);
        // mov rax, [rdi]; ret
        let code = vec![0x48, 0x8b, 0x07, 0xc3];
        let (page_free, page_order) = (code.clone(), code);
        let ranges = vec![[forge::MEMMAP.0, end, 0, frames]];
        let base = registration();
        write(
            &forge,
            AT,
            &Registration { page_bytes: bytes, ranges, page_free, page_order, ..base },
        );
        Registered::read(&forge.mem, AT).err()
    };
    let too_much = |error| matches!(error, Some(NotRegistered::TooMuch { .. }));
    assert_eq!(of(8, 2 * forge::FRAMES), None);
    assert!(too_much(of(8, 2 * forge::FRAMES + 1)));
    assert_eq!(of(512, forge::FRAMES), None);
    assert!(too_much(of(512, forge::FRAMES + 8)));
}

#[test]
fn only_the_kernels_page_tables_map_the_record() {
    let (forge, registered) = registered();
    assert!(registered.is_mapped_by(&forge.mem, forge::ROOT.0, 4));
    // The low bits of CR3 name no address.
    assert!(registered.is_mapped_by(&forge.mem, forge::ROOT.0 | 0xfff, 4));
    let of_process = forge::ROOT.0 | 0x1000;
    assert_ne!(of_process, forge::ROOT.0);
    assert!(registered.may_be_mapped_by(&forge.mem, of_process, 4));
    assert!(!registered.is_mapped_by(&forge.mem, of_process, 4));
    assert!(!registered.is_mapped_by(&forge.mem, forge::ROOT.0, 5));
    assert!(!registered.is_mapped_by(&forge.mem, 0, 4));
}

#[test]
fn records_at_armed_addresses_are_found_first_however_many_others_there_are() {
    let (forge, _) = registered();
    let is_armed =
        |_: Gpa, words: &[AtomicU64]| words[4].load(Relaxed) == registration().virtual_address;
    for frame in 2048..2248 {
        let va = 0xffff_c900_0000_0000;
        write(&forge, Gfn(frame).gpa(), &Registration { virtual_address: va, ..registration() });
    }
    let late = Gfn(2300).gpa();
    write(&forge, late, &registration());
    let found = find_records(&forge.mem, &is_armed);
    assert_eq!(found[..2], [AT, late]);
    assert_eq!(found.len(), 2 + ebb_inspect::RECORDS_MAX);
    assert!(may_hold_record(&forge.mem, AT.gfn()) && !may_hold_record(&forge.mem, Gfn(2301)));
}

#[test]
fn what_each_look_reads_is_needed() {
    let (_, registered) = registered();
    let memmap = FrameRange::new(forge::MEMMAP.gfn(), forge::FRAMES * forge::PAGE_BYTES / 4096);
    assert_eq!(registered.needed_frames(), [FrameRange::new(AT.gfn(), 1), memmap]);
}
