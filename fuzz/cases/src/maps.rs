//! `/proc/PID/maps` of any content: a process names its own files.

use ebb_sys::process::parse_mappings;

/// Runs one input.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let found = parse_mappings(&text);
    assert!(found.len() <= text.lines().count());
    for mapping in found {
        assert!(mapping.start.0.checked_add(mapping.bytes).is_some(), "{mapping:?}");
    }
}
