//! `ebb report`: a new file with what is known, also without a daemon.

use std::fs;

use serde_json::Value;

use crate::harness::{Dir, ebb};

#[test]
fn a_report_is_written_without_a_daemon_and_over_no_file() {
    let dir = Dir::new();
    let (run_dir, file) = (dir.path().join("run"), dir.path().join("a.tar.gz"));
    let line = format!("report {} --json", file.display());
    let ran = ebb(&run_dir, &line);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{}", ran.stdout);
    let written: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(written["bytes"], fs::metadata(&file).unwrap().len());
    let parts = written["parts"].as_array().unwrap();
    let names: Vec<&str> = parts.iter().filter_map(|part| part["name"].as_str()).collect();
    let expected = [
        "README.txt",
        "host.txt",
        "settings.txt",
        "run-directory.txt",
        "doctor.txt",
        "doctor.json",
    ];
    assert_eq!(names, expected);
    assert!(written["missing"].to_string().contains("no ebbd listens"), "{written}");
    assert!(!run_dir.exists(), "it starts nothing and makes nothing else");

    let before = fs::read(&file).unwrap();
    let again = ebb(&run_dir, &line);
    assert!(again.code == Some(1) && again.is_one_line_with("give a new file"), "{}", again.stderr);
    assert_eq!(fs::read(&file).unwrap(), before);
    let nowhere = ebb(&run_dir, "report /nowhere/a.tar.gz");
    assert!(nowhere.code == Some(1) && nowhere.is_one_line_with("/nowhere/a.tar.gz"));
}
