//! Tells whether a stock kernel boots on `/dev/kvm`.
//!
//! Some hosts have a KVM that emulates ring 0 in software, a thousand times slower than the
//! processor. A kernel never gets through its boot there. So the probe does not ask the device what
//! it can do, but runs a loop in real mode, which hardware finishes within some milliseconds.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ebb_units::Gpa;

use crate::kvm_vm::{Exit, Registers, Vcpu, Vm};
use crate::mapping::Mapping;
use crate::ram_file::RamFile;

/// `mov ecx, 4_000_000; loop: dec ecx; jnz loop; hlt` in 16-bit code.
const LOOP: [u8; 12] = [0x66, 0xb9, 0x00, 0x09, 0x3d, 0x00, 0x66, 0x49, 0x75, 0xfc, 0xf4, 0x90];
/// Longest time for the loop. Hardware needs 4 ms, emulation more than 4 s.
const PATIENCE: Duration = Duration::from_millis(400);

/// The result of the probe.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Guests run on the processor.
    Hardware,
    /// The device works, but emulates kernel mode: too slow for a stock kernel.
    Software,
    /// The device is of no use, for this reason.
    Unusable(String),
}

/// Probes `/dev/kvm`, in at most half a second.
pub fn probe() -> Verdict {
    match run_loop() {
        Ok(true) => Verdict::Hardware,
        Ok(false) => Verdict::Software,
        Err(error) => Verdict::Unusable(error.to_string()),
    }
}

fn run_loop() -> io::Result<bool> {
    let vm = Vm::create()?;
    let file = RamFile::create("ebb-kvm-probe", 4096)?;
    let memory = Arc::new(Mapping::new(&file, 0, 4096)?);
    load(&memory)?;
    vm.set_memory(0, Gpa(0), memory)?;
    let vcpu = vm.vcpu(0)?;
    start_at_zero(&vcpu)?;
    finishes_in_time(&vcpu)
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

fn start_at_zero(vcpu: &Vcpu) -> io::Result<()> {
    let mut special = vcpu.special_registers()?;
    (special.cs.base, special.cs.selector) = (0, 0);
    vcpu.set_special_registers(special)?;
    vcpu.set_registers(Registers { rip: 0, rflags: 2, ..vcpu.registers()? })
}

/// Runs the vCPU on a thread of its own, and stops it wherever it is after `PATIENCE`. Returns
/// whether it finished.
fn finishes_in_time(vcpu: &Vcpu) -> io::Result<bool> {
    ignore_alarm_signal();
    let tid = AtomicI32::new(0);
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| {
            tid.store(rustix::thread::gettid().as_raw_pid(), Relaxed);
            vcpu.run()
        });
        let deadline = Instant::now() + PATIENCE;
        while !runner.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        while !runner.is_finished() {
            vcpu.leave_soon();
            interrupt(tid.load(Relaxed));
            std::thread::sleep(Duration::from_millis(1));
        }
        match runner.join() {
            Ok(exit) => exit.map(|exit| exit == Exit::Halt),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn ignore_alarm_signal() {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: the handler does nothing, so it is safe at any instruction; the signal (SIGURG) is
    // ignored by default and nothing else here uses it.
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
