//! The work that guests get, and the files for it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, ensure};
use vmtest::Vm;

use crate::guard::guard;
use crate::interrupt;

/// Most attempts. Linux sometimes kills a QEMU for want of memory, while most of its swap area is
/// free.
const TRIES: usize = 3;

/// Most seconds, and greatest part, by which the host's clock may be ahead of the guest's. The
/// guest is asked and answers by a console of a QEMU that may be swapped out, too.
const CLOCKS_APART_S: f64 = 2.0;
const CLOCKS_APART: f64 = 0.02;

/// Size of the paper's file.
pub const FILE_BYTES: u64 = 200 << 20;

/// A compressor with eight threads, which compresses the compiler.
pub const COMPRESS: &str = "tar --create --directory / usr/lib/gcc \
    | zstd --threads=8 -8 --quiet --force -o /root/out.zst && rm /root/out.zst";

/// Builds a project in C. The compiler is as fast as possible, since guests are translated here.
pub const COMPILE: &str = "make --directory /usr/src/lua5.4/src --jobs=2 --silent \
    CFLAGS='-O0 -DLUA_COMPAT_5_3' clean generic";

/// Builds the project as it is released, twice at once and with more processes than processors, as
/// build farms do: its memory use goes up and down.
pub const COMPILE_WIDE: &str = "for n in 1 2; do cp --recursive /usr/src/lua5.4 /root/$n; done; \
    printf 'all: 1 2\\n1 2:\\n\\t$(MAKE) -C /root/$@/src generic\\n' \
    | make --file=- --jobs=12 --silent CFLAGS='-O2 -g -DLUA_COMPAT_5_3' all";

/// Removes what [`COMPILE_WIDE`] made.
pub const CLEAN_WIDE: &str = "for n in 1 2; do make -C /root/$n/src --silent clean || exit 1; done";

/// Removes what [`COMPILE`] made.
pub const CLEAN: &str = "make --directory /usr/src/lua5.4/src --silent clean";

/// Unpacks a small Debian onto a disk.
///
/// # Errors
/// Those of tar(1).
pub fn unpack_userland(archive: &Path, at: &Path) -> anyhow::Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(archive).arg("--directory").arg(at);
    let output = tar.output().context("tar does not start")?;
    ensure!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Makes a file in which no page is like another.
///
/// # Errors
/// A file operation fails.
pub fn random_file(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let mut random = File::open("/dev/urandom")?.take(bytes);
    io::copy(&mut random, &mut File::create(path)?)?;
    Ok(())
}

/// Runs a command in the guest. Returns how many seconds it took by the guest's clock.
///
/// # Errors
/// The guest's answer is no number, or its clock stood still meanwhile.
pub fn seconds(vm: &Vm, what: &str) -> anyhow::Result<f64> {
    let begun = Instant::now();
    let answer = vm.guest(&format!("timed {what}"));
    let here = begun.elapsed().as_secs_f64();
    let there = answer.parse::<f64>().with_context(|| answer)? / 1e6;
    ensure!(
        here - there <= CLOCKS_APART_S + here * CLOCKS_APART,
        "{what}: {there:.1} s by the guest's clock and {here:.1} s by the host's"
    );
    Ok(there)
}

/// Whether an error tells of too little memory: the guest's kernel killed a program, or the host's
/// killed QEMU.
pub fn was_killed(error: &anyhow::Error) -> bool {
    let text = error.to_string();
    ["Killed", "Cannot allocate memory", "kernel panic", "QEMU ended"]
        .iter()
        .any(|word| text.contains(word))
}

/// Runs it again if a VM was killed meanwhile.
///
/// # Errors
/// A VM was killed each time, or those of `run`.
pub fn again_if_killed<T>(mut run: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let mut result = guard(&mut run);
    for _ in 1..TRIES {
        if result.as_ref().is_err_and(was_killed) && interrupt::check().is_ok() {
            result = guard(&mut run);
        }
    }
    result
}
