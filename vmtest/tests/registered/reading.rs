//! What a host reads of registrations in a VM's memory, without Ebb.

use std::collections::BTreeMap;

use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use ebb_vm::Ram;
use ebb_vprobe::{Kind, MetadataRange, RECORD_WORDS, Record, may_be_record};

/// All records, by address, also withdrawn ones.
pub fn records(ram: &Ram) -> Vec<(Gpa, Record)> {
    let pages = ram.regions().flat_map(|region| region.frames().frames()).map(Gfn::gpa);
    let begins = |gpa: &Gpa| ram.word(*gpa).is_some_and(may_be_record);
    pages.filter(begins).filter_map(|gpa| Some((gpa, record_at(ram, gpa)?))).collect()
}

/// The record at an address, as it is now.
pub fn record_at(ram: &Ram, gpa: Gpa) -> Option<Record> {
    let mut bytes = [0; FRAME_BYTES as usize];
    ram.read(FrameRange::new(gpa.gfn(), 1), &mut bytes).expect("RAM");
    let (words, _) = bytes.as_chunks::<8>();
    let words: [u64; RECORD_WORDS] = std::array::from_fn(|at| u64::from_le_bytes(words[at]));
    Record::parse(&words, gpa).ok()
}

/// All free blocks, as the helpers tell: the first frame, and the order.
///
/// # Panics
/// A block is misaligned, overlaps another one, or has frames that are not registered.
pub fn free_blocks(ram: &Ram, record: &Record) -> BTreeMap<Gfn, u64> {
    let mut blocks = BTreeMap::new();
    record.ranges().iter().for_each(|range| add_blocks(ram, record, range, &mut blocks));
    let mut end = 0;
    for (&Gfn(first), &order) in &blocks {
        assert!(order <= record.max_order().into(), "order {order} at {first}");
        assert!(first.is_multiple_of(1 << order) && first >= end, "order {order} at {first}");
        end = first + (1 << order);
        let last = Gfn(end - 1);
        assert!(record.page_at(last).is_some(), "order {order} at {first}");
    }
    blocks
}

fn add_blocks(ram: &Ram, record: &Record, range: &MetadataRange, to: &mut BTreeMap<Gfn, u64>) {
    let helper = |kind| record.helper(kind).expect("an accepted helper");
    let metadata = metadata(ram, range);
    let (mut is_free, mut order) = (Vec::new(), Vec::new());
    helper(Kind::PageFree).evaluate(&metadata, &mut is_free);
    helper(Kind::PageOrder).evaluate(&metadata, &mut order);
    assert_eq!((is_free.len() as u64, order.len()), (range.frames.count, is_free.len()));
    let values = range.frames.frames().zip(is_free.into_iter().zip(order));
    to.extend(values.filter(|(_, (free, _))| *free == 1).map(|(gfn, (_, order))| (gfn, order)));
}

/// A copy of a range's metadata.
fn metadata(ram: &Ram, range: &MetadataRange) -> Vec<u64> {
    let frames = range.metadata_frames();
    let mut bytes = vec![0; frames.bytes() as usize];
    ram.read(frames, &mut bytes).expect("metadata in RAM");
    let begin = (range.start.0 - frames.start.gpa().0) as usize;
    let used = &bytes[begin..begin + (range.end.0 - range.start.0) as usize];
    used.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8"))).collect()
}
