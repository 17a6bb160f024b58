//! Holds what guests have of a control group's memory at a limit, whatever their VMMs take for
//! themselves: a limit on both together would leave guests what the VMMs were swapped out of.

use std::fs;
use std::io;
use std::num::ParseIntError;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, ensure};

const REVIVE_BYTES: u64 = 1 << 20;
const REVIVE_EVERY: Duration = Duration::from_millis(2);
/// In so many of these times it looks what the VMMs have: that takes some milliseconds.
const LOOK_EVERY: u32 = 250;
/// Less than that is not followed, and no more at a time.
const STEP_BYTES: std::ops::RangeInclusive<u64> = (1 << 20)..=(4 << 20);

/// A guest of a VMM.
#[derive(Clone, Copy)]
pub struct Guest {
    pub pid: i32,
    /// What it believes to have: the size of one mapping of the VMM.
    pub memory_bytes: u64,
}

/// Follows the VMMs' own memory with the group's limit, and wakes processes that wait for
/// memory: while all that could go is on its way to the disk, version 1 gives up and kills,
/// or, told not to, has them wait for somebody to make room; nobody does once the disk is
/// done.
pub struct Warden {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Warden {
    /// Begins. `directory`: the group's, of the memory controller, whose limit is `limit` now;
    /// the guests are to have `bytes` of it.
    ///
    /// # Errors
    /// As pthread_create(3).
    pub fn start(
        directory: PathBuf,
        guests: Vec<Guest>,
        bytes: u64,
        mut limit: u64,
    ) -> io::Result<Warden> {
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let guard = move || {
            let file = directory.join("memory.limit_in_bytes");
            // It may be busy.
            let set = |bytes: u64| drop(fs::write(&file, bytes.to_string()));
            for time in 1u32.. {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                // A VMM that has ended has nothing to be held.
                if time.is_multiple_of(LOOK_EVERY)
                    && let Ok(own) = own_bytes(&directory, &guests)
                {
                    let wanted = bytes + own;
                    if wanted.abs_diff(limit) >= *STEP_BYTES.start() {
                        limit = wanted.max(limit.saturating_sub(*STEP_BYTES.end()));
                        set(limit);
                    }
                }
                let state = fs::read_to_string(directory.join("memory.oom_control"));
                if state.is_ok_and(|state| state.contains("under_oom 1")) {
                    // Less has the kernel make room, more has it wake.
                    [limit - REVIVE_BYTES, limit].into_iter().for_each(set);
                }
                thread::sleep(REVIVE_EVERY);
            }
        };
        Ok(Warden { stop, thread: Some(thread::Builder::new().spawn(guard)?) })
    }
}

impl Drop for Warden {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its panic has been printed.
            let _ = thread.join();
        }
    }
}

/// What a group has beside its guests' memory. What zswap keeps of that, for the only group that
/// swaps, is charged as the kernel's.
///
/// # Errors
/// As the file system's, or a guest's memory is not found.
pub fn own_bytes(directory: &Path, guests: &[Guest]) -> anyhow::Result<u64> {
    let kernel = number(&directory.join("memory.kmem.usage_in_bytes"))?;
    let kernel = kernel.saturating_sub(zswap_bytes()?);
    guests.iter().try_fold(kernel, |sum, guest| {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", guest.pid))?;
        let (_, own) = resident(&smaps, guest.memory_bytes)?;
        Ok(sum + own)
    })
}

/// What the host gives for the memory of a guest, the only one that is swapped.
///
/// # Errors
/// As [`own_bytes`].
pub fn guest_bytes(guest: Guest) -> anyhow::Result<u64> {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", guest.pid))?;
    Ok(resident(&smaps, guest.memory_bytes)?.0 + zswap_bytes()?)
}

fn zswap_bytes() -> anyhow::Result<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let value = meminfo.lines().find_map(|line| line.strip_prefix("Zswap:"));
    Ok(value.map_or(Ok(0), bytes)?)
}

/// Of `  12 kB`.
fn bytes(value: &str) -> Result<u64, ParseIntError> {
    value.trim().trim_end_matches(" kB").parse::<u64>().map(|kib| kib << 10)
}

fn number(path: &Path) -> anyhow::Result<u64> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(text.trim().parse().map_err(io::Error::other)?)
}

/// Resident of the one mapping of this size, and anonymous of all others: programs and
/// libraries are charged to whoever read them first.
fn resident(smaps: &str, memory_bytes: u64) -> anyhow::Result<(u64, u64)> {
    let (mut size, mut found, mut guest, mut own) = (0, 0, 0, 0);
    for line in smaps.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        match name {
            "Size" => {
                size = bytes(value)?;
                found += u32::from(size == memory_bytes);
            }
            "Rss" if size == memory_bytes => guest += bytes(value)?,
            "Anonymous" if size != memory_bytes => own += bytes(value)?,
            _ => {}
        }
    }
    ensure!(found == 1, "{found} mappings of QEMU look like its guest's memory");
    Ok((guest, own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_is_told_from_its_vmm() {
        let smaps = "7f00-7f01 rw-p 0 00:01 7    /usr/bin/qemu\n\
            Size:   4 kB\nKernelPageSize:   4 kB\nRss:   4 kB\nAnonymous: 0 kB\n\
            7f10-7f11 rw-p 0 00:00 0\nSize: 2048 kB\nRss: 512 kB\nAnonymous: 512 kB\n\
            7f20-7f21 rw-p 0 00:00 0\nSize: 64 kB\nRss: 16 kB\nAnonymous: 12 kB\n";
        assert_eq!(resident(smaps, 2 << 20).unwrap(), (512 << 10, 12 << 10));
        assert!(resident(smaps, 4 << 20).is_err());
        let two = smaps.repeat(2);
        assert!(resident(&two, 2 << 20).is_err());
    }
}
