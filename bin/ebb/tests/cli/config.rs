//! The configuration file: checked and shown without a daemon.

use std::fs;

use serde_json::Value;

use crate::harness::{Dir, ebb};

#[test]
fn a_wrong_file_is_one_line_with_the_place() {
    let dir = Dir::new();
    let file = dir.path().join("ebb.toml");
    fs::write(&file, "[pilot]\nmode = \"on\"\nreserve = \"10 GB/s\"\n").unwrap();
    for command in ["check", "show", "show --json"] {
        let ran = ebb(&dir.run_dir(), &format!("config {command} {}", file.display()));
        assert_eq!(ran.code, Some(1), "{command}: {}", ran.stderr);
        let said = format!("{}:3:11: reserve: \"10 GB/s\" is no size: ", file.display());
        assert!(ran.is_one_line_with(&said), "{command}: {}", ran.stderr);
    }
    fs::remove_file(&file).unwrap();
    let ran = ebb(&dir.run_dir(), &format!("config check {}", file.display()));
    assert!(ran.is_one_line_with("No such file") && ran.code == Some(1), "{}", ran.stderr);
    assert!(!dir.run_dir().exists(), "no daemon is asked");
}

#[test]
fn a_right_file_is_shown_with_what_it_leaves_at_its_default() {
    let dir = Dir::new();
    let file = dir.path().join("ebb.toml");
    let text = "[daemon]\nswap-max = \"64G\"\n\n[pilot]\nattach = true\nstall = 5\n";
    fs::write(&file, text).unwrap();
    let run = |command: &str| {
        let ran = ebb(&dir.run_dir(), &format!("config {command} {}", file.display()));
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{command}");
        ran.stdout
    };
    assert!(run("check").ends_with(" is right; keys that it sets: 3\n"));
    let text = run("show");
    for line in [
        ["daemon", "swap-max", "64G", "line 2"].as_slice(),
        &["daemon", "swap-max-each", "no quota", "default"],
        &["daemon", "move-rate", "1G", "default"],
        &["pilot", "attach", "true", "line 5"],
        &["pilot", "reserve", "10%", "default"],
    ] {
        let line = line.join(" ");
        let has = |shown: &str| shown.split_whitespace().collect::<Vec<_>>().join(" ") == line;
        assert!(text.lines().any(has), "{line}: {text}");
    }
    let json: Value = serde_json::from_str(&run("show --json")).unwrap();
    let settings = json.as_array().unwrap();
    let found = |section: &str, key: &str| {
        let is_it = |it: &&Value| it["section"] == section && it["key"] == key;
        settings.iter().find(is_it).unwrap().clone()
    };
    let [stall, window, quota] =
        [("pilot", "stall"), ("daemon", "heat-window-ms"), ("daemon", "swap-max-each")]
            .map(|(section, key)| found(section, key));
    assert!(stall["value"] == 5 && stall["from"] == "file" && stall["line"] == 6, "{stall}");
    assert!(window["value"] == 600 && window["from"] == "default", "{window}");
    assert!(quota["value"].is_null() && quota["otherwise"] == "no quota", "{quota}");
}
