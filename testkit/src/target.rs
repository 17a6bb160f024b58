//! Where cargo has put the running program.

use std::env;
use std::path::{Path, PathBuf};

/// The directory of cargo's builds that the running program is part of.
pub fn target_directory() -> PathBuf {
    profile_directory().parent().map(Path::to_owned).expect("a program has a directory")
}

/// `target/release` of `target/release/deps/test-0123`.
pub fn profile_directory() -> PathBuf {
    let program = env::current_exe().expect("a program knows itself");
    let mut directories = program.ancestors().skip(1).map(Path::to_owned);
    directories.find(|directory| !directory.ends_with("deps")).expect("a program has a directory")
}
