//! The record of a VM, `vm.json`, of any content: either an error, or a record that stays the same
//! when it is written and read again.

use ebbd::Record;

/// Runs one input.
pub fn run(data: &[u8]) {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let path = directory.path().join("vm.json");
    std::fs::write(&path, data).expect("room for it");
    let Ok(Some(record)) = Record::load(directory.path()) else { return };
    let figures = |record: &Record| (record.memory_bytes(), record.compressed_bytes());
    record.save(directory.path()).expect("room for it");
    let again = Record::load(directory.path()).expect("what was written can be read");
    let again = again.expect("it is there");
    assert_eq!(figures(&again), figures(&record));
    let text = |record| serde_json::to_string(record).expect("it was read from such text");
    assert_eq!(text(&again), text(&record));
    let _ = record.life();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fuzzer begins with valid records, and daemons read what older ones wrote.
    #[test]
    fn kept_records_are_read() {
        let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/vm_json");
        for (name, is_record) in
            [("whole", true), ("of-an-older-daemon", true), ("tiers", true), ("half", false)]
        {
            let directory = tempfile::tempdir().unwrap();
            std::fs::copy(corpus.join(name), directory.path().join("vm.json")).unwrap();
            let found = Record::load(directory.path());
            assert_eq!(found.is_ok(), is_record, "{name}: {found:?}");
        }
    }
}
