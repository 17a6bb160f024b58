//! What the host can tell of a registration, without Ebb.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use ebb_units::{FRAME_BYTES, FrameRange, Gfn, Gpa};
use ebb_vm::Ram;
use ebb_vprobe::{
    ACKNOWLEDGEMENT_AT, ANSWER_AT, Answer, Kind, MetadataRange, RECORD_WORDS, Record, may_be_record,
};

/// A record in a VM's memory.
pub struct Registration {
    pub at: Gpa,
    pub record: Record,
}

impl Registration {
    /// Finds the only record.
    pub fn find(ram: &Ram) -> Registration {
        let pages = ram.regions().flat_map(|region| region.frames().frames());
        let begins = |gfn: &Gfn| ram.word(gfn.gpa()).is_some_and(may_be_record);
        let read = |gfn: Gfn| Some((gfn.gpa(), Record::parse(&page(ram, gfn), gfn.gpa()).ok()?));
        let found: Vec<(Gpa, Record)> = pages.filter(begins).filter_map(read).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        let (at, record) = found.into_iter().next().expect("a record");
        let is_ram = |frames: FrameRange| ram.range(frames).is_some();
        record.check_ram(is_ram).expect("metadata in RAM");
        Registration { at, record }
    }

    /// Reads the record again.
    pub fn now(&self, ram: &Ram) -> Record {
        Record::parse(&page(ram, self.at.gfn()), self.at).expect("a record")
    }

    /// Answers as the host does: accepted.
    pub fn accept(&self, ram: &Ram) {
        let answer = ram.half_words(Gpa(self.at.0 + ANSWER_AT), 1).expect("a record");
        answer[0].store(Answer::Accepted.code(), Ordering::Release);
        self.acknowledge(ram, self.record.token());
    }

    /// Writes an acknowledgement.
    pub fn acknowledge(&self, ram: &Ram, token: u64) {
        let place = ram.words(Gpa(self.at.0 + ACKNOWLEDGEMENT_AT), 1).expect("a record");
        place[0].store(token, Ordering::Release);
    }

    /// All free blocks, as the helpers tell: the first frame, and the order.
    ///
    /// # Panics
    /// A block is misaligned, overlaps another one, or has frames that are not registered.
    pub fn free_blocks(&self, ram: &Ram) -> BTreeMap<Gfn, u64> {
        let mut blocks = BTreeMap::new();
        self.record.ranges().iter().for_each(|range| self.add_blocks(ram, range, &mut blocks));
        let mut end = 0;
        for (&Gfn(first), &order) in &blocks {
            assert!(order <= self.record.max_order().into(), "order {order} at {first}");
            assert!(first.is_multiple_of(1 << order) && first >= end, "order {order} at {first}");
            end = first + (1 << order);
            let last = Gfn(end - 1);
            assert!(self.record.page_at(last).is_some(), "order {order} at {first}");
        }
        blocks
    }

    fn add_blocks(&self, ram: &Ram, range: &MetadataRange, to: &mut BTreeMap<Gfn, u64>) {
        let helper = |kind| self.record.helper(kind).expect("an accepted helper");
        let metadata = metadata(ram, range);
        let (mut is_free, mut order) = (Vec::new(), Vec::new());
        helper(Kind::PageFree).evaluate(&metadata, &mut is_free);
        helper(Kind::PageOrder).evaluate(&metadata, &mut order);
        assert_eq!((is_free.len() as u64, order.len()), (range.frames.count, is_free.len()));
        let values = range.frames.frames().zip(is_free.into_iter().zip(order));
        to.extend(values.filter(|(_, (free, _))| *free == 1).map(|(gfn, (_, order))| (gfn, order)));
    }
}

fn page(ram: &Ram, gfn: Gfn) -> [u64; RECORD_WORDS] {
    let mut bytes = [0; FRAME_BYTES as usize];
    ram.read(FrameRange::new(gfn, 1), &mut bytes).expect("RAM");
    let (words, _) = bytes.as_chunks::<8>();
    std::array::from_fn(|index| u64::from_le_bytes(words[index]))
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
