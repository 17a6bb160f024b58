//! The program as a user meets it: exit codes, one clear line, and nothing changed on bad input.

mod config;
mod daemon;
mod doctor;
mod events;
mod harness;
mod remote;
mod report;
mod requests;
mod status;
mod top;
mod usage;

use std::fs;

use ebb_api::VmStatus;
use harness::{Dir, ebb};
use serde_json::Value;

#[test]
fn completions_and_man_pages_come_from_the_same_definition() {
    let dir = Dir::new();
    for shell in ["bash", "zsh", "fish"] {
        let ran = ebb(dir.path(), &format!("completions {shell}"));
        assert!(ran.stdout.contains("min-order"), "{shell}");
    }
    assert_eq!(ebb(dir.path(), &format!("man {}", dir.path().display())).code, Some(0));
    let page = fs::read_to_string(dir.path().join("ebb-run.1")).unwrap();
    assert!(page.contains("min\\-order"), "{page}");
}

/// Status of a VM that is managed and trusted, before its first fault.
fn a_status() -> Value {
    let text = include_str!("status.json");
    serde_json::to_value(serde_json::from_str::<VmStatus>(text).unwrap()).unwrap()
}
