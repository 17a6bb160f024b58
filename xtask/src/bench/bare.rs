//! The bare system calls that Ebb is measured against, on memory of the same kind: a memfd that is
//! mapped twice, as by a VMM and by a daemon.

use std::fs;
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_sys::mapping::Mapping;
use ebb_sys::ram_file::RamFile;
use ebb_units::{FRAME_BYTES, HUGE_BYTES};

/// Bytes that one call empties or fills.
const CALL_BYTES: u64 = 64 << 20;

/// Memory without any Ebb.
pub struct Bare {
    pub file: RamFile,
    /// The mapping in which a VMM would run its guest.
    pub guest: Mapping,
    /// The mapping that a daemon would have.
    pub own: Mapping,
}

impl Bare {
    /// Makes a memfd of `bytes`. With `huge`, it has transparent huge pages, if the host gives
    /// them.
    ///
    /// # Errors
    /// Those of memfd_create(2) and mmap(2).
    pub fn new(bytes: u64, huge: bool) -> io::Result<Bare> {
        let bytes = bytes.next_multiple_of(HUGE_BYTES);
        let file = RamFile::create("ebb-bench", bytes)?;
        let map = || {
            let mapping = Mapping::new(&file, 0, bytes)?;
            advise(&mapping, huge);
            io::Result::Ok(mapping)
        };
        let (guest, own) = (map()?, map()?);
        Ok(Bare { file, guest, own })
    }

    /// Empties and fills all of the memory, piece by piece. Each piece gets back the memory that it
    /// lost, which is equally warm.
    ///
    /// # Errors
    /// Those of fallocate(2) and madvise(2).
    pub fn measure(&self) -> io::Result<Times> {
        let mut times = Times::default();
        for offset in (0..self.guest.bytes()).step_by(CALL_BYTES as usize) {
            let bytes = CALL_BYTES.min(self.guest.bytes() - offset);
            times.punch += timed(|| self.file.punch(offset, bytes))?;
            times.populate += timed(|| self.own.populate(offset, bytes))?;
            self.own.forget(offset, bytes)?;
            self.file.punch(offset, bytes)?;
            times.first_touch += timed(|| {
                self.touch_part(offset, bytes);
                Ok(())
            })?;
        }
        Ok(times)
    }

    /// Stores to each page, as a guest's touches do.
    pub fn touch(&self) {
        self.touch_part(0, self.guest.bytes());
    }

    fn touch_part(&self, offset: u64, bytes: u64) {
        for at in (offset..offset + bytes).step_by(FRAME_BYTES as usize) {
            if let Some([word]) = self.guest.words(at, 1) {
                word.store(1, Relaxed);
            }
        }
    }
}

/// Time of the system calls for all of the memory, 64 MiB a call.
#[derive(Default)]
pub struct Times {
    pub punch: Duration,
    pub populate: Duration,
    pub first_touch: Duration,
}

fn timed(call: impl FnOnce() -> io::Result<()>) -> io::Result<Duration> {
    let start = Instant::now();
    call()?;
    Ok(start.elapsed())
}

/// Asks for huge pages, or for none. A kernel without huge pages refuses, but then there are none
/// anyway.
pub fn advise(mapping: &Mapping, huge: bool) {
    let _ = mapping.use_huge_pages(huge);
}

/// Whether a hypervisor below this machine reclaims free memory by free page reporting. The first
/// touch of such memory costs many times more than any other, and would count against the side that
/// comes first.
pub fn free_memory_goes_cold() -> bool {
    /// `VIRTIO_BALLOON_F_REPORTING`: index in a string with one digit for each bit.
    const REPORTING: usize = 5;
    let drivers = fs::read_dir("/sys/bus/virtio/drivers/virtio_balloon").into_iter().flatten();
    drivers.flatten().any(|entry| {
        let features = fs::read_to_string(entry.path().join("features")).unwrap_or_default();
        features.as_bytes().get(REPORTING) == Some(&b'1')
    })
}

/// Returns how much of memfds process `pid` has in its page tables: all of it, and the part by huge
/// pages.
pub fn mapped_bytes(pid: i32) -> (u64, u64) {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let (mut is_memfd, mut all, mut huge) = (false, 0, 0);
    for line in smaps.lines() {
        match line.split_once(':') {
            Some(("Rss", size)) if is_memfd => all += kib(size),
            Some(("ShmemPmdMapped", size)) if is_memfd => huge += kib(size),
            // A line like `7f00-7f01 rw-s 0 00:01 7    /memfd:x (deleted)` begins a mapping. The
            // files that the guest was booted from may be in a memfd, too.
            Some((range, _)) if range.contains('-') => {
                is_memfd = line.contains("/memfd:") && !line.contains("/memfd:ebb-boot");
            }
            _ => {}
        }
    }
    (all << 10, huge << 10)
}

fn kib(size: &str) -> u64 {
    size.trim().trim_end_matches(" kB").parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_memory_is_small_and_comes_and_goes() {
        let bare = Bare::new(4 << 20, false).unwrap();
        bare.touch();
        let (all, huge) = mapped_bytes(std::process::id() as i32);
        assert!(all >= 4 << 20 && huge < all, "{all} {huge}");
        let times = bare.measure().unwrap();
        assert!(
            [times.punch, times.populate, times.first_touch]
                .iter()
                .all(|time| *time > Duration::ZERO)
        );
        assert_eq!(bare.file.resident_bytes().unwrap(), 4 << 20);
    }
}
