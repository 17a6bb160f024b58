//! System calls made inside another process, by ptrace(2).
//!
//! A userfaultfd belongs to the address space that made it, so Ebb has the VMM
//! make its own: one thread is stopped for some tens of microseconds, runs a
//! `syscall` instruction of its own vDSO with our arguments, and goes on where
//! it was. A system call that the stop cut short is begun again by hand,
//! because the kernel does that only for the state it left itself.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::process::Process;
use crate::uffd::USERFAULTFD_IOC_NEW;

/// A thread that cannot be stopped within this time is left alone.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Stack that the x86-64 ABI lets a function use below its stack pointer.
const RED_ZONE_BYTES: u64 = 128;
const SYSCALL_INSTRUCTION: [u8; 2] = [0x0f, 0x05];
/// The kernel's internal "begin this call again" results, `include/linux/errno.h`.
const RESTARTS: [i64; 3] = [-512, -513, -514];
const RESTART_BLOCK: i64 = -516;

/// Makes a userfaultfd inside the process; returns its number there.
///
/// An unprivileged VMM may not call userfaultfd(2); it may open `node`, a
/// device node 10:257 made for it, and get one from there.
///
/// # Errors
/// `EPERM` where tracing is not allowed, `TimedOut` when the process does not
/// stop, or what the injected calls returned.
pub fn userfaultfd(process: &Process, node: Option<&CStr>) -> io::Result<i32> {
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
    inside(process, |thread| match node {
        None => thread.call(libc::SYS_userfaultfd, [flags, 0, 0]),
        Some(node) => {
            let device = thread.open(node)?;
            let made = thread.call(libc::SYS_ioctl, [device, USERFAULTFD_IOC_NEW, flags]);
            thread.call(libc::SYS_close, [device, 0, 0])?;
            made
        }
    })
    .and_then(|fd| i32::try_from(fd).map_err(io::Error::other))
}

/// Closes descriptor `fd` inside the process.
///
/// # Errors
/// As [`userfaultfd`].
pub fn close(process: &Process, fd: i32) -> io::Result<()> {
    inside(process, |thread| thread.call(libc::SYS_close, [fd as u64, 0, 0])).map(drop)
}

/// Tells the kernel not to back a range of the process with huge pages.
///
/// # Errors
/// As [`userfaultfd`].
pub fn no_huge_pages(process: &Process, range: crate::uffd::HvaRange) -> io::Result<()> {
    let advice = libc::MADV_NOHUGEPAGE as u64;
    inside(process, |thread| thread.call(libc::SYS_madvise, [range.start.0, range.bytes, advice]))
        .map(drop)
}

/// Takes ranges out of the process's page table: the next touch of each page is
/// a minor fault. For shared mappings of files only: their memory stays, a
/// private one's would be lost.
///
/// # Errors
/// As [`userfaultfd`].
pub fn forget(process: &Process, ranges: &[crate::uffd::HvaRange]) -> io::Result<()> {
    let advice = libc::MADV_DONTNEED as u64;
    inside(process, |thread| {
        ranges.iter().try_fold(0, |_, range| {
            thread.call(libc::SYS_madvise, [range.start.0, range.bytes, advice])
        })
    })
    .map(drop)
}

/// Runs `work` on a stopped thread of the process. From a thread of our own:
/// the kernel lets go of what a tracer holds when that very thread ends, so
/// nothing stays stopped whatever happens here.
fn inside(
    process: &Process,
    work: impl FnOnce(&Stopped) -> io::Result<u64> + Send,
) -> io::Result<u64> {
    let run = || {
        let stopped = Stopped::stop(process)?;
        let result = work(&stopped);
        stopped.resume()?;
        result
    };
    std::thread::scope(|scope| match scope.spawn(run).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// The process's first thread, stopped, with its signals held back.
struct Stopped {
    tid: libc::pid_t,
    registers: libc::user_regs_struct,
    signals: u64,
    syscall_at: u64,
    memory: File,
}

impl Stopped {
    fn stop(process: &Process) -> io::Result<Stopped> {
        let tid = process.pid();
        let memory = File::options().read(true).write(true).open(format!("/proc/{tid}/mem"))?;
        let syscall_at = find_syscall(process, &memory)?;
        trace(libc::PTRACE_SEIZE, tid, 0, libc::PTRACE_O_TRACESYSGOOD as u64)?;
        trace(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
        wait_for(tid, |status| libc::WSTOPSIG(status) == libc::SIGTRAP)?;
        let mut registers = zeroed_registers();
        trace(libc::PTRACE_GETREGS, tid, 0, (&raw mut registers) as u64)?;
        let mut signals = 0u64;
        trace(libc::PTRACE_GETSIGMASK as _, tid, 8, (&raw mut signals) as u64)?;
        let all = u64::MAX;
        trace(libc::PTRACE_SETSIGMASK as _, tid, 8, (&raw const all) as u64)?;
        Ok(Stopped { tid, registers, signals, syscall_at, memory })
    }

    /// One system call with up to three arguments.
    fn call(&self, number: libc::c_long, arguments: [u64; 3]) -> io::Result<u64> {
        let mut registers = self.registers;
        registers.rip = self.syscall_at;
        registers.rax = number as u64;
        // No call is in progress: nothing for the kernel to begin again.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
        trace(libc::PTRACE_SETREGS, self.tid, 0, (&raw const registers) as u64)?;
        for _ in ["entry", "exit"] {
            trace(libc::PTRACE_SYSCALL, self.tid, 0, 0)?;
            wait_for(self.tid, |status| libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80)?;
        }
        trace(libc::PTRACE_GETREGS, self.tid, 0, (&raw mut registers) as u64)?;
        match registers.rax as i64 {
            error @ -4095..=-1 => Err(io::Error::from_raw_os_error(-error as i32)),
            value => Ok(value as u64),
        }
    }

    /// openat(2) of a path, lent below the thread's stack while it is stopped.
    fn open(&self, path: &CStr) -> io::Result<u64> {
        let bytes = path.to_bytes_with_nul();
        let at = self.registers.rsp - RED_ZONE_BYTES - bytes.len() as u64;
        let mut before = vec![0; bytes.len()];
        self.memory.read_exact_at(&mut before, at)?;
        self.memory.write_all_at(bytes, at)?;
        let flags = (libc::O_RDWR | libc::O_CLOEXEC) as u64;
        let opened = self.call(libc::SYS_openat, [libc::AT_FDCWD as u64, at, flags]);
        self.memory.write_all_at(&before, at)?;
        opened
    }

    fn resume(self) -> io::Result<()> {
        let mut registers = self.registers;
        begin_again(&mut registers);
        trace(libc::PTRACE_SETREGS, self.tid, 0, (&raw const registers) as u64)?;
        trace(libc::PTRACE_SETSIGMASK as _, self.tid, 8, (&raw const self.signals) as u64)?;
        trace(libc::PTRACE_DETACH, self.tid, 0, 0)
    }
}

/// A call that the stop cut short: step back onto its instruction.
fn begin_again(registers: &mut libc::user_regs_struct) {
    let in_call = registers.orig_rax as i64 >= 0;
    let result = registers.rax as i64;
    if in_call && RESTARTS.contains(&result) {
        registers.rax = registers.orig_rax;
        registers.rip -= SYSCALL_INSTRUCTION.len() as u64;
    } else if in_call && result == RESTART_BLOCK {
        registers.rax = libc::SYS_restart_syscall as u64;
        registers.rip -= SYSCALL_INSTRUCTION.len() as u64;
    }
    registers.orig_rax = u64::MAX;
}

fn find_syscall(process: &Process, memory: &File) -> io::Result<u64> {
    let vdso = process.mappings()?.into_iter().find(|vma| vma.name == "[vdso]");
    let vdso = vdso.ok_or_else(|| io::Error::other("the process has no vDSO to call from"))?;
    let mut code = vec![0; usize::try_from(vdso.bytes.min(1 << 16)).unwrap_or(0)];
    memory.read_exact_at(&mut code, vdso.start.0)?;
    let at = code.windows(2).position(|pair| pair == SYSCALL_INSTRUCTION);
    let at = at.ok_or_else(|| io::Error::other("the process's vDSO has no syscall instruction"))?;
    Ok(vdso.start.0 + at as u64)
}

/// Waits for the stop that `wanted` knows. Signals that cannot be held back
/// may stop the thread in between; it is sent on its way again.
fn wait_for(tid: libc::pid_t, wanted: impl Fn(i32) -> bool) -> io::Result<()> {
    let deadline = Instant::now() + STOP_TIMEOUT;
    loop {
        let mut status = 0;
        // SAFETY: waitpid(2) writes one integer to `status`.
        let got = unsafe { libc::waitpid(tid, &mut status, libc::__WALL | libc::WNOHANG) };
        match got {
            0 if Instant::now() > deadline => return Err(io::ErrorKind::TimedOut.into()),
            0 => std::thread::sleep(Duration::from_micros(20)),
            _ if got != tid => return Err(io::Error::last_os_error()),
            _ if !libc::WIFSTOPPED(status) => {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            _ if wanted(status) => return Ok(()),
            _ => trace(libc::PTRACE_SYSCALL, tid, 0, 0)?,
        }
    }
}

fn zeroed_registers() -> libc::user_regs_struct {
    // SAFETY: a struct of integers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

fn trace(request: libc::c_uint, tid: libc::pid_t, address: u64, data: u64) -> io::Result<()> {
    // SAFETY: of the requests made here only GETREGS and GETSIGMASK write to
    // memory of ours, and their callers pass a place of the size that the
    // kernel fills.
    match unsafe { libc::ptrace(request, tid, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    struct Victim(Child);

    impl Drop for Victim {
        fn drop(&mut self) {
            drop(self.0.kill());
            drop(self.0.wait());
        }
    }

    fn victim(command: &[&str]) -> Victim {
        let child = Command::new(command[0]).args(&command[1..]).stdout(Stdio::null()).spawn();
        let victim = Victim(child.unwrap());
        let process = Process::open(victim.0.id() as i32).unwrap();
        // It exists before its program is mapped.
        let begun = || process.mappings().unwrap().iter().any(|vma| vma.name == "[vdso]");
        while !process.has_ended().unwrap() && !begun() {
            std::thread::yield_now();
        }
        victim
    }

    #[test]
    fn a_descriptor_is_made_and_closed_in_a_sleeping_process() {
        let victim = victim(&["sleep", "60"]);
        let process = Process::open(victim.0.id() as i32).unwrap();
        for _ in 0..50 {
            let fd = match userfaultfd(&process, None) {
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                    return eprintln!("SKIPPED: tracing is not permitted here: {error}");
                }
                fd => fd.unwrap(),
            };
            let there = process.descriptors().unwrap();
            assert!(there.contains(&(fd, "anon_inode:[userfaultfd]".to_owned())), "{there:?}");
            close(&process, fd).unwrap();
        }
        assert!(!process.has_ended().unwrap());
    }

    #[test]
    fn a_call_cut_short_is_begun_again() {
        // `sleep` would return early, or fail, if its call were lost.
        let mut victim = victim(&["sleep", "1"]);
        let process = Process::open(victim.0.id() as i32).unwrap();
        let began = Instant::now();
        if userfaultfd(&process, None).is_err() {
            return eprintln!("SKIPPED: tracing is not permitted here");
        }
        assert!(victim.0.wait().unwrap().success());
        assert!(began.elapsed() >= Duration::from_millis(900));
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let mut victim = victim(&["true"]);
        let process = Process::open(victim.0.id() as i32).unwrap();
        victim.0.wait().unwrap();
        assert!(userfaultfd(&process, None).is_err());
    }
}
