//! Locks QEMU's own memory, so that Linux does not swap it: the limit is only for the guest's
//! memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use super::linux::{Linux, Memory};
use super::warden::{self, Guest};

const SOURCE: &str = include_str!("pin_own.c");
/// Most bytes that are neither the guest's nor locked: what a process has before its libraries are
/// loaded.
const SLACK_BYTES: u64 = 1 << 20;

/// A library that the linker loads into QEMU before all others.
pub struct Pin(PathBuf);

impl Pin {
    /// Compiles the library into this directory.
    ///
    /// # Errors
    /// There is no C compiler.
    pub fn new(directory: &Path) -> anyhow::Result<Pin> {
        let [source, library] = ["pin_own.c", "pin_own.so"].map(|name| directory.join(name));
        fs::write(&source, SOURCE)?;
        let compiler = Command::new("cc")
            .args(["-O2", "-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .output()
            .context("cc does not start")?;
        let errors = String::from_utf8_lossy(&compiler.stderr);
        ensure!(compiler.status.success(), "{}: {}", source.display(), errors.trim());
        Ok(Pin(library))
    }

    /// Returns the environment for a QEMU whose guest believes to have `memory_bytes`.
    pub fn environment(&self, way: Linux, memory_bytes: u64) -> Vec<(&'static str, String)> {
        let small =
            (way.memory == Memory::Anonymous).then(|| ("EBB_BENCH_SMALL_PAGES", "1".into()));
        let library = ("LD_PRELOAD", self.0.display().to_string());
        let ram = ("EBB_BENCH_RAM_BYTES", memory_bytes.to_string());
        [library, ram].into_iter().chain(small).collect()
    }
}

/// Checks that all memory of a VMM is locked, except its guest's.
///
/// # Errors
/// It is not.
pub fn check(guest: Guest) -> anyhow::Result<()> {
    let parts = warden::parts(guest)?;
    let [guest_kib, own_kib] =
        [parts.guest_locked, parts.own.saturating_sub(parts.own_locked)].map(|bytes| bytes >> 10);
    ensure!(guest_kib == 0, "{guest_kib} KiB of the guest's memory are locked");
    ensure!(own_kib << 10 <= SLACK_BYTES, "{own_kib} KiB of QEMU's own memory are not locked");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    use super::*;
    use crate::bench::swap::linux::Swap;

    /// Python stands in for a VMM, with a guest's memory and more of its own.
    #[test]
    fn all_but_the_guests_memory_is_locked() {
        let directory = vmtest::Scratch::new("ebb-test-").unwrap();
        let pin = Pin::new(directory.path()).unwrap();
        let bytes = 48 << 20;
        let way = Linux { memory: Memory::Anonymous, swap: Swap::Disk(3) };
        let script = "import mmap\nmaps = [mmap.mmap(-1, n << 20) for n in (48, 8)]\n\
            for m in maps: m[0:4] = b'full'\nprint('ready', flush=True)\ninput()";
        let mut command = Command::new("python3");
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = command.envs(pin.environment(way, bytes)).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(program.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let guest = Guest { pid: program.id() as i32, memory_bytes: bytes };
        let (checked, parts) = (check(guest), warden::parts(guest));
        program.kill().unwrap();
        program.wait().unwrap();
        assert_eq!(line, "ready\n");
        checked.unwrap();
        assert!(parts.unwrap().own_locked > 1 << 20);
        assert!(check(Guest { pid: std::process::id() as i32, memory_bytes: bytes }).is_err());
    }
}
