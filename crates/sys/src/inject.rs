//! System calls made inside another process, by ptrace(2).
//!
//! A userfaultfd belongs to the address space that made it, so Ebb has the VMM make its own: one
//! thread is stopped for some tens of microseconds, makes a system call with our arguments, and
//! goes on where it was. Whatever becomes of us meanwhile, it does so: see `thread`, and
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
use std::time::{Duration, Instant};

use ebb_units::Hva;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::process::{Process, Vma};
use crate::uffd::{HvaRange, USERFAULTFD_IOC_NEW};
use gadgets::Gadgets;
use thread::Stopped;

/// The most that one call is told to forget. KVM lets no processor of the guest take a fault in
/// the range while the call lasts.
const FORGET_BYTES: u64 = 32 << 20;
/// Advising all ranges may take so long; what is left then stays as it is.
const ADVISE_TIMEOUT: Duration = Duration::from_secs(60);
/// After so long the thread does a while what it is there for: a stop lasts as long, and a
/// piece.
const STOPPED_AT_MOST: Duration = Duration::from_millis(5);
/// A userfaultfd has a number below this. A process with a descriptor of a high number has a table
/// of so many entries.
const NUMBER_MAX: u64 = 4096;

/// The process to inject calls into.
pub struct Target<'p> {
    process: &'p Process,
    start_ticks: u64,
    gadgets: Gadgets,
    memory: File,
}

impl<'p> Target<'p> {
    /// The process, which must have started at that time; it is made sure of again whenever one
    /// of its threads was stopped.
    ///
    /// # Errors
    /// `ESRCH`: it is another one, or gone; `EPERM` and `EACCES`: it may not be looked into; its
    /// code has nothing that a call can be made of.
    pub fn new(process: &'p Process, start_ticks: u64) -> io::Result<Target<'p>> {
        let memory = File::open(format!("/proc/{}/mem", process.pid()))?;
        let gadgets = Gadgets::find(&process.mappings()?, &memory)?;
        let target = Target { process, start_ticks, gadgets, memory };
        target.check()?;
        Ok(target)
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// While it has not ended nobody else has its number: look at that last.
    fn check(&self) -> io::Result<()> {
        let is_same = self.process.start_ticks()? == self.start_ticks;
        match is_same && !self.process.has_ended()? {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }

    /// Runs `work` on a stopped thread of the process. From a thread of our own: the kernel lets
    /// go of what a tracer holds when that very thread ends, so nothing stays stopped whatever
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

/// Makes a userfaultfd inside the process; returns its number there.
///
/// An unprivileged VMM may not call userfaultfd(2); it may open `node`, a
/// node of `/dev/userfaultfd` made for it, and get one from there.
///
/// Its number is a high one by chance, where the process may have such: a thread that closes it late
/// then closes nothing of the process's own, which gets the lowest numbers, nor a later userfaultfd.
///
/// # Errors
/// `EPERM` where tracing is not allowed, `TimedOut` when the process does not
/// stop, or what the injected calls returned; a thread is still in an earlier call.
pub fn userfaultfd(target: &Target, node: Option<&CStr>) -> io::Result<i32> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    let number = high_number(target.process)?;
    sent::wait_for_none(target)?;
    let made = target.inside(|thread| {
        let made = match node {
            None => thread.call(libc::SYS_userfaultfd, [flags, 0, 0])?,
            Some(node) => {
                let device = thread.open(node)?;
                let made = thread.call(libc::SYS_ioctl, [device, USERFAULTFD_IOC_NEW, flags]);
                thread.call(libc::SYS_close, [device, 0, 0])?;
                made?
            }
        };
        match thread.call(libc::SYS_fcntl, [made, libc::F_DUPFD_CLOEXEC as u64, number]) {
            Ok(moved) => thread.call(libc::SYS_close, [made, 0, 0]).map(|_| moved),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(error),
            // There is none so high.
            Err(_) => Ok(made),
        }
    });
    made.and_then(|fd| i32::try_from(fd).map_err(io::Error::other))
}

/// One in the upper half of those that the process may have.
fn high_number(process: &Process) -> io::Result<u64> {
    let most = process.descriptors_max()?.min(NUMBER_MAX);
    let mut random = [0; 8];
    getrandom(&mut random, GetRandomFlags::empty())?;
    Ok(most / 2 + u64::from_ne_bytes(random) % (most / 2).max(1))
}

/// Closes descriptor `fd` inside the process, which is a userfaultfd.
///
/// # Errors
/// As [`userfaultfd`]; `EBADF`: it is none by now, and is left alone.
pub fn close(target: &Target, fd: i32) -> io::Result<()> {
    sent::wait_for_none(target)?;
    target.inside(|thread| match target.process.is_userfaultfd(fd)? {
        true => thread.call(libc::SYS_close, [fd as u64, 0, 0]).map(drop),
        false => Err(io::Error::from_raw_os_error(libc::EBADF)),
    })
}

/// Tells the kernel not to back ranges with huge pages, as far as anything is mapped there.
///
/// # Errors
/// As [`userfaultfd`]; in words: the process has as many mappings as it may.
pub fn no_huge_pages(target: &Target, ranges: &[HvaRange]) -> io::Result<()> {
    advise(target, ranges, Advice::NoHugePages, usize::MAX).map(drop)
}

/// Takes ranges of shared memory out of the process's page table: the next touch of each page is
/// a minor fault. What is not mapped there as shared memory stays as it is: of private memory
/// the content would be lost.
///
/// # Errors
/// As [`userfaultfd`].
pub fn forget(target: &Target, ranges: &[HvaRange]) -> io::Result<()> {
    advise(target, ranges, Advice::Forget, usize::MAX).map(drop)
}

/// The same as far as it gets while a thread is stopped once; how many bytes of the ranges, from the
/// first one on, that is.
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
    /// In how many bytes at most.
    fn piece_bytes(self) -> u64 {
        match self {
            // Nobody's page table changes by it, so a large range takes no longer.
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
                // A part is not mapped any more: the others have the advice (madvise(2)).
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

/// Advises piece by piece, and lets the thread go now and then. It is stopped so often at most; of how
/// many bytes that was.
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

fn pieces(range: HvaRange, most: u64) -> impl Iterator<Item = HvaRange> {
    (0..range.bytes).step_by(most as usize).map(move |at| HvaRange {
        start: Hva(range.start.0.saturating_add(at)),
        bytes: most.min(range.bytes - at),
    })
}

/// Whether all of a range is shared memory of a file.
fn is_shared(mappings: &[Vma], range: HvaRange) -> bool {
    let (mut at, end) = (range.start.0, range.start.0.saturating_add(range.bytes));
    for vma in mappings.iter().filter(|vma| vma.shared_write && vma.inode != 0) {
        if vma.contains(at) {
            at = vma.start.0 + vma.bytes;
        }
    }
    at >= end
}

/// Tests are not to wait for so long.
#[cfg(not(test))]
fn timeout(usual: Duration) -> Duration {
    usual
}

/// Tests kill whoever injects at each of these places.
#[cfg(not(test))]
fn may_die_here() {}

#[cfg(test)]
use tests::{may_die_here, timeout};
