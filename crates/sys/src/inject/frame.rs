//! Signal frames: what the kernel writes on a thread's stack before it calls a signal handler, and
//! reads at rt_sigreturn(2). A frame has the thread's whole state. Layout: `struct rt_sigframe` in
//! `arch/x86/include/asm/sigframe.h`, `struct _fpx_sw_bytes` in `uapi/asm/sigcontext.h`.

use std::arch::x86_64::__cpuid_count;
use std::io;
use std::mem::size_of;

use libc::user_regs_struct;

/// Bytes below its stack pointer that the x86-64 ABI lets a function use.
const RED_ZONE_BYTES: u64 = 128;
/// Size of `pretcode`, `struct ucontext` and `siginfo_t` together.
const FRAME_BYTES: u64 = 8 + 304 + 128;
/// `UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS`.
const UC_FLAGS: u64 = 7;
/// A mode that sigaltstack(2) does not know: rt_sigreturn leaves the thread's signal stack as it
/// is.
const NO_SIGNAL_STACK: u64 = 3;

/// Size of what FXSAVE writes. XSAVE's header follows.
const FXSAVE_BYTES: usize = 512;
const XSAVE_HEADER_BYTES: usize = 64;
/// Offset of `sw_reserved`: what the kernel says about the rest of the state. In a state from
/// ptrace(2) its first word says which parts the processor has.
const SOFTWARE_AT: usize = 464;
const MAGIC1: u32 = 0x4650_5853;
const MAGIC2: u32 = 0x4650_5845;
const PKRU: u64 = 1 << 9;
/// Parts that a process has only if it asked for them: AMX.
const ASKED_FOR: u64 = 1 << 18;

/// A thread's signal frame, to be written at an address of its stack.
pub(super) struct Frame {
    /// Its address. A `ret` with the stack pointer there leads back.
    pub at: u64,
    pub bytes: Vec<u8>,
}

impl Frame {
    /// Makes a frame of the registers with which the thread is to go on, its signal mask, and its
    /// floating-point state as rt_sigreturn(2) reads it. `go_back` is the address of code that
    /// calls rt_sigreturn(2). Returns `None` if the stack pointer is too low for a frame.
    pub fn new(
        registers: &user_regs_struct,
        signals: u64,
        fpu: Vec<u8>,
        go_back: u64,
    ) -> Option<Frame> {
        // The kernel loads the state only from a multiple of 64, and has 16 n + 8 for the rest.
        let fpu_at = registers.rsp.checked_sub(RED_ZONE_BYTES + fpu.len() as u64)? & !63;
        let at = (fpu_at.checked_sub(FRAME_BYTES)? & !15).checked_sub(8)?;
        let mut bytes = Vec::new();
        for word in words(registers, signals, fpu_at, go_back) {
            bytes.extend(word.to_le_bytes());
        }
        bytes.resize((fpu_at - at) as usize, 0);
        bytes.extend(fpu);
        Some(Frame { at, bytes })
    }
}

fn words(r: &user_regs_struct, signals: u64, fpu_at: u64, go_back: u64) -> [u64; 39] {
    let selectors = r.cs & 0xffff | (r.ss & 0xffff) << 48;
    let mut words = [0; 39];
    words[..6].copy_from_slice(&[go_back, UC_FLAGS, 0, 0, NO_SIGNAL_STACK, 0]);
    words[6..25].copy_from_slice(&[
        r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx,
        r.rax, r.rcx, r.rsp, r.rip, r.eflags, selectors,
    ]);
    // Words 25 to 28 are `err`, `trapno`, `oldmask` and `cr2`; words 30 to 37 are reserved.
    words[29] = fpu_at;
    words[38] = signals;
    words
}

/// Converts a thread's XSAVE state from what ptrace(2) returns to what rt_sigreturn(2) reads: the
/// state with one magic number in it and another behind it. Without them only the first 512 bytes
/// would count.
///
/// # Errors
/// `InvalidData`: the state is shorter than what it claims to have.
pub(super) fn for_sigreturn(mut state: Vec<u8>) -> io::Result<Vec<u8>> {
    let has = word(&state, SOFTWARE_AT)?;
    let used = word(&state, FXSAVE_BYTES)?;
    // The kernel accepts no larger state than this process may have.
    let parts = has & !(ASKED_FOR & !used);
    let bytes = xsave_bytes(parts);
    if bytes > state.len() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    state.truncate(bytes);
    // ptrace always returns the protection keys, but says only sometimes that they are there.
    put(&mut state, FXSAVE_BYTES, &(used & parts | PKRU & parts).to_le_bytes());
    let size = bytes as u32;
    let mut software = Vec::new();
    software.extend(MAGIC1.to_le_bytes());
    software.extend((size + size_of::<u32>() as u32).to_le_bytes());
    software.extend(parts.to_le_bytes());
    software.extend(size.to_le_bytes());
    software.resize(FXSAVE_BYTES - SOFTWARE_AT, 0);
    put(&mut state, SOFTWARE_AT, &software);
    state.extend(MAGIC2.to_le_bytes());
    Ok(state)
}

fn word(state: &[u8], at: usize) -> io::Result<u64> {
    let bytes = state.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
    bytes.map(u64::from_le_bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn put(state: &mut [u8], at: usize, bytes: &[u8]) {
    state[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Returns the length of an uncompacted XSAVE area with these parts, as the processor lays it out.
fn xsave_bytes(parts: u64) -> usize {
    let end = |part: u32| {
        let layout = __cpuid_count(0xd, part);
        layout.ebx as usize + layout.eax as usize
    };
    let ends = (2..63).filter(|part| parts & 1 << part != 0).map(end);
    ends.max().unwrap_or(0).max(FXSAVE_BYTES + XSAVE_HEADER_BYTES)
}
