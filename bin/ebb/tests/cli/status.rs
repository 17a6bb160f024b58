//! `ebb status`: what the daemon tells, for programs and for people.

use serde_json::{Value, json};

use crate::a_status;
use crate::harness::{Answer, Dir, ebb};

#[test]
fn status_json_is_the_daemons_own() {
    let dir = Dir::new();
    let _daemon = dir.daemon(Answer::json(200, &a_status()));
    let ran = ebb(dir.path(), "status web --json");
    assert_eq!(serde_json::from_str::<Value>(&ran.stdout).unwrap(), a_status());
}

#[test]
fn every_field_of_status_json_is_documented() {
    let page = include_str!("../../../../docs/status.md");
    let mut paths = Vec::new();
    leaves("", &a_status(), &mut paths);
    assert!(paths.len() > 40, "{paths:?}");
    for path in paths {
        assert!(page.contains(&format!("| `{path}` |")), "docs/status.md has no line for {path}");
    }
}

fn leaves(path: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                leaves(format!("{path}.{name}").trim_start_matches('.'), value, found);
            }
        }
        _ => found.push(path.to_owned()),
    }
}

#[test]
fn a_warning_comes_first_and_its_reason_once() {
    let dir = Dir::new();
    let mut status = a_status();
    let reason = "the host gives shared memory no huge pages";
    let warning = format!("small pages are slow; {reason}");
    status["backing"] = json!("small");
    status["backing_reason"] = json!(reason);
    status["warnings"] = json!([warning]);
    let _daemon = dir.daemon(Answer::json(200, &status));
    let ran = ebb(dir.path(), "attach --name web --pid 4242");
    let second = ran.stdout.lines().nth(1).unwrap_or_default();
    assert_eq!(second, format!("  warning       {warning}"));
    assert_eq!(ran.stdout.matches(reason).count(), 1, "{}", ran.stdout);
    assert!(ran.stdout.contains("backing       small    see the warning\n"), "{}", ran.stdout);
}

#[test]
fn status_of_an_unknown_hostile_guest_is_still_readable() {
    let dir = Dir::new();
    let mut status = a_status();
    status["guest"]["kernel"] = json!("6.1\u{1b}[2J\ntrusted yes");
    status["guest_free_bytes"] = Value::Null;
    let _daemon = dir.daemon(Answer::json(200, &status));
    let ran = ebb(dir.path(), "status web");
    assert!(ran.stdout.contains("guest         kernel 6.1?[2J?trusted yes, "), "{}", ran.stdout);
    assert_eq!(ran.stdout.lines().count(), 5, "{}", ran.stdout);
    let dir = Dir::new();
    let _daemon = dir.daemon(Answer::json(200, &status));
    let ran = ebb(dir.path(), "status web --verbose");
    assert!(ran.stdout.contains("kernel        6.1?[2J?trusted yes\n"), "{}", ran.stdout);
    assert!(ran.stdout.contains("guest free    unknown\n"), "{}", ran.stdout);
    assert!(ran.stdout.contains("console       tail -f /run/ebb/web/console"), "{}", ran.stdout);
    assert!(ran.stdout.lines().count() <= 56, "more than a screen: {}", ran.stdout);
}
