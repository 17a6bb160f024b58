//! Assembles the guest's programs. `as` and `objcopy` come with the linker that Rust itself needs.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for name in ["churn", "counters", "reuse", "writer"] {
        let source = format!("guest/{name}.s");
        let (object, binary) = (out.join(format!("{name}.o")), out.join(format!("{name}.bin")));
        println!("cargo::rerun-if-changed={source}");
        run(Command::new("as").args(["--64", "--fatal-warnings", "-o"]).arg(&object).arg(&source));
        let copy = ["-O", "binary", "-j", ".text"];
        run(Command::new("objcopy").args(copy).arg(&object).arg(&binary));
    }
}

fn run(command: &mut Command) {
    let status = command.status();
    let status = status.unwrap_or_else(|error| panic!("{command:?}: {error}: install binutils"));
    assert!(status.success(), "{command:?}: {status}");
}
