//! Replays every kept input of every fuzz target, compiled by the project's own compiler.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use ebb_fuzz_cases::TARGETS;

fn fuzz_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the names of a directory's files, each up to its first dot.
fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).unwrap_or_else(|error| panic!("{directory:?}: {error}"));
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let stem = |name: String| name.split('.').next().unwrap_or_default().to_owned();
    entries.map(|entry| stem(name(entry.expect("an entry")))).collect()
}

#[test]
fn each_target_has_a_program_and_inputs() {
    let targets: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(targets, names(&fuzz_directory().join("fuzz_targets")));
    assert_eq!(targets, names(&fuzz_directory().join("corpus")));
}

#[test]
fn every_kept_input_passes() {
    for (name, run) in TARGETS {
        let mut inputs: Vec<PathBuf> = fs::read_dir(fuzz_directory().join("corpus").join(name))
            .expect("the target has inputs")
            .map(|entry| entry.expect("an entry").path())
            .collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "{name}: no inputs");
        for path in inputs {
            // The last line printed names the input that fails.
            println!("{}", path.display());
            run(&fs::read(&path).expect("the input is readable"));
        }
    }
}
