//! Work that is timed inside the guest.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;
use std::time::Instant;

use rustix::fs::OFlags;
use vmtest_guest::pattern::WORDS_PER_PAGE;

use crate::{Context, Result};

/// Bytes that programs that copy files read at once.
const CHUNK_BYTES: usize = 128 << 10;

/// Memory with the alignment of direct I/O.
#[repr(align(4096))]
struct Aligned([u8; CHUNK_BYTES]);

/// Reads all of a file through the page cache. Returns microseconds.
pub fn read(path: &str) -> Result<String> {
    timed(|| {
        let mut file = File::open(path).context(path)?;
        let mut bytes = vec![0; CHUNK_BYTES];
        while file.read(&mut bytes).context(path)? > 0 {}
        Ok(())
    })
}

/// Allocates memory, touches all of it in order and frees it. Returns microseconds.
pub fn allocate(bytes: u64) -> Result<String> {
    timed(|| {
        let mut words = vec![0_u64; (bytes / 8) as usize];
        words.iter_mut().step_by(WORDS_PER_PAGE).for_each(|word| *word = black_box(1));
        Ok(())
    })
}

/// Reads or writes `bytes` at the beginning of a disk past the page cache, in order or at random,
/// `at_once` bytes at once, on `threads` threads. Returns microseconds.
pub fn disk(path: &str, access: &str, bytes: u64, at_once: u64, threads: u64) -> Result<String> {
    let is_write = access.ends_with("write");
    let is_random = access.starts_with("random");
    if threads == 0 || at_once == 0 || at_once > CHUNK_BYTES as u64 {
        return Err(format!("{at_once} bytes at once on {threads} threads"));
    }
    let pieces = bytes / at_once;
    timed(|| {
        let work = |thread: u64| -> io::Result<()> {
            let flags = OFlags::DIRECT.bits() as i32;
            let file = File::options().read(true).write(is_write).custom_flags(flags).open(path)?;
            let mut buffer = Box::new(Aligned([0; CHUNK_BYTES]));
            let buffer = &mut buffer.0[..at_once as usize];
            let mut random = thread + 1;
            for piece in (thread..pieces).step_by(threads as usize) {
                random = next_random(random);
                let piece = if is_random { random % pieces } else { piece };
                match is_write {
                    true => file.write_all_at(buffer, piece * at_once)?,
                    false => file.read_exact_at(buffer, piece * at_once)?,
                }
            }
            if is_write { file.sync_all() } else { Ok(()) }
        };
        std::thread::scope(|scope| {
            let all: Vec<_> =
                (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
            let ended = all.into_iter().map(|one| one.join());
            let mut ended = ended.map(|one| one.map_err(|_| "a thread died".to_owned()));
            ended.try_for_each(|one| one?.context(path))
        })
    })
}

/// xorshift64: the next number.
pub fn next_random(mut random: u64) -> u64 {
    random ^= random << 13;
    random ^= random >> 7;
    random ^ random << 17
}

/// Runs a program of the system below `root`. Returns microseconds.
pub fn program(root: &str, line: &str) -> Result<String> {
    timed(|| {
        let mut command = Command::new("/bin/busybox");
        command.args(["chroot", root, "/bin/sh", "-c", line]);
        // For what the shell starts: it exports no PATH of its own.
        command.env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        let output = command.output().context(line)?;
        match output.status.success() {
            true => Ok(()),
            false => {
                let errors = String::from_utf8_lossy(&output.stderr);
                Err(format!("{}: {}", output.status, errors.trim_end()))
            }
        }
    })
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<String> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_micros().to_string())
}
