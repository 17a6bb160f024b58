//! What guests are given to do, and to do it with.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, ensure};
use vmtest::Vm;

use crate::guard::guard;
use crate::interrupt;

/// Linux kills a QEMU at times, for want of memory, while most of its swap area is free.
const TRIES: usize = 3;

/// The host's clock may be so much ahead of a guest's, and such a part: the guest is asked, and answers,
/// by a console of a QEMU that is swapped out, too.
const CLOCKS_APART_S: f64 = 2.0;
const CLOCKS_APART: f64 = 0.02;

/// The paper's.
pub const FILE_BYTES: u64 = 200 << 20;

/// A compressor with eight threads, on the compiler.
pub const COMPRESS: &str = "tar --create --directory / usr/lib/gcc \
    | zstd --threads=8 -8 --quiet --force -o /root/out.zst && rm /root/out.zst";

/// A project in C; as fast as a compiler can be, since guests are translated here.
pub const COMPILE: &str = "make --directory /usr/src/lua5.4/src --jobs=2 --silent \
    CFLAGS='-O0 -DLUA_COMPAT_5_3' clean generic";

/// The same as it is released, two at once and by more processes than there are processors, as
/// build farms have it: what they take goes up and down.
pub const COMPILE_WIDE: &str = "for n in 1 2; do cp --recursive /usr/src/lua5.4 /root/$n; done; \
    printf 'all: 1 2\\n1 2:\\n\\t$(MAKE) -C /root/$@/src generic\\n' \
    | make --file=- --jobs=12 --silent CFLAGS='-O2 -g -DLUA_COMPAT_5_3' all";

/// Takes away what it made.
pub const CLEAN_WIDE: &str = "for n in 1 2; do make -C /root/$n/src --silent clean || exit 1; done";

/// Takes away what [`COMPILE`] made.
pub const CLEAN: &str = "make --directory /usr/src/lua5.4/src --silent clean";

/// Puts a small Debian on a disk.
///
/// # Errors
/// As tar(1).
pub fn unpack_userland(archive: &Path, at: &Path) -> anyhow::Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("--extract").arg("--file").arg(archive).arg("--directory").arg(at);
    let output = tar.output().context("tar does not start")?;
    ensure!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// A file of which no page is like another.
///
/// # Errors
/// As the file system's.
pub fn random_file(path: &Path, bytes: u64) -> anyhow::Result<()> {
    let mut random = File::open("/dev/urandom")?.take(bytes);
    io::copy(&mut random, &mut File::create(path)?)?;
    Ok(())
}

/// Has the guest do something; how long that took by its own clock.
///
/// # Errors
/// Its answer is no number, or its clock stood still meanwhile.
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

/// Whether that tells of somebody who had too little memory: a program of the guest, which
/// its kernel killed, or QEMU, which the host's did.
pub fn was_killed(error: &anyhow::Error) -> bool {
    let text = error.to_string();
    ["Killed", "Cannot allocate memory", "kernel panic", "QEMU ended"]
        .iter()
        .any(|word| text.contains(word))
}

/// Does it again where a VM was killed meanwhile.
///
/// # Errors
/// They all were, or as `run`.
pub fn again_if_killed<T>(mut run: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let mut result = guard(&mut run);
    for _ in 1..TRIES {
        if result.as_ref().is_err_and(was_killed) && interrupt::check().is_ok() {
            result = guard(&mut run);
        }
    }
    result
}
