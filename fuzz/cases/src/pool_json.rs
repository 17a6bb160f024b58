//! The pool's record, `pool.json`, and those of its VMs, each after a zero byte, of any content.
//! Nobody gets more than there is.

use ebbd::Record;

/// Runs one input.
pub fn run(data: &[u8]) {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let mut parts = data.split(|byte| *byte == 0);
    let pool = parts.next().unwrap_or_default();
    std::fs::write(directory.path().join("pool.json"), pool).expect("room for it");
    let record = |text: &[u8]| {
        std::fs::write(directory.path().join("vm.json"), text).expect("room for it");
        Record::load(directory.path()).ok().flatten()
    };
    let records: Vec<Record> = parts.take(8).filter_map(record).collect();
    let Ok((status, limits)) = ebbd::pool_on_record(directory.path(), &records) else { return };
    assert!(status.bytes.is_none_or(|bytes| status.free_bytes <= bytes), "{status:?}");
    for vm in &status.vms {
        assert!(vm.lower_bytes <= vm.upper_bytes, "{vm:?}");
        assert!(limits.contains_key(&vm.name), "{vm:?}");
    }
}
