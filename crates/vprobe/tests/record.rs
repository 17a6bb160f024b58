//! Records as a guest writes them, and as a hostile guest writes them.

use ebb_units::{FrameRange, Gfn, Gpa};
use ebb_vprobe::*;
use proptest::prelude::*;
use testkit::vprobe::{PAGE_FREE, PAGE_ORDER, Registration, seal};

const AT: Gpa = Gpa(0x1234_5000);
/// Page metadata of 2 GiB: 2^19 frames, 64 bytes each.
const LOW: [u64; 4] = [0x4000_0000, 0x4200_0000, 0, 0x8_0000];
const HIGH: [u64; 4] = [0x3000_0000, 0x3100_0000, 0x10_0000, 0x14_0000];

type Words = [u64; RECORD_WORDS];

fn registration() -> Registration {
    Registration { ranges: vec![LOW, HIGH], ..Registration::default() }
}

fn parse(registration: &Registration) -> Result<Record, RecordError> {
    Record::parse(&registration.words(AT.0), AT)
}

/// Returns the error of a record that was changed before it was sealed.
fn error_of(change: impl FnOnce(&mut Words)) -> RecordError {
    let mut words = registration().words(AT.0);
    change(&mut words);
    seal(&mut words);
    Record::parse(&words, AT).expect_err("the record is invalid")
}

fn set_byte(words: &mut Words, at: usize, value: u8) {
    let mut bytes = words[at / 8].to_le_bytes();
    bytes[at % 8] = value;
    words[at / 8] = u64::from_le_bytes(bytes);
}

#[test]
fn a_record_says_what_was_registered() {
    let record = parse(&registration()).unwrap();
    assert_eq!(record.token(), registration().token);
    assert_eq!(record.virtual_address(), registration().virtual_address);
    assert_eq!(record.state(), State::Registered);
    assert_eq!(record.page_size().bytes(), 64);
    assert_eq!(record.max_order(), 10);
    assert_eq!(record.code(Kind::PageFree), PAGE_FREE);
    assert_eq!(record.code(Kind::PageOrder), PAGE_ORDER);
    let [low, high] = record.ranges() else { panic!("two ranges") };
    assert_eq!((low.start, low.end), (Gpa(LOW[0]), Gpa(LOW[1])));
    assert_eq!(low.frames, FrameRange::new(Gfn(0), 0x8_0000));
    assert_eq!(high.metadata_frames(), FrameRange::new(Gfn(0x3_0000), 0x1000));
    for kind in [Kind::PageFree, Kind::PageOrder] {
        record.helper(kind).unwrap();
    }
}

#[test]
fn frames_are_found_by_number() {
    let record = parse(&registration()).unwrap();
    let found = |gfn| record.page_at(Gfn(gfn)).map(|gpa| gpa.0);
    assert_eq!(found(0), Some(0x4000_0000));
    assert_eq!(found(0x7_ffff), Some(0x4200_0000 - 64));
    assert_eq!(found(0x8_0000), None);
    assert_eq!(found(0x10_0000), Some(0x3000_0000));
    assert_eq!(found(0x13_ffff), Some(0x3100_0000 - 64));
    assert_eq!(found(0x14_0000), None);
    assert_eq!(found(u64::MAX), None);
}

#[test]
fn one_range_takes_232_bytes() {
    let one = Registration { ranges: vec![LOW], ..Registration::default() };
    assert_eq!(one.words(AT.0)[1] >> 32, 232);
    parse(&one).unwrap();
}

#[test]
fn a_record_holds_121_ranges() {
    let range = |index: u64| [index * 4096, (index + 1) * 4096, index * 64, (index + 1) * 64];
    let with = |count| Registration { ranges: (0..count).map(range).collect(), ..registration() };
    assert_eq!(parse(&with(121)).unwrap().ranges().len(), 121);
    assert_eq!(parse(&with(122)), Err(RecordError::Length(4104)));
}

#[test]
fn fields_that_change_later_are_not_sealed() {
    let mut words = registration().words(AT.0);
    words[5] = words[5] & 0xffff_ffff | 2 << 32;
    words[6] = u64::MAX;
    words[7] |= 0xffff_ffff;
    words[511] = 1;
    assert_eq!(Record::parse(&words, AT).unwrap().state(), State::Withdrawn);
}

#[test]
fn another_page_is_no_record() {
    assert!(may_be_record(registration().words(AT.0)[0]) && !may_be_record(0));
    let mut words = registration().words(AT.0);
    words[0] ^= 1;
    assert_eq!(Record::parse(&words, AT), Err(RecordError::Magic));
    assert_eq!(Record::parse(&[0; 512], AT), Err(RecordError::Magic));
    for length in [0, 56, 63, 233, 4104, u64::from(u32::MAX)] {
        let error = error_of(|words| words[1] = 1 | length << 32);
        assert_eq!(error, RecordError::Length(length as usize));
        assert_eq!(error.answer(), None);
    }
}

#[test]
fn a_copy_elsewhere_is_no_record() {
    let words = registration().words(AT.0);
    let error = Record::parse(&words, Gpa(AT.0 + 4096)).unwrap_err();
    assert_eq!(error, RecordError::OwnAddress(AT));
    assert_eq!(error.answer(), None);
}

#[test]
fn any_changed_bit_is_noticed() {
    let words = registration().words(AT.0);
    let used = (words[1] >> 32) as usize / 8;
    // Bytes 40 to 59 are not sealed.
    for bit in (64..used * 64).filter(|bit| !(320..480).contains(bit)) {
        let mut changed = words;
        changed[bit / 64] ^= 1 << (bit % 64);
        let error = Record::parse(&changed, AT).expect_err("a changed bit");
        assert!(matches!(error, RecordError::Checksum | RecordError::Length(_)), "{bit}: {error}");
        assert_eq!(error.answer(), None);
    }
}

#[test]
fn a_token_of_zero_names_nothing() {
    let error = error_of(|words| words[2] = 0);
    assert_eq!((error, error.answer()), (RecordError::Token, None));
}

/// The kernel writes the state last.
#[test]
fn a_record_without_a_state_gets_no_answer_yet() {
    let error = error_of(|words| words[5] = 0);
    assert_eq!((error, error.answer()), (RecordError::State(0), None));
}

#[test]
fn invalid_fields_are_refused_one_by_one() {
    let field = |change: fn(&mut Words), expected: RecordError| {
        let error = error_of(change);
        assert_eq!(error, expected);
        assert_eq!(error.answer(), Some(Answer::Refused(Reason::Field)), "{error}");
    };
    let length = |kind, bytes| RecordError::CodeLength { kind, bytes };
    field(|words| words[4] = 0x7fff_ffff_f000, RecordError::VirtualAddress(0x7fff_ffff_f000));
    field(|words| words[4] |= 8, RecordError::VirtualAddress(0xffff_c900_0001_2008));
    field(|words| words[5] = 3 << 32, RecordError::State(3));
    field(|words| set_byte(words, 60, 0), RecordError::PageBytes(0));
    field(|words| set_byte(words, 60, 60), RecordError::PageBytes(60));
    field(|words| set_byte(words, 61, 2), RecordError::PageBytes(576));
    field(|words| set_byte(words, 62, 21), RecordError::MaxOrder(21));
    field(|words| set_byte(words, 64, 0), length(Kind::PageFree, 0));
    field(|words| set_byte(words, 65, 65), length(Kind::PageOrder, 65));
    field(|words| set_byte(words, 66, 1), RecordError::Reserved);
    field(|words| set_byte(words, 71, 1), RecordError::Reserved);
    field(|words| set_byte(words, 72 + 17, 1), RecordError::Reserved);
    field(|words| set_byte(words, 199, 1), RecordError::Reserved);
}

#[test]
fn other_versions_are_told_so() {
    let error = error_of(|words| words[1] += 1);
    assert_eq!(error, RecordError::Version(2));
    assert_eq!(error.answer(), Some(Answer::Refused(Reason::Version)));
}

#[test]
fn invalid_ranges_are_refused_one_by_one() {
    let refused = |ranges: Vec<[u64; 4]>| {
        let error = parse(&Registration { ranges, ..registration() }).unwrap_err();
        assert_eq!(error.answer(), Some(Answer::Refused(Reason::Ranges)), "{error}");
        error
    };
    let fault = |range| match refused(vec![LOW, range]) {
        RecordError::Range { index: 1, fault } => fault,
        other => panic!("{other}"),
    };
    assert_eq!(refused(vec![]), RecordError::RangeCount { count: 0, length: 200 });
    let error = error_of(|words| set_byte(words, 63, 1));
    assert_eq!(error, RecordError::RangeCount { count: 1, length: 264 });

    let [start, end, first, last] = HIGH;
    assert_eq!(fault([start + 4, end + 4, first, last]), RangeFault::Address);
    assert_eq!(fault([end, start, first, last]), RangeFault::Address);
    assert_eq!(fault([start, start, first, last]), RangeFault::Address);
    assert_eq!(fault([start, (1 << 52) + 8, first, last]), RangeFault::Address);
    assert_eq!(fault([start, end, last, first]), RangeFault::Frames);
    assert_eq!(fault([start, end, first, first]), RangeFault::Frames);
    assert_eq!(fault([start, end, first, (1 << 40) + 1]), RangeFault::Frames);
    assert_eq!(fault([start, end + 8, first, last]), RangeFault::Size);
    assert_eq!(fault([start, end, first, last + 1]), RangeFault::Size);
    assert_eq!(fault([0, !7, 0, u64::MAX]), RangeFault::Address);
    assert_eq!(fault([start, end, 0, last - first]), RangeFault::Order);
    assert_eq!(fault([start, end, LOW[3] - 1, LOW[3] - 1 + last - first]), RangeFault::Order);
    assert_eq!(fault([LOW[1] - 64, LOW[1] - 64 + end - start, first, last]), RangeFault::Overlap);
    assert_eq!(fault([LOW[0] - (end - start) + 64, LOW[0] + 64, first, last]), RangeFault::Overlap);
}

#[test]
fn metadata_must_lie_in_ram() {
    let record = parse(&registration()).unwrap();
    record.check_ram(|frames| frames.end() <= Gfn(0x4_2000)).unwrap();
    let error = record.check_ram(|frames| frames.end() < Gfn(0x4_2000)).unwrap_err();
    assert_eq!(error, RecordError::Range { index: 0, fault: RangeFault::OutsideRam });
    assert_eq!(error.answer(), Some(Answer::Refused(Reason::OutsideRam)));
    // Metadata that begins and ends within a frame needs that frame.
    let odd = [0x5008, 0x5008 + 64 * 64, 0, 64];
    let record = parse(&Registration { ranges: vec![odd], ..registration() }).unwrap();
    assert_eq!(record.ranges()[0].metadata_frames(), FrameRange::new(Gfn(5), 2));
}

#[test]
fn answers_are_numbers() {
    assert_eq!(Answer::Accepted.code(), 1);
    assert_eq!(Answer::Refused(Reason::Version).code(), 0x0102);
    assert_eq!(Answer::Refused(Reason::Host).code(), 0x0702);
    let code = [0x8b, 0x47, 0x30, 0x89, 0x07, 0xc3];
    let record = parse(&Registration { page_order: code.to_vec(), ..registration() }).unwrap();
    let refusal = record.helper(Kind::PageOrder).unwrap_err();
    assert_eq!(Answer::Refused(refusal.reason(Kind::PageOrder)).code(), 0x0303_0602);
}

proptest! {
    #[test]
    fn records_of_any_content_are_refused_or_hold(
        changes in prop::collection::vec((8usize..264, any::<u8>()), 0..3),
        ranges in prop::collection::vec((0u64..20, 1u64..4, 0u64..20), 0..4),
    ) {
        let range = |(page, pages, frames): (u64, u64, u64)| {
            [page * 4096, (page + pages) * 4096, frames * 64, (frames + pages) * 64]
        };
        let ranges = ranges.into_iter().map(range).collect();
        let mut words = Registration { ranges, ..Registration::default() }.words(AT.0);
        for (at, value) in changes {
            set_byte(&mut words, at, value);
        }
        seal(&mut words);
        let Ok(record) = Record::parse(&words, AT) else { return Ok(()) };
        let bytes = record.page_size().bytes() as u64;
        let ranges = record.ranges();
        prop_assert!(!ranges.is_empty());
        for (index, range) in ranges.iter().enumerate() {
            prop_assert_eq!(range.end.0 - range.start.0, range.frames.count * bytes);
            for later in &ranges[index + 1..] {
                prop_assert!(range.frames.end() <= later.frames.start);
                prop_assert!(range.end <= later.start || later.end <= range.start);
            }
            let last = Gfn(range.frames.end().0 - 1);
            prop_assert_eq!(record.page_at(range.frames.start), Some(range.start));
            prop_assert_eq!(record.page_at(last), Some(Gpa(range.end.0 - bytes)));
        }
    }
}
