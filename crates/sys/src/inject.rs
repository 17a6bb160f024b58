//! System calls made inside another process, by ptrace(2).
//!
//! A userfaultfd belongs to the address space that made it, so Ebb makes the VMM create its own.
//! One thread is stopped for some tens of microseconds, makes a system call with our arguments, and
//! goes on where it was. It does so whatever happens to this process meanwhile: see `thread`, and
//! `docs/decisions/0034-*`.

mod frame;
mod gadgets;
mod sent;
#[cfg(test)]
mod tests;
mod thread;
mod trace;
#[cfg(test)]
mod victim;

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ebb_units::Hva;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::process::Process;
use crate::remote_ring::RingParams;
use crate::uffd::{HvaRange, USERFAULTFD_IOC_NEW};
use gadgets::Gadgets;
use thread::Stopped;

/// The most bytes that one call forgets. While the call lasts, KVM lets no vCPU take a fault in the
/// range.
pub(crate) const FORGET_BYTES: u64 = 32 << 20;
/// Longest time to advise all ranges. Ranges left then stay as they are.
const ADVISE_TIMEOUT: Duration = Duration::from_secs(60);
/// A thread that was stopped for this long is released after the piece in progress, and does its
/// own work for a while.
const STOPPED_AT_MOST: Duration = Duration::from_millis(5);
/// A userfaultfd has a number below this: the higher the number of a descriptor, the more entries
/// the process's descriptor table has.
const NUMBER_MAX: u64 = 4096;

/// The process to inject calls into.
pub struct Target<'p> {
    process: &'p Process,
    start_ticks: u64,
    gadgets: Gadgets,
    memory: File,
}

impl<'p> Target<'p> {
    /// Prepares for the process, which must have started at that time. That is checked again each
    /// time one of its threads was stopped.
    ///
    /// # Errors
    /// `ESRCH`: it is another process, or it has ended. `EPERM` and `EACCES`: it may not be looked
    /// into. In words: its code has no instructions to make a call of.
    pub fn new(process: &'p Process, start_ticks: u64) -> io::Result<Target<'p>> {
        let memory = File::open(format!("/proc/{}/mem", process.pid()))?;
        let gadgets = Gadgets::find(&process.mappings()?, &memory)?;
        let target = Target { process, start_ticks, gadgets, memory };
        target.check()?;
        Ok(target)
    }

    /// Its PID.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Checks that it is the same process. Looks last whether it has ended: before that nobody else
    /// has its PID.
    fn check(&self) -> io::Result<()> {
        let is_same = self.process.start_ticks()? == self.start_ticks;
        match is_same && !self.process.has_ended()? {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }

    /// Runs `work` on a stopped thread of the process, from a new thread of our own. The kernel
    /// releases what a tracer holds when that very thread ends, so nothing stays stopped whatever
    /// happens here.
    fn inside<T: Send>(
        &self,
        work: impl FnOnce(&mut Stopped) -> io::Result<T> + Send,
    ) -> io::Result<T> {
        let run = || {
            let mut stopped = Stopped::stop(self)?;
            let result = work(&mut stopped);
            let resumed = stopped.resume();
            may_die_here();
            result.and_then(|result| resumed.map(|()| result))
        };
        std::thread::scope(|scope| match scope.spawn(run).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }
}

/// How a process gets a userfaultfd.
#[derive(Clone, Copy)]
pub enum Door<'a> {
    /// By userfaultfd(2), which an unprivileged process may not call.
    Call,
    /// By a node of `/dev/userfaultfd` that the process may open.
    Node(&'a CStr),
    /// By a descriptor of `/dev/userfaultfd` that the process has.
    Descriptor(i32),
}

/// Makes a userfaultfd inside the process. Returns its number there.
///
/// The number is a random high one, where the process may have such. So a thread that closes it
/// late closes neither a descriptor of the process's own, which get the lowest numbers, nor a later
/// userfaultfd.
///
/// # Errors
/// `EPERM`: tracing is not allowed. `TimedOut`: the process does not stop. In words: a thread is
/// still in an earlier call. Otherwise what the injected calls returned.
pub fn userfaultfd(target: &Target, door: Door<'_>) -> io::Result<i32> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let number = high_number(target.process)?;
    sent::wait_for_none(target)?;
    let made = target.inside(|thread| {
        let made = match door {
            Door::Call => thread.call(libc::SYS_userfaultfd, [flags, 0, 0])?,
            Door::Descriptor(device) => {
                let device = u64::try_from(device).map_err(io::Error::other)?;
                thread.call(libc::SYS_ioctl, [device, USERFAULTFD_IOC_NEW, flags])?
            }
            Door::Node(node) => {
                let device = thread.open(node)?;
                let made = thread.call(libc::SYS_ioctl, [device, USERFAULTFD_IOC_NEW, flags]);
                thread.call(libc::SYS_close, [device, 0, 0])?;
                made?
            }
        };
        match thread.call(libc::SYS_fcntl, [made, libc::F_DUPFD_CLOEXEC as u64, number]) {
            Ok(moved) => thread.call(libc::SYS_close, [made, 0, 0]).map(|_| moved),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(error),
            // It can have no number that high.
            Err(_) => Ok(made),
        }
    });
    made.and_then(|fd| i32::try_from(fd).map_err(io::Error::other))
}

/// Returns a random number in the upper half of those that the process may have.
fn high_number(process: &Process) -> io::Result<u64> {
    let most = process.descriptors_max()?.min(NUMBER_MAX);
    let mut random = [0; 8];
    getrandom(&mut random, GetRandomFlags::empty())?;
    Ok(most / 2 + u64::from_ne_bytes(random) % (most / 2).max(1))
}

/// Closes descriptor `fd` inside the process, if it is a userfaultfd.
///
/// # Errors
/// As [`userfaultfd`]. `EBADF`: it is not a userfaultfd, and stays open.
pub fn close(target: &Target, fd: i32) -> io::Result<()> {
    sent::wait_for_none(target)?;
    target.inside(|thread| match target.process.is_userfaultfd(fd)? {
        true => thread.call(libc::SYS_close, [fd as u64, 0, 0]).map(drop),
        false => Err(io::Error::from_raw_os_error(libc::EBADF)),
    })
}

/// Makes a ring inside the process, takes a copy of its descriptor, and closes it there, all while a
/// thread is stopped once. Returns the copy and the kernel's parameters of the ring, for
/// [`RemoteRing`](crate::remote_ring::RemoteRing).
///
/// # Errors
/// As [`userfaultfd`]. `EPERM`: the host or the process's filter forbids it
/// (`kernel.io_uring_disabled`).
pub fn ring(target: &Target) -> io::Result<(OwnedFd, RingParams)> {
    sent::wait_for_none(target)?;
    target.inside(|thread| {
        let mut params = RingParams::request();
        let (made, read) = thread.setup_ring(&mut params)?;
        let copy = i32::try_from(made).map_err(io::Error::other);
        let copy = copy.and_then(|number| target.process.descriptor(number));
        thread.call(libc::SYS_close, [made, 0, 0])?;
        read?;
        Ok((copy?, params))
    })
}

/// Tells the kernel not to back ranges with huge pages, where anything is mapped.
///
/// # Errors
/// As [`userfaultfd`]. In words: the process has as many mappings as it may.
pub fn no_huge_pages(target: &Target, ranges: &[HvaRange]) -> io::Result<()> {
    advise(target, ranges, Advice::NoHugePages, usize::MAX).map(drop)
}

/// Removes ranges of shared memory from the process's page table: the next touch of each page is a
/// minor fault. A piece of 32 MiB or less that is not all shared memory stays as it is, because
/// private memory would lose its content.
///
/// # Errors
/// As [`userfaultfd`].
pub fn forget(target: &Target, ranges: &[HvaRange]) -> io::Result<()> {
    advise(target, ranges, Advice::Forget, usize::MAX).map(drop)
}

/// As [`forget`], for what can be done while a thread is stopped once. Returns how many bytes of
/// the ranges, from the first one on, that is.
///
/// # Errors
/// As [`userfaultfd`].
pub fn forget_once(target: &Target, ranges: &[HvaRange]) -> io::Result<u64> {
    advise(target, ranges, Advice::Forget, 1)
}

#[derive(Clone, Copy)]
enum Advice {
    NoHugePages,
    Forget,
}

impl Advice {
    /// The most bytes of one call.
    fn piece_bytes(self) -> u64 {
        match self {
            // No page table changes by this, so a large range takes no longer.
            Advice::NoHugePages => u64::MAX,
            Advice::Forget => FORGET_BYTES,
        }
    }

    fn give(self, thread: &mut Stopped, piece: HvaRange) -> io::Result<()> {
        let give = |thread: &mut Stopped, advice: i32| {
            let arguments = [piece.start.0, piece.bytes, advice as u64];
            thread.call(libc::SYS_madvise, arguments).map(drop)
        };
        match self {
            Advice::NoHugePages => match give(thread, libc::MADV_NOHUGEPAGE) {
                // A part is no longer mapped. The others have the advice (madvise(2)).
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Err(io::Error::other(
                    "it has as many mappings as it may: raise vm.max_map_count",
                )),
                given => given,
            },
            Advice::Forget if thread.is_shared(piece)? => give(thread, libc::MADV_DONTNEED),
            Advice::Forget => Ok(()),
        }
    }
}

/// Advises piece by piece, and releases the thread now and then. Stops a thread at most `stops`
/// times. Returns the number of bytes advised.
fn advise(target: &Target, ranges: &[HvaRange], advice: Advice, stops: usize) -> io::Result<u64> {
    let deadline = Instant::now() + ADVISE_TIMEOUT;
    let mut pieces =
        ranges.iter().flat_map(|range| pieces(*range, advice.piece_bytes())).peekable();
    let mut advised = 0;
    for _ in 0..stops {
        if pieces.peek().is_none() {
            break;
        }
        if Instant::now() > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        target.inside(|thread| {
            let began = Instant::now();
            for piece in pieces.by_ref() {
                advice.give(thread, piece)?;
                advised += piece.bytes;
                if began.elapsed() > STOPPED_AT_MOST {
                    break;
                }
            }
            Ok(())
        })?;
    }
    Ok(advised)
}

/// Cuts a range into pieces of at most `most` bytes.
pub(crate) fn pieces(range: HvaRange, most: u64) -> impl Iterator<Item = HvaRange> {
    (0..range.bytes).step_by(most as usize).map(move |at| HvaRange {
        start: Hva(range.start.0.saturating_add(at)),
        bytes: most.min(range.bytes - at),
    })
}

/// Tests shorten timeouts.
#[cfg(not(test))]
fn timeout(usual: Duration) -> Duration {
    usual
}

/// Tests kill the injecting process at each of these places.
#[cfg(not(test))]
fn may_die_here() {}

#[cfg(test)]
use tests::{may_die_here, timeout};
