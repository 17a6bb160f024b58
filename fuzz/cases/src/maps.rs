//! `/proc/PID/maps` and `/proc/PID/cmdline` of any content: a process names its own files, and
//! writes its own command line.

use ebb_sys::process::parse_mappings;
use ebb_vm::command_line::CommandLine;

/// Runs one input.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let found = parse_mappings(&text);
    assert!(found.len() <= text.lines().count());
    for mapping in found {
        assert!(mapping.start.0.checked_add(mapping.bytes).is_some(), "{mapping:?}");
    }
    command_line(&text);
}

fn command_line(text: &str) {
    let line = CommandLine::new(text.split('\0').map(str::to_owned).collect());
    for name in [line.name(), line.uuid()].into_iter().flatten() {
        assert!(name.chars().all(|sign| !sign.is_control()), "{name:?}");
    }
    assert!(!line.ram().is_empty());
    line.ram_below_4g();
}
