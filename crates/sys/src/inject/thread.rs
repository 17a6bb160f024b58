//! A stopped thread of another process: makes system calls for us, and then returns to what it did.
//!
//! Before the thread is sent into a call, a signal frame of its own state is written below its red
//! zone. The call's instruction is one that is followed by `ret`, which leads to rt_sigreturn(2).
//! So whenever the tracer dies, the thread finishes the call and then is what it was. A comment at
//! each step says what becomes of the thread if the tracer dies there. *The way back* there is
//! rt_sigreturn(2).

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use libc::{pid_t, user_regs_struct};

use super::frame::{self, Frame};
use super::gadgets::Gadgets;
use super::trace::{self, Stop};
use super::{Target, may_die_here, timeout};
use crate::process::{Process, Vma, is_shared};
use crate::remote_ring::RingParams;
use crate::uffd::HvaRange;

/// Longest wait for any thread of a process to stop. After it, the process is left alone.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for one thread to stop before another one is asked, too: it may sleep where nothing
/// wakes it.
const PATIENCE: Duration = Duration::from_millis(100);
/// Longest time for an injected call before it is given up.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that an interrupted call gets to end, once it took too long.
const GRACE: Duration = Duration::from_secs(1);
/// `NT_X86_XSTATE` of `elf.h`.
const XSTATE: u64 = 0x202;
/// `NT_PRFPREG` of `elf.h`.
const FXSTATE: u64 = 2;
const SYSCALL_INSTRUCTION_BYTES: u64 = 2;
/// The kernel's internal results that mean "begin this call again", `include/linux/errno.h`.
const RESTARTS: [i64; 3] = [-512, -513, -514];
const RESTART_BLOCK: i64 = -516;

/// A stopped thread. If it is dropped without [`Stopped::resume`], the tracing thread must end: the
/// kernel then releases what it traced, and the stopped thread restores itself.
pub(super) struct Stopped<'p> {
    process: &'p Process,
    tid: pid_t,
    registers: user_regs_struct,
    signals: u64,
    gadgets: Gadgets,
    mappings: Vec<Vma>,
    memory: File,
    frame: Frame,
    /// Whether the thread is in a call that could not be interrupted.
    is_in_call: bool,
}

impl<'p> Stopped<'p> {
    /// Stops the process's first thread, or another one if that does not stop.
    pub fn stop(target: &Target<'p>) -> io::Result<Stopped<'p>> {
        // Death from here on: the kernel releases the thread, and begins its call again.
        let tid = first_to_stop(target)?;
        target.check()?;
        let status = fs::read_to_string(format!("/proc/{}/task/{tid}/status", target.pid()))?;
        refuse_shadow_stack(&status)?;
        let memory = File::options().read(true).write(true).open(format!("/proc/{tid}/mem"))?;
        let (gadgets, mappings) = (target.gadgets, target.process.mappings()?);
        if !gadgets.are_in(&mappings, &memory) {
            return Err(io::Error::other("the process's code has changed: try again"));
        }
        let registers = trace::registers(tid)?;
        let signals = trace::signals(tid)?;
        let frame = Frame::new(&begun_anew(registers), signals, fpu(tid)?, gadgets.go_back);
        let frame = frame.filter(|frame| has_room(&mappings, frame.at, registers.rsp));
        let frame = frame.ok_or_else(no_room)?;
        let (process, is_in_call) = (target.process, false);
        let stopped = Stopped {
            process,
            tid,
            registers,
            signals,
            gadgets,
            mappings,
            memory,
            frame,
            is_in_call,
        };
        stopped.prepare()?;
        Ok(stopped)
    }

    /// Prepares the thread to be sent into calls.
    fn prepare(&self) -> io::Result<()> {
        // Death from here on: as before, with bytes on an unused part of its stack.
        may_die_here();
        self.memory.write_all_at(&self.frame.bytes, self.frame.at)?;
        // Death after this: the thread goes the way back, and does what it did before.
        trace::set_registers(self.tid, &self.in_call(0, [u64::MAX, 0, 0], self.gadgets.go_back))?;
        // Death after this: the same. The way back restores the thread's own signal mask.
        trace::set_signals(self.tid, u64::MAX)
    }

    /// Makes one system call with up to three arguments.
    ///
    /// # Errors
    /// What the call returned. `TimedOut`: it takes too long.
    pub fn call(&mut self, number: libc::c_long, arguments: [u64; 3]) -> io::Result<u64> {
        let registers = self.in_call(number as u64, arguments, self.gadgets.call);
        // Death after this: the thread makes the call, and goes the way back.
        trace::set_registers(self.tid, &registers)?;
        let deadline = Instant::now() + timeout(CALL_TIMEOUT);
        loop {
            for _ in ["entry", "exit"] {
                trace::run_to_call(self.tid)?;
                // Death while the call runs: as before, however long the call takes.
                self.wait_in_call(deadline)?;
            }
            // Death after this: the thread goes the way back.
            match trace::registers(self.tid)?.rax as i64 {
                // Something such as a freezer cut it short: the kernel begins it again.
                result if is_cut_short(result) => {}
                error @ -4095..=-1 => return Err(io::Error::from_raw_os_error(-error as i32)),
                value => return Ok(value as u64),
            }
        }
    }

    /// Returns the registers for the thread to run from `rip` on, with a stack that leads back.
    fn in_call(&self, number: u64, arguments: [u64; 3], rip: u64) -> user_regs_struct {
        let mut registers = self.registers;
        (registers.rip, registers.rsp, registers.rax) = (rip, self.frame.at, number);
        if rip == self.gadgets.go_back {
            // A `ret` to it would have left the stack pointer here.
            registers.rsp += 8;
        }
        // No call is in progress, so there is none for the kernel to begin again.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
        registers
    }

    fn wait_in_call(&mut self, deadline: Instant) -> io::Result<()> {
        if trace::wait(Some(self.tid), deadline, |stop| stop == Stop::Call)?.is_some() {
            return Ok(());
        }
        // This cuts short a call that waits. A call that cannot be interrupted goes on without us,
        // and a frozen thread has not begun it.
        trace::interrupt(self.tid)?;
        let grace = Instant::now() + timeout(GRACE);
        self.is_in_call = trace::wait(Some(self.tid), grace, |_| true)?.is_none();
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            match self.is_in_call {
                true => "an injected call takes too long: the thread ends it by itself",
                false => "an injected call took too long and was given up",
            },
        ))
    }

    /// Whether all of a range is shared memory at this moment.
    pub fn is_shared(&mut self, range: HvaRange) -> io::Result<bool> {
        Ok(is_shared(&self.process.mappings()?, range))
    }

    /// Writes bytes to the stack, below the signal frame. Returns where they are, aligned to eight
    /// bytes.
    fn write_below(&self, bytes: &[u8]) -> io::Result<u64> {
        let at = self.frame.at.checked_sub(bytes.len() as u64).map(|at| at & !7);
        let at = at.filter(|&at| has_room(&self.mappings, at, self.frame.at));
        let at = at.ok_or_else(no_room)?;
        self.memory.write_all_at(bytes, at)?;
        Ok(at)
    }

    /// Makes a ring by io_uring_setup(2). Returns its number, and whether what the kernel tells of
    /// it could be read into `params`. Another thread of the process may change that before.
    pub fn setup_ring(&mut self, params: &mut RingParams) -> io::Result<(u64, io::Result<()>)> {
        let at = self.write_below(params.bytes())?;
        let ring = self.call(libc::SYS_io_uring_setup, [RingParams::entries(), at, 0])?;
        Ok((ring, self.memory.read_exact_at(params.bytes_mut(), at)))
    }

    /// Opens a path by openat(2).
    pub fn open(&mut self, path: &CStr) -> io::Result<u64> {
        let at = self.write_below(path.to_bytes_with_nul())?;
        let flags = (libc::O_RDWR | libc::O_CLOEXEC) as u64;
        self.call(libc::SYS_openat, [libc::AT_FDCWD as u64, at, flags])
    }

    /// Makes the thread do what it did before, and releases it.
    pub fn resume(self) -> io::Result<()> {
        if self.is_in_call {
            return Ok(());
        }
        // Death after this: the thread goes the way back, with its own signal mask already set.
        trace::set_signals(self.tid, self.signals)?;
        // Death after this: the thread is what it was.
        trace::set_registers(self.tid, &begun_again(self.registers))?;
        trace::detach(self.tid)
    }
}

/// Asks the first thread to stop, and then one after the other as long as none has stopped. When
/// the tracing thread ends, the kernel releases all threads that were asked.
fn first_to_stop(target: &Target) -> io::Result<pid_t> {
    let deadline = Instant::now() + timeout(STOP_TIMEOUT);
    let (mut asked, mut refused) = (0, None);
    for tid in target.process.threads()?.into_iter().filter(|&tid| !is_of_ring(target, tid)) {
        match trace::seize(tid).and_then(|()| trace::interrupt(tid)) {
            Ok(()) => asked += 1,
            // It ended, or another process traces it.
            Err(error) => {
                refused.get_or_insert(error);
                continue;
            }
        }
        if let Some(tid) = trace::wait(None, Instant::now() + PATIENCE, is_asked)? {
            return Ok(tid);
        }
    }
    if let (0, Some(refused)) = (asked, refused) {
        return Err(refused);
    }
    trace::wait(None, deadline, is_asked)?.ok_or_else(|| {
        let why = "no thread of the process can be stopped: it is frozen, or waits for a disk";
        io::Error::new(io::ErrorKind::TimedOut, why)
    })
}

/// Whether it is a kernel thread of an io_uring: it has no stack to make a call from.
fn is_of_ring(target: &Target, tid: pid_t) -> bool {
    let name = fs::read_to_string(format!("/proc/{}/task/{tid}/comm", target.pid()));
    name.is_ok_and(|name| name.starts_with("iou-"))
}

fn is_asked(stop: Stop) -> bool {
    stop == Stop::Asked
}

/// Returns the thread's floating-point state as rt_sigreturn(2) reads it.
fn fpu(tid: pid_t) -> io::Result<Vec<u8>> {
    match trace::register_set(tid, XSTATE) {
        Ok(state) => frame::for_sigreturn(state),
        // The processor has no XSAVE.
        Err(_) => trace::register_set(tid, FXSTATE),
    }
}

/// Steps back onto the instruction of a call that the stop cut short. A call that waited for some
/// time goes on by restart_syscall(2): the kernel knows how much time is left.
fn begun_again(mut registers: user_regs_struct) -> user_regs_struct {
    let result = registers.rax as i64;
    let left = registers.orig_rax as i64 >= 0 && result == RESTART_BLOCK;
    registers = begun_anew(registers);
    if left {
        registers.rax = libc::SYS_restart_syscall as u64;
    }
    registers
}

fn is_cut_short(result: i64) -> bool {
    RESTARTS.contains(&result) || result == RESTART_BLOCK
}

/// As [`begun_again`], for the way by rt_sigreturn(2), which makes the kernel forget how much time
/// is left. So a call that waited for some time waits from the beginning: longer, but it is not
/// told of a signal that never came. Only a thread that was stopped before in the same wait is told
/// (`EINTR` of restart_syscall(2)), because nothing says which call that was.
fn begun_anew(mut registers: user_regs_struct) -> user_regs_struct {
    let result = registers.rax as i64;
    let in_call = registers.orig_rax as i64 >= 0;
    if in_call && is_cut_short(result) {
        registers.rax = registers.orig_rax;
        registers.rip = registers.rip.wrapping_sub(SYSCALL_INSTRUCTION_BYTES);
    }
    registers.orig_rax = u64::MAX;
    registers
}

/// Whether one writable mapping contains the stack from `bottom` up to `top`.
fn has_room(mappings: &[Vma], bottom: u64, top: u64) -> bool {
    mappings.iter().any(|vma| vma.writable && vma.contains(bottom) && vma.contains(top - 1))
}

fn no_room() -> io::Error {
    io::Error::other("a thread of the process has no room on its stack for an injected call")
}

/// Refuses a thread with a shadow stack. The way back is a return to where no call came from, which
/// a shadow stack forbids.
fn refuse_shadow_stack(status: &str) -> io::Result<()> {
    let features = status.lines().find_map(|line| line.strip_prefix("x86_Thread_features:"));
    match features.is_some_and(|features| features.split_whitespace().any(|one| one == "shstk")) {
        false => Ok(()),
        true => Err(io::Error::other(
            "the process runs with a shadow stack, so no call can be injected: start it with \
             GLIBC_TUNABLES=glibc.cpu.hwcaps=-SHSTK",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shadow_stack_is_refused() {
        assert!(refuse_shadow_stack("Name:\tx\nx86_Thread_features:\t\n").is_ok());
        assert!(refuse_shadow_stack("x86_Thread_features:\tshstk wrss \n").is_err());
        assert!(refuse_shadow_stack("").is_ok());
    }
}
