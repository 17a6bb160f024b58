//! An io_uring of another process: a kernel thread of that process makes calls in its address
//! space, and none of its own threads is stopped for that.
//!
//! The other process makes the ring ([`crate::inject::ring`]) with a kernel thread that polls for
//! submissions (`IORING_SETUP_SQPOLL`). This process takes its descriptor and maps its queues.
//! What the other process may have written there is checked: the worst that it can do is to tell of
//! a call that was not made. The ring ends with this process, or when this is dropped.
//! See io_uring(7) for the queues.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::inject::{FORGET_BYTES, pieces};
use crate::mapping::Mapping;
use crate::process::{Process, is_shared};
use crate::uffd::HvaRange;

/// What `/proc/PID/fd` says of a ring.
pub const LINK: &str = "anon_inode:[io_uring]";
/// Bytes of `struct io_uring_params`.
pub(crate) const PARAMS_BYTES: usize = 120;

/// Entries of the submission queue. The completion queue has twice as many. One call runs at a time:
/// the kernel would run several in parallel, and KVM would hold off faults in all that lies between.
const ENTRIES: u32 = 2;
/// Milliseconds after the last call for which the kernel thread looks for more before it sleeps. The
/// kernel rounds them up to its clock's ticks.
const IDLE_MS: u32 = 1;
/// Longest time for a call.
const CALL_TIMEOUT: Duration = Duration::from_millis(500);

// Of `linux/io_uring.h`.
const SETUP_SQPOLL: u32 = 1 << 1;
const FEATURE_SINGLE_MMAP: u32 = 1 << 0;
const SQ_NEED_WAKEUP: u32 = 1 << 0;
const ENTER_SQ_WAKEUP: u32 = 1 << 1;
const OFFSET_QUEUES: u64 = 0;
const OFFSET_ENTRIES: u64 = 0x1000_0000;
const OP_MADVISE: u64 = 25;
const ENTRY_BYTES: u64 = 64;
const COMPLETION_BYTES: u64 = 16;
/// Queues of this many entries lie within a page.
const QUEUES_BYTES_MAX: u64 = 4096;

/// The kernel's parameters of a ring: the offsets in its queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingParams([u8; PARAMS_BYTES]);

impl RingParams {
    /// The parameters to make a ring with.
    pub(crate) fn request() -> RingParams {
        let mut params = RingParams([0; PARAMS_BYTES]);
        for (at, value) in [(8, SETUP_SQPOLL), (16, IDLE_MS)] {
            params.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        params
    }

    pub(crate) const fn entries() -> u64 {
        ENTRIES as u64
    }

    pub(crate) fn bytes(&self) -> &[u8; PARAMS_BYTES] {
        &self.0
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8; PARAMS_BYTES] {
        &mut self.0
    }

    fn field(&self, at: usize) -> u32 {
        let bytes = self.0[at..].first_chunk().copied().unwrap_or_default();
        u32::from_ne_bytes(bytes)
    }

    /// Returns the offsets, if the queues have the expected size.
    fn offsets(&self) -> Option<Offsets> {
        let as_expected = self.field(0) == ENTRIES
            && self.field(4) == 2 * ENTRIES
            && self.field(20) & FEATURE_SINGLE_MMAP != 0;
        let at = |field: usize| u64::from(self.field(field));
        let offsets = Offsets {
            sq_tail: at(44),
            sq_flags: at(56),
            sq_array: at(64),
            cq_head: at(80),
            cq_tail: at(84),
            completions: at(100),
        };
        (as_expected && offsets.bytes() <= QUEUES_BYTES_MAX).then_some(offsets)
    }
}

impl std::fmt::Display for RingParams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::str::FromStr for RingParams {
    type Err = io::Error;

    /// Parses what [`RingParams`] shows as.
    fn from_str(text: &str) -> io::Result<RingParams> {
        let mut params = [0; PARAMS_BYTES];
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != PARAMS_BYTES || !rest.is_empty() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        for (byte, pair) in params.iter_mut().zip(pairs) {
            let digits = std::str::from_utf8(pair).map_err(|_| io::ErrorKind::InvalidData)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| io::ErrorKind::InvalidData)?;
        }
        Ok(RingParams(params))
    }
}

/// Where the queues have what, in bytes from their start.
#[derive(Clone, Copy)]
struct Offsets {
    sq_tail: u64,
    sq_flags: u64,
    sq_array: u64,
    cq_head: u64,
    cq_tail: u64,
    completions: u64,
}

impl Offsets {
    /// Returns the bytes of both queues.
    fn bytes(&self) -> u64 {
        let array_end = self.sq_array + u64::from(ENTRIES) * 4;
        let completions_end = self.completions + u64::from(2 * ENTRIES) * COMPLETION_BYTES;
        array_end.max(completions_end)
    }
}

/// A ring of another process.
pub struct RemoteRing {
    ring: OwnedFd,
    queues: Mapping,
    entries: Mapping,
    at: Offsets,
    /// A call was submitted that has not ended. No more are submitted then: nobody could tell whose
    /// completion comes.
    is_stuck: bool,
}

impl RemoteRing {
    /// Takes a ring by a copy of its descriptor, and the kernel's parameters of it.
    ///
    /// # Errors
    /// `InvalidData`: it is not such a ring. Otherwise as mmap(2).
    pub fn new(ring: OwnedFd, params: &RingParams) -> io::Result<RemoteRing> {
        // The other process may have put a file there, to cut it off once it is mapped here.
        let link = std::fs::read_link(format!("/proc/self/fd/{}", ring.as_raw_fd()))?;
        if link.as_os_str() != LINK {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let at = params.offsets().ok_or(io::ErrorKind::InvalidData)?;
        let queues = Mapping::new(&ring, OFFSET_QUEUES, at.bytes())?;
        let entries = Mapping::new(&ring, OFFSET_ENTRIES, u64::from(ENTRIES) * ENTRY_BYTES)?;
        Ok(RemoteRing { ring, queues, entries, at, is_stuck: false })
    }

    /// Removes ranges of shared memory from the page table of `process`, whose ring this is: the
    /// next touch of each page is a minor fault. It goes by pieces of 32 MiB, since KVM lets no
    /// vCPU take a fault in a piece meanwhile, and looks before each piece whether that is all
    /// shared memory; if not, it stays as it is. Begins no piece after `end`. Returns how many bytes
    /// of the ranges it got to, from the first one on.
    ///
    /// # Errors
    /// `TimedOut`: the kernel thread does not run, for example because the process is stopped. The
    /// piece may still be forgotten, unless this ring is dropped. Otherwise as reading the
    /// mappings, or `InvalidData`: the queues make no sense.
    pub fn forget(
        &mut self,
        process: &Process,
        ranges: &[HvaRange],
        end: Instant,
    ) -> io::Result<u64> {
        let mut bytes = 0;
        for piece in ranges.iter().flat_map(|range| pieces(*range, FORGET_BYTES)) {
            if bytes > 0 && Instant::now() >= end {
                break;
            }
            if is_shared(&process.mappings()?, piece) {
                self.advise(piece, libc::MADV_DONTNEED)?;
            }
            bytes += piece.bytes;
        }
        Ok(bytes)
    }

    /// Gives advice about one range, whatever madvise(2) says to it.
    fn advise(&mut self, range: HvaRange, advice: i32) -> io::Result<()> {
        if self.is_stuck {
            return Err(io::Error::other("a call of an earlier time has not ended"));
        }
        let (sq_tail, cq_head) = (self.word(self.at.sq_tail)?, self.word(self.at.cq_head)?);
        let (tail, head) = (sq_tail.load(Relaxed), cq_head.load(Relaxed));
        self.write_entry(tail, range, advice)?;
        sq_tail.store(tail.wrapping_add(1), Release);
        self.is_stuck = true;
        self.wake()?;
        self.wait(head)?;
        self.is_stuck = false;
        Ok(())
    }

    /// Writes the entry at a place of the submission queue.
    fn write_entry(&self, place: u32, range: HvaRange, advice: i32) -> io::Result<()> {
        let slot = place % ENTRIES;
        let length = u32::try_from(range.bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let words =
            [OP_MADVISE, 0, range.start.0, u64::from(length) | (advice as u64) << 32, 0, 0, 0, 0];
        let entry = self.entries.words(u64::from(slot) * ENTRY_BYTES, words.len());
        let entry = entry.ok_or(io::ErrorKind::InvalidData)?;
        entry.iter().zip(words).for_each(|(to, word)| to.store(word, Relaxed));
        self.word(self.at.sq_array + u64::from(slot) * 4)?.store(slot, Relaxed);
        Ok(())
    }

    fn word(&self, offset: u64) -> io::Result<&AtomicU32> {
        let found = self.queues.half_words(offset, 1).and_then(<[AtomicU32]>::first);
        found.ok_or(io::ErrorKind::InvalidData.into())
    }

    /// Wakes the kernel thread if it sleeps.
    fn wake(&self) -> io::Result<()> {
        // The kernel thread sets the flag and then looks at the tail once more.
        fence(SeqCst);
        if self.word(self.at.sq_flags)?.load(Acquire) & SQ_NEED_WAKEUP == 0 {
            return Ok(());
        }
        let none = std::ptr::null::<libc::c_void>();
        let ring = self.ring.as_raw_fd();
        // SAFETY: it submits nothing and waits for nothing, so no memory is passed.
        let woken = unsafe {
            libc::syscall(libc::SYS_io_uring_enter, ring, 0, 0, ENTER_SQ_WAKEUP, none, 0)
        };
        if woken < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Waits for the completion at `head`.
    fn wait(&self, head: u32) -> io::Result<()> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let (cq_head, cq_tail) = (self.word(self.at.cq_head)?, self.word(self.at.cq_tail)?);
        while cq_tail.load(Acquire) == head {
            self.poll(deadline)?;
        }
        match cq_tail.load(Acquire).wrapping_sub(head) {
            1 => cq_head.store(head.wrapping_add(1), Release),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        Ok(())
    }

    fn poll(&self, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut fds = [PollFd::new(&self.ring, PollFlags::IN)];
        match poll(&mut fds, Some(&left)) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(Errno::INTR) if Instant::now() < deadline => Ok(()),
            Ok(_) | Err(Errno::INTR) => Err(io::ErrorKind::TimedOut.into()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_printed_and_parsed() {
        let params = RingParams::request();
        assert_eq!(params.to_string().parse::<RingParams>().unwrap(), params);
        for wrong in ["", "00", &"0".repeat(239), &"0".repeat(241), &"g".repeat(240)] {
            assert!(wrong.parse::<RingParams>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn queues_of_another_size_are_refused() {
        assert!(RingParams::request().offsets().is_none(), "nobody has filled it in");
        let mut params = RingParams::request();
        let mut set = |at: usize, value: u32| {
            params.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        };
        set(0, ENTRIES);
        set(4, 2 * ENTRIES);
        set(20, FEATURE_SINGLE_MMAP);
        set(64, 1024);
        set(100, 64);
        assert_eq!(params.offsets().unwrap().bytes(), 1024 + 8);
        params.0[64..68].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert!(params.offsets().is_none());
    }
}
