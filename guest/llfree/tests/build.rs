//! Compiles the guest's side, and has the compiler compare every number of its
//! layout with the host's: a difference ends the build.
#![forbid(unsafe_code)]

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

use ebb_llfree::layout::TABLE;

const SOURCES: [&str; 6] = ["get.c", "look.c", "put.c", "rows.c", "search.c", "zone.c"];

fn main() {
    let guest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("..");
    let checks = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("checks.c");
    let header = fs::read_to_string(guest.join("llfree_layout.h")).expect("the layout's header");
    fs::write(&checks, layout_checks(&header)).expect("the output directory takes a file");
    cc::Build::new()
        .files(SOURCES.map(|source| guest.join(source)))
        .file(checks)
        .include(&guest)
        .std("c11")
        .flag("-O2")
        .warnings(true)
        .extra_warnings(true)
        .warnings_into_errors(true)
        .compile("llfree");
    println!("cargo::rerun-if-changed={}", guest.display());
}

/// One assertion a number; and that C has no number which is not compared.
fn layout_checks(header: &str) -> String {
    let mut checks = String::from("#include \"llfree_layout.h\"\n");
    for (name, value) in TABLE {
        let _ = writeln!(checks, "_Static_assert({name} == {value}ull, \"{name} is not Rust's\");");
    }
    let words = header.lines().filter_map(|line| line.strip_prefix("#define ")?.split(' ').next());
    for name in words.filter(|name| *name != "LLFREE_LAYOUT_H") {
        if !TABLE.iter().any(|(known, _)| *known == name) {
            let _ = writeln!(checks, "#error \"{name} is not in the table of crates/llfree\"");
        }
    }
    checks
}
