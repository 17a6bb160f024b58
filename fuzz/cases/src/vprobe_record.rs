//! Registration records of any content, as they are and with a valid checksum.

use ebb_units::{Gfn, Gpa};
use ebb_vprobe::{Kind, MAGIC, RECORD_WORDS, Record};
use testkit::vprobe::seal;

const AT: Gpa = Gpa(0x7654_3000);

/// Runs one input: the record's first bytes.
pub fn run(data: &[u8]) {
    let mut words = [0; RECORD_WORDS];
    for (word, bytes) in words.iter_mut().zip(data.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(whole);
    }
    read(&words);
    (words[0], words[3]) = (MAGIC, AT.0);
    seal(&mut words);
    read(&words);
}

fn read(words: &[u64; RECORD_WORDS]) {
    let record = match Record::parse(words, AT) {
        Ok(record) => record,
        Err(error) => {
            let _ = (error.to_string(), error.answer());
            return;
        }
    };
    assert!(record.page_at(Gfn(u64::MAX)).is_none());
    let bytes = record.page_size().bytes() as u64;
    let mut described = Gfn(0);
    for (index, range) in record.ranges().iter().enumerate() {
        assert!(described <= range.frames.start && range.frames.count > 0);
        described = range.frames.end();
        assert_eq!(range.end.0 - range.start.0, range.frames.count * bytes);
        let last = Gfn(described.0 - 1);
        assert_eq!(record.page_at(range.frames.start), Some(range.start));
        assert_eq!(record.page_at(last), Some(Gpa(range.end.0 - bytes)));
        for other in &record.ranges()[..index] {
            assert!(range.end <= other.start || other.end <= range.start);
        }
    }
    for kind in [Kind::PageFree, Kind::PageOrder] {
        match record.helper(kind) {
            Ok(helper) => {
                let mut values = Vec::new();
                helper.evaluate(&[0; 512], &mut values);
                assert_eq!(values.len(), 512 / record.page_size().words());
            }
            Err(refusal) => assert!(refusal.offset < 64 && !refusal.instruction.is_empty()),
        }
    }
}
