//! Is `/dev/kvm` one on which a stock kernel boots?
//!
//! Some hosts offer a KVM that emulates ring 0 in software, a thousand times
//! slower than the processor; a kernel never gets through its boot there. So
//! the device is not asked what it can do, it is given something to do: a loop
//! in real mode, which hardware finishes within some milliseconds.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU64};
use std::time::{Duration, Instant};

use crate::mapping::Mapping;
use crate::ram_file::RamFile;

const KVM_CREATE_VM: u64 = 0xae01;
const KVM_GET_VCPU_MMAP_SIZE: u64 = 0xae04;
const KVM_CREATE_VCPU: u64 = 0xae41;
const KVM_SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
const KVM_RUN: u64 = 0xae80;
const KVM_GET_REGS: u64 = 0x8090_ae81;
const KVM_SET_REGS: u64 = 0x4090_ae82;
const KVM_GET_SREGS: u64 = 0x8138_ae83;
const KVM_SET_SREGS: u64 = 0x4138_ae84;

/// `kvm_run.exit_reason` lies at byte 8: the second word's lower half.
const EXIT_REASON_WORD: usize = 1;
const KVM_EXIT_HLT: u32 = 5;
/// `kvm_run.immediate_exit`, byte 1 of the first word.
const IMMEDIATE_EXIT: u64 = 1 << 8;

/// `mov ecx, 4_000_000; loop: dec ecx; jnz loop; hlt` in 16-bit code.
const LOOP: [u8; 12] = [0x66, 0xb9, 0x00, 0x09, 0x3d, 0x00, 0x66, 0x49, 0x75, 0xfc, 0xf4, 0x90];
/// Hardware needs 4 ms for the loop, emulation more than 4 s.
const PATIENCE: Duration = Duration::from_millis(400);

/// What the probe found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Guests run on the processor.
    Hardware,
    /// The device works, but emulates kernel mode: too slow for a stock kernel.
    Software,
    /// No use: why.
    Unusable(String),
}

/// Tries `/dev/kvm`; takes at most half a second.
pub fn probe() -> Verdict {
    match run_loop() {
        Ok(true) => Verdict::Hardware,
        Ok(false) => Verdict::Software,
        Err(error) => Verdict::Unusable(error.to_string()),
    }
}

#[repr(C)]
struct MemoryRegion {
    slot: u32,
    flags: u32,
    guest_address: u64,
    bytes: u64,
    host_address: u64,
}

const _: () = assert!(size_of::<MemoryRegion>() == 32);

#[repr(C)]
#[derive(Default)]
struct Registers {
    general: [u64; 16],
    rip: u64,
    rflags: u64,
}

const _: () = assert!(size_of::<Registers>() == 144);

/// `struct kvm_sregs`: 312 bytes, of which only the code segment's base (word
/// 0) and selector (bytes 12-13) are changed.
type Segments = [u64; 39];

fn run_loop() -> io::Result<bool> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm")?;
    let vm = make(kvm.as_raw_fd(), KVM_CREATE_VM, 0)?;
    let file = RamFile::create("ebb-kvm-probe", 4096)?;
    let memory = Mapping::new(&file, 0, 4096)?;
    load(&memory)?;
    let region = MemoryRegion {
        slot: 0,
        flags: 0,
        guest_address: 0,
        bytes: 4096,
        host_address: memory.address().0,
    };
    ioctl(vm.as_raw_fd(), KVM_SET_USER_MEMORY_REGION, (&raw const region) as u64)?;
    let vcpu = make(vm.as_raw_fd(), KVM_CREATE_VCPU, 0)?;
    set_registers(&vcpu)?;
    let run_bytes = ioctl(kvm.as_raw_fd(), KVM_GET_VCPU_MMAP_SIZE, 0)?;
    let run = Mapping::new(&vcpu, 0, run_bytes as u64)?;
    let words = run.words(0, 2).ok_or(io::ErrorKind::InvalidData)?;
    finishes_in_time(&vcpu, words)
}

fn load(memory: &Mapping) -> io::Result<()> {
    let words = memory.words(0, 2).ok_or(io::ErrorKind::InvalidData)?;
    for (word, bytes) in words.iter().zip(LOOP.chunks(8)) {
        let mut eight = [0; 8];
        eight[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_le_bytes(eight), Relaxed);
    }
    Ok(())
}

fn set_registers(vcpu: &OwnedFd) -> io::Result<()> {
    let mut segments: Segments = [0; 39];
    ioctl(vcpu.as_raw_fd(), KVM_GET_SREGS, (&raw mut segments) as u64)?;
    segments[0] = 0;
    segments[1] &= !(0xffff << 32);
    ioctl(vcpu.as_raw_fd(), KVM_SET_SREGS, (&raw const segments) as u64)?;
    let mut registers = Registers::default();
    ioctl(vcpu.as_raw_fd(), KVM_GET_REGS, (&raw mut registers) as u64)?;
    registers.rip = 0;
    registers.rflags = 2;
    ioctl(vcpu.as_raw_fd(), KVM_SET_REGS, (&raw const registers) as u64).map(drop)
}

/// Runs the vCPU on a thread of its own and stops it when patience ends:
/// `immediate_exit` and a signal together end KVM_RUN wherever it is.
fn finishes_in_time(vcpu: &OwnedFd, run: &[AtomicU64]) -> io::Result<bool> {
    ignore_alarm_signal();
    let tid = AtomicI32::new(0);
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| {
            tid.store(rustix::thread::gettid().as_raw_pid(), Relaxed);
            ioctl(vcpu.as_raw_fd(), KVM_RUN, 0)
        });
        let deadline = Instant::now() + PATIENCE;
        while !runner.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        while !runner.is_finished() {
            run[0].fetch_or(IMMEDIATE_EXIT, Relaxed);
            interrupt(tid.load(Relaxed));
            std::thread::sleep(Duration::from_millis(1));
        }
        let halted = run[EXIT_REASON_WORD].load(Relaxed) as u32 == KVM_EXIT_HLT;
        match runner.join() {
            Ok(Ok(_)) => Ok(halted),
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
            Ok(Err(error)) => Err(error),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn ignore_alarm_signal() {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: the handler does nothing, so it is safe at any instruction; the
    // signal (SIGURG) is ignored by default and used by nothing else here.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        libc::sigaction(libc::SIGURG, &action, std::ptr::null_mut());
    }
}

fn interrupt(tid: i32) {
    // SAFETY: tgkill(2) takes integers; the thread is one of this process.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, libc::SIGURG) };
}

fn make(fd: RawFd, request: u64, argument: u64) -> io::Result<OwnedFd> {
    let made = ioctl(fd, request, argument)?;
    // SAFETY: KVM_CREATE_VM and KVM_CREATE_VCPU return a new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

fn ioctl(fd: RawFd, request: u64, argument: u64) -> io::Result<i32> {
    // SAFETY: each caller passes either an integer or the address of the
    // struct whose size is part of `request`.
    match unsafe { libc::ioctl(fd, request, argument) } {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probe_ends_and_agrees_with_itself() {
        let began = Instant::now();
        let first = probe();
        assert!(began.elapsed() < Duration::from_secs(60));
        assert_eq!(first, probe());
        eprintln!("/dev/kvm: {first:?}");
    }
}
