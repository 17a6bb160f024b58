//! A registration of this system, answered without Ebb.

use std::array;
use std::sync::atomic::Ordering;

use ebb_units::{FrameRange, Gpa};
use ebb_vm::Ram;
use ebb_vprobe::{ACKNOWLEDGEMENT_AT, ANSWER_AT, Answer, RECORD_WORDS, Record};
use testkit::vprobe::seal;

use crate::reading;

/// A record in a VM's memory.
pub struct Registration {
    pub at: Gpa,
    pub record: Record,
}

impl Registration {
    /// Finds the only record.
    pub fn find(ram: &Ram) -> Registration {
        let found = reading::records(ram);
        assert_eq!(found.len(), 1, "{found:?}");
        let (at, record) = found.into_iter().next().expect("a record");
        let is_ram = |frames: FrameRange| ram.range(frames).is_some();
        record.check_ram(is_ram).expect("metadata in RAM");
        Registration { at, record }
    }

    /// Reads the record again.
    pub fn now(&self, ram: &Ram) -> Record {
        reading::record_at(ram, self.at).expect("a record")
    }

    /// Answers as the host does: accepted.
    pub fn accept(&self, ram: &Ram) {
        let answer = ram.half_words(Gpa(self.at.0 + ANSWER_AT), 1).expect("a record");
        answer[0].store(Answer::Accepted.code(), Ordering::Release);
        self.acknowledge(ram, self.record.token());
    }

    /// Changes the record in place, as a hostile kernel could, and gives it the right checksum.
    pub fn forge(&self, ram: &Ram, change: impl FnOnce(&mut [u64; RECORD_WORDS])) {
        let place = ram.words(self.at, RECORD_WORDS).expect("a record");
        let mut words: [u64; RECORD_WORDS] =
            array::from_fn(|index| place[index].load(Ordering::Acquire));
        change(&mut words);
        seal(&mut words);
        for (word, value) in place.iter().zip(words) {
            word.store(value, Ordering::Release);
        }
    }

    /// Writes an acknowledgement.
    pub fn acknowledge(&self, ram: &Ram, token: u64) {
        let place = ram.words(Gpa(self.at.0 + ACKNOWLEDGEMENT_AT), 1).expect("a record");
        place[0].store(token, Ordering::Release);
    }

    /// Whether the host's acknowledgement is in the record.
    pub fn is_acknowledged(&self, ram: &Ram) -> bool {
        let place = ram.words(Gpa(self.at.0 + ACKNOWLEDGEMENT_AT), 1).expect("a record");
        place[0].load(Ordering::Acquire) == self.record.token()
    }
}
