//! One thread of another process, stopped, that makes system calls for us and finds back to
//! what it did by itself.
//!
//! Before the thread is sent into a call, a signal frame of its own state is written below its
//! red zone, and the call's instruction is one that is followed by `ret`: to rt_sigreturn(2). So
//! whenever the tracer is gone, the thread makes the call to its end and is what it was. Beside
//! each step stands what is left of the thread if the tracer dies behind it.

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
use crate::process::{Process, Vma};
use crate::uffd::HvaRange;

/// A process of which no thread stops within this time is left alone.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// A thread that has not stopped by then may sleep where nothing wakes it: another one is
/// asked, too.
const PATIENCE: Duration = Duration::from_millis(100);
/// An injected call that takes longer is given up.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// A call that took too long is given so much time to end when it is interrupted.
const GRACE: Duration = Duration::from_secs(1);
/// `NT_X86_XSTATE` and `NT_PRFPREG` of `elf.h`.
const XSTATE: u64 = 0x202;
const FXSTATE: u64 = 2;
const SYSCALL_INSTRUCTION_BYTES: u64 = 2;
/// The kernel's internal "begin this call again" results, `include/linux/errno.h`.
const RESTARTS: [i64; 3] = [-512, -513, -514];
const RESTART_BLOCK: i64 = -516;

/// A stopped thread. Whoever drops it without [`Stopped::resume`] must end the thread that
/// traces: the kernel lets go of what it traced, and what is left finds back by itself.
pub(super) struct Stopped<'p> {
    process: &'p Process,
    tid: pid_t,
    registers: user_regs_struct,
    signals: u64,
    gadgets: Gadgets,
    mappings: Vec<Vma>,
    memory: File,
    frame: Frame,
    /// It makes a call that cannot be interrupted.
    is_away: bool,
}

impl<'p> Stopped<'p> {
    /// Stops the process's first thread, or if that does not stop another one.
    pub fn stop(target: &Target<'p>) -> io::Result<Stopped<'p>> {
        // Death from here on: the kernel lets the thread go on, and begins its call again.
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
        let (process, is_away) = (target.process, false);
        let stopped =
            Stopped { process, tid, registers, signals, gadgets, mappings, memory, frame, is_away };
        stopped.prepare()?;
        Ok(stopped)
    }

    /// From here on the thread may be sent into calls.
    fn prepare(&self) -> io::Result<()> {
        // Death from here on: as before, with bytes on its stack where nothing is.
        may_die_here();
        self.memory.write_all_at(&self.frame.bytes, self.frame.at)?;
        // Death behind this: it goes the way back, and does what it did before.
        trace::set_registers(self.tid, &self.in_call(0, [u64::MAX, 0, 0], self.gadgets.go_back))?;
        // Death behind this: the same; the way back ends with its own signal mask.
        trace::set_signals(self.tid, u64::MAX)
    }

    /// One system call with up to three arguments.
    ///
    /// # Errors
    /// What the call returned; `TimedOut`: it takes too long.
    pub fn call(&mut self, number: libc::c_long, arguments: [u64; 3]) -> io::Result<u64> {
        let registers = self.in_call(number as u64, arguments, self.gadgets.call);
        // Death behind this: it makes the call, and goes the way back.
        trace::set_registers(self.tid, &registers)?;
        let deadline = Instant::now() + timeout(CALL_TIMEOUT);
        loop {
            for _ in ["entry", "exit"] {
                trace::run_to_call(self.tid)?;
                // Death while it runs: as before, however long the call takes.
                self.wait_in_call(deadline)?;
            }
            // Death behind this: it goes the way back.
            match trace::registers(self.tid)?.rax as i64 {
                // A freezer, say, has cut it short: the kernel begins it again.
                result if is_cut_short(result) => {}
                error @ -4095..=-1 => return Err(io::Error::from_raw_os_error(-error as i32)),
                value => return Ok(value as u64),
            }
        }
    }

    /// The registers with which the thread runs from `rip` on, its stack leading back.
    fn in_call(&self, number: u64, arguments: [u64; 3], rip: u64) -> user_regs_struct {
        let mut registers = self.registers;
        (registers.rip, registers.rsp, registers.rax) = (rip, self.frame.at, number);
        if rip == self.gadgets.go_back {
            // Where a `ret` would have left it.
            registers.rsp += 8;
        }
        // No call is in progress: nothing for the kernel to begin again.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
        registers
    }

    fn wait_in_call(&mut self, deadline: Instant) -> io::Result<()> {
        if trace::wait(Some(self.tid), deadline, |stop| stop == Stop::Call)?.is_some() {
            return Ok(());
        }
        // A call that waits is cut short by this; one that cannot be goes on without us, and a
        // thread that is frozen has not begun it.
        trace::interrupt(self.tid)?;
        let grace = Instant::now() + timeout(GRACE);
        self.is_away = trace::wait(Some(self.tid), grace, |_| true)?.is_none();
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            match self.is_away {
                true => "an injected call takes too long: the thread ends it by itself",
                false => "an injected call took too long and was given up",
            },
        ))
    }

    /// Whether all of a range is shared memory at this moment.
    pub fn is_shared(&mut self, range: HvaRange) -> io::Result<bool> {
        Ok(super::is_shared(&self.process.mappings()?, range))
    }

    /// openat(2) of a path, lent below the way back.
    pub fn open(&mut self, path: &CStr) -> io::Result<u64> {
        let bytes = path.to_bytes_with_nul();
        let at = self.frame.at.checked_sub(bytes.len() as u64);
        let at = at.filter(|&at| has_room(&self.mappings, at, self.frame.at));
        let at = at.ok_or_else(no_room)?;
        self.memory.write_all_at(bytes, at)?;
        let flags = (libc::O_RDWR | libc::O_CLOEXEC) as u64;
        self.call(libc::SYS_openat, [libc::AT_FDCWD as u64, at, flags])
    }

    /// Lets the thread do what it did before, and go.
    pub fn resume(self) -> io::Result<()> {
        if self.is_away {
            return Ok(());
        }
        // Death behind this: it goes the way back, with nothing held back any more.
        trace::set_signals(self.tid, self.signals)?;
        // Death behind this: it is what it was.
        trace::set_registers(self.tid, &begun_again(self.registers))?;
        trace::detach(self.tid)
    }
}

/// Asks the first thread, and one after the other as long as none has stopped. When the tracing
/// thread ends, those that were asked, too, are let go.
fn first_to_stop(target: &Target) -> io::Result<pid_t> {
    let deadline = Instant::now() + timeout(STOP_TIMEOUT);
    let (mut asked, mut refused) = (0, None);
    for tid in target.process.threads()? {
        match trace::seize(tid).and_then(|()| trace::interrupt(tid)) {
            Ok(()) => asked += 1,
            // It ended, or somebody else traces it.
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

fn is_asked(stop: Stop) -> bool {
    stop == Stop::Asked
}

/// Its floating-point state as rt_sigreturn(2) reads it.
fn fpu(tid: pid_t) -> io::Result<Vec<u8>> {
    match trace::register_set(tid, XSTATE) {
        Ok(state) => frame::for_sigreturn(state),
        // A processor without XSAVE.
        Err(_) => trace::register_set(tid, FXSTATE),
    }
}

/// A call that the stop cut short: step back onto its instruction. The kernel knows how much of
/// a time is left to wait for.
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

/// As [`begun_again`], by way of rt_sigreturn(2), which has the kernel forget that: who waited
/// for some time does so from the beginning. It waits longer, but is not told of a signal that
/// there was not. Only who was stopped before in the same wait is: nobody tells which call that was
/// (`EINTR` of restart_syscall(2)).
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

/// Whether a stack reaches down to `bottom` from `top`: one mapping, which can be written.
fn has_room(mappings: &[Vma], bottom: u64, top: u64) -> bool {
    mappings.iter().any(|vma| vma.writable && vma.contains(bottom) && vma.contains(top - 1))
}

fn no_room() -> io::Error {
    io::Error::other("a thread of the process has no room on its stack for an injected call")
}

/// The way back is a return to where no call came from, which a shadow stack forbids.
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
