//! Requests of ptrace(2), a function for each.

use std::io;
use std::time::{Duration, Instant};

use libc::{pid_t, user_regs_struct};

/// Why a thread stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    /// It was told to, or the whole process is stopped.
    Asked,
    /// It is at the beginning or the end of a system call.
    Call,
}

/// Registers, all in one page of ours. The kernel reads them word by word, and a page that was just
/// written cannot be missing half-way.
#[repr(align(256))]
struct OnePage {
    registers: user_regs_struct,
}

const _: () = assert!(size_of::<OnePage>() == 256);

pub(super) fn seize(tid: pid_t) -> io::Result<()> {
    // Without PTRACE_O_EXITKILL: if this process dies, the VMM goes on.
    request(libc::PTRACE_SEIZE, tid, 0, libc::PTRACE_O_TRACESYSGOOD as u64)
}

pub(super) fn interrupt(tid: pid_t) -> io::Result<()> {
    request(libc::PTRACE_INTERRUPT, tid, 0, 0)
}

pub(super) fn detach(tid: pid_t) -> io::Result<()> {
    request(libc::PTRACE_DETACH, tid, 0, 0)
}

/// Lets the thread run to the beginning or the end of a system call.
pub(super) fn run_to_call(tid: pid_t) -> io::Result<()> {
    request(libc::PTRACE_SYSCALL, tid, 0, 0)
}

pub(super) fn registers(tid: pid_t) -> io::Result<user_regs_struct> {
    // SAFETY: a struct of integers, for which zero is a value.
    let mut registers: user_regs_struct = unsafe { std::mem::zeroed() };
    request(libc::PTRACE_GETREGS, tid, 0, (&raw mut registers) as u64)?;
    Ok(registers)
}

/// Sets all registers at once: if this process dies, the thread has the old ones or the new ones.
pub(super) fn set_registers(tid: pid_t, registers: &user_regs_struct) -> io::Result<()> {
    let page = OnePage { registers: *registers };
    request(libc::PTRACE_SETREGS, tid, 0, (&raw const page.registers) as u64)
}

pub(super) fn signals(tid: pid_t) -> io::Result<u64> {
    let mut signals = 0u64;
    request(libc::PTRACE_GETSIGMASK as _, tid, 8, (&raw mut signals) as u64)?;
    Ok(signals)
}

pub(super) fn set_signals(tid: pid_t, signals: u64) -> io::Result<()> {
    request(libc::PTRACE_SETSIGMASK as _, tid, 8, (&raw const signals) as u64)
}

/// Returns one of the register sets that the kernel knows by a number of `elf.h`.
pub(super) fn register_set(tid: pid_t, which: u64) -> io::Result<Vec<u8>> {
    // The largest known, AMX's, has 11 KiB.
    let mut bytes = vec![0u8; 32 << 10];
    let mut room = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    request(libc::PTRACE_GETREGSET, tid, which, (&raw mut room) as u64)?;
    bytes.truncate(room.iov_len);
    Ok(bytes)
}

/// Waits until a thread stops as `wanted`: `only`, or if that is `None` any that the calling thread
/// traces. Returns `None` if none did by the deadline. Other threads that stop are released.
///
/// # Errors
/// `ESRCH`: none of them is left.
pub(super) fn wait(
    only: Option<pid_t>,
    deadline: Instant,
    wanted: impl Fn(Stop) -> bool,
) -> io::Result<Option<pid_t>> {
    loop {
        let mut status = 0;
        let options = libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG;
        // SAFETY: waitpid(2) writes one integer to `status`.
        let tid = unsafe { libc::waitpid(-1, &mut status, options) };
        if tid == 0 {
            if Instant::now() > deadline {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_micros(20));
        } else if tid < 0 || (only == Some(tid) && !libc::WIFSTOPPED(status)) {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        } else if libc::WIFSTOPPED(status) {
            let stop = stop_of(status);
            // A thread that stopped for a signal gets the signal.
            let signal = if stop.is_none() { libc::WSTOPSIG(status) as u64 } else { 0 };
            match (stop, only) {
                (_, Some(only)) if only != tid => {
                    request(libc::PTRACE_DETACH, tid, 0, signal)?;
                }
                (Some(stop), _) if wanted(stop) => return Ok(Some(tid)),
                _ => request(libc::PTRACE_SYSCALL, tid, 0, signal)?,
            }
        }
    }
}

fn stop_of(status: i32) -> Option<Stop> {
    match (status >> 16, libc::WSTOPSIG(status)) {
        (libc::PTRACE_EVENT_STOP, _) => Some(Stop::Asked),
        (_, signal) if signal == libc::SIGTRAP | 0x80 => Some(Stop::Call),
        _ => None,
    }
}

fn request(request: libc::c_uint, tid: pid_t, address: u64, data: u64) -> io::Result<()> {
    super::may_die_here();
    // SAFETY: of the requests made here only GETREGS, GETREGSET and GETSIGMASK write to memory
    // of ours, and their callers pass a place of the size that the kernel fills.
    match unsafe { libc::ptrace(request, tid, address, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
