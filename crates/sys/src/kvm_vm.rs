//! Virtual machines from `/dev/kvm`, as far as a guest of a few instructions needs them. ABI:
//! `include/uapi/linux/kvm.h`, and `asm/kvm.h` for x86.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use ebb_units::Gpa;

use crate::mapping::Mapping;

const KVM_CREATE_VM: u64 = 0xae01;
const KVM_GET_VCPU_MMAP_SIZE: u64 = 0xae04;
const KVM_CREATE_VCPU: u64 = 0xae41;
const KVM_RUN: u64 = 0xae80;
const KVM_SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
const KVM_GET_REGS: u64 = 0x8090_ae81;
const KVM_SET_REGS: u64 = 0x4090_ae82;
const KVM_GET_SREGS: u64 = 0x8138_ae83;
const KVM_SET_SREGS: u64 = 0x4138_ae84;

/// The number of words of `struct kvm_run` that are used. `immediate_exit` is byte 1 of the first.
/// Bits 16 to 31 of the first word of its union are the port of an I/O exit.
const RUN_WORDS: usize = 5;
const IMMEDIATE_EXIT: u64 = 1 << 8;
const EXIT_REASON: usize = 1;
const EXIT_IO: usize = 4;
const IO_PORT_SHIFT: u32 = 16;

const KVM_EXIT_IO: u32 = 2;
const KVM_EXIT_HLT: u32 = 5;

/// Why a vCPU left the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// The guest read or wrote this I/O port. A read gets zero.
    Io {
        /// The port.
        port: u16,
    },
    /// The guest executed `hlt`.
    Halt,
    /// A signal came, or [`Vcpu::leave_soon`] was called.
    Interrupted,
    /// Anything else, by its `KVM_EXIT_` number. 8: the guest crashed.
    Other(u32),
}

/// `struct kvm_regs`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
#[expect(missing_docs, reason = "the processor's own names")]
pub struct Registers {
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub rsp: u64,
    pub rbp: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
    pub rip: u64,
    pub rflags: u64,
}

/// `struct kvm_segment`: a segment register with its hidden part.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
#[expect(missing_docs, reason = "the processor's own names")]
pub struct Segment {
    pub base: u64,
    pub limit: u32,
    pub selector: u16,
    pub kind: u8,
    pub present: u8,
    pub dpl: u8,
    pub db: u8,
    pub s: u8,
    pub l: u8,
    pub g: u8,
    pub avl: u8,
    pub unusable: u8,
    pub padding: u8,
}

/// `struct kvm_sregs`.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
#[expect(missing_docs, reason = "the processor's own names")]
pub struct SpecialRegisters {
    pub cs: Segment,
    pub ds: Segment,
    pub es: Segment,
    pub fs: Segment,
    pub gs: Segment,
    pub ss: Segment,
    pub tr: Segment,
    pub ldt: Segment,
    pub descriptor_tables: [u64; 4],
    pub cr0: u64,
    pub cr2: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub cr8: u64,
    pub efer: u64,
    pub apic_base: u64,
    pub interrupts: [u64; 4],
}

#[repr(C)]
struct MemoryRegion {
    slot: u32,
    flags: u32,
    guest_address: u64,
    bytes: u64,
    host_address: u64,
}

/// A virtual machine without devices.
pub struct Vm {
    handle: Arc<Handle>,
}

/// Lives as long as the VM or one of its vCPUs.
struct Handle {
    vm: OwnedFd,
    kvm: File,
    /// Memory that the guest can write to. It stays mapped while any vCPU may run.
    memory: Mutex<Vec<Arc<Mapping>>>,
}

impl Vm {
    /// Makes a VM without memory.
    ///
    /// # Errors
    /// As open(2) of `/dev/kvm` and KVM_CREATE_VM.
    pub fn create() -> io::Result<Vm> {
        let kvm = File::options().read(true).write(true).open("/dev/kvm")?;
        let vm = make::<KVM_CREATE_VM>(kvm.as_raw_fd(), 0)?;
        Ok(Vm { handle: Arc::new(Handle { vm, kvm, memory: Mutex::default() }) })
    }

    /// Makes `memory` the guest's memory from `guest_address` on.
    ///
    /// # Errors
    /// As KVM_SET_USER_MEMORY_REGION: `EEXIST` if it overlaps another slot.
    pub fn set_memory(
        &self,
        slot: u32,
        guest_address: Gpa,
        memory: Arc<Mapping>,
    ) -> io::Result<()> {
        let mut region = MemoryRegion {
            slot,
            flags: 0,
            guest_address: guest_address.0,
            bytes: memory.bytes(),
            host_address: memory.address().0,
        };
        let mut kept = self.handle.memory.lock().map_err(|_| io::ErrorKind::Other)?;
        exchange::<KVM_SET_USER_MEMORY_REGION, _>(self.handle.vm.as_raw_fd(), &mut region)?;
        kept.push(memory);
        Ok(())
    }

    /// Makes its virtual processor `number`, in the state after a reset.
    ///
    /// # Errors
    /// As KVM_CREATE_VCPU: `EEXIST` if it was made before.
    pub fn vcpu(&self, number: u32) -> io::Result<Vcpu> {
        let fd = make::<KVM_CREATE_VCPU>(self.handle.vm.as_raw_fd(), u64::from(number))?;
        let bytes = ask::<KVM_GET_VCPU_MMAP_SIZE>(self.handle.kvm.as_raw_fd(), 0)?;
        let run = Mapping::new(&fd, 0, bytes as u64)?;
        run.words(0, RUN_WORDS).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Vcpu { run, fd, _vm: Arc::clone(&self.handle) })
    }
}

/// A virtual processor. It runs on the thread that calls [`Vcpu::run`].
pub struct Vcpu {
    run: Mapping,
    fd: OwnedFd,
    _vm: Arc<Handle>,
}

impl Vcpu {
    /// Runs the guest until it exits.
    ///
    /// # Errors
    /// As KVM_RUN; an interruption is no error.
    pub fn run(&self) -> io::Result<Exit> {
        match ask::<KVM_RUN>(self.fd.as_raw_fd(), 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Exit::Interrupted),
            Err(error) => Err(error),
            Ok(_) => Ok(match self.word(EXIT_REASON) as u32 {
                KVM_EXIT_IO => Exit::Io { port: (self.word(EXIT_IO) >> IO_PORT_SHIFT) as u16 },
                KVM_EXIT_HLT => Exit::Halt,
                other => Exit::Other(other),
            }),
        }
    }

    /// Makes [`Vcpu::run`] return before it enters the guest from now on. A vCPU that is in the
    /// guest also needs a signal to its thread.
    pub fn leave_soon(&self) {
        self.words()[0].fetch_or(IMMEDIATE_EXIT, Relaxed);
    }

    /// Returns the general registers; waits while the vCPU runs.
    ///
    /// # Errors
    /// As KVM_GET_REGS.
    pub fn registers(&self) -> io::Result<Registers> {
        let mut registers = Registers::default();
        exchange::<KVM_GET_REGS, _>(self.fd.as_raw_fd(), &mut registers)?;
        Ok(registers)
    }

    /// Sets the general registers; waits while the vCPU runs.
    ///
    /// # Errors
    /// As KVM_SET_REGS.
    pub fn set_registers(&self, mut registers: Registers) -> io::Result<()> {
        exchange::<KVM_SET_REGS, _>(self.fd.as_raw_fd(), &mut registers)
    }

    /// Returns segment and control registers; waits while the vCPU runs.
    ///
    /// # Errors
    /// As KVM_GET_SREGS.
    pub fn special_registers(&self) -> io::Result<SpecialRegisters> {
        let mut registers = SpecialRegisters::default();
        exchange::<KVM_GET_SREGS, _>(self.fd.as_raw_fd(), &mut registers)?;
        Ok(registers)
    }

    /// Sets segment and control registers; waits while the vCPU runs.
    ///
    /// # Errors
    /// As KVM_SET_SREGS: `EINVAL` for a state that no processor can be in.
    pub fn set_special_registers(&self, mut registers: SpecialRegisters) -> io::Result<()> {
        exchange::<KVM_SET_SREGS, _>(self.fd.as_raw_fd(), &mut registers)
    }

    fn word(&self, index: usize) -> u64 {
        self.words()[index].load(Relaxed)
    }

    fn words(&self) -> &[AtomicU64] {
        match self.run.words(0, RUN_WORDS) {
            Some(words) => words,
            None => unreachable!("checked when the vCPU was made"),
        }
    }
}

fn make<const REQUEST: u64>(fd: RawFd, argument: u64) -> io::Result<OwnedFd> {
    const { assert!(REQUEST == KVM_CREATE_VM || REQUEST == KVM_CREATE_VCPU) };
    let made = ask::<REQUEST>(fd, argument)?;
    // SAFETY: the two requests return a new descriptor, which nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(made) })
}

/// Returns the size of the struct that a request takes, as its number says.
const fn struct_bytes(request: u64) -> usize {
    (request >> 16 & 0x3fff) as usize
}

fn ask<const REQUEST: u64>(fd: RawFd, argument: u64) -> io::Result<i32> {
    const { assert!(struct_bytes(REQUEST) == 0) };
    // SAFETY: the request takes an integer. A running guest writes only to memory that is shared
    // and accessed through atomics, see `Handle`.
    match unsafe { libc::ioctl(fd, REQUEST, argument) } {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

fn exchange<const REQUEST: u64, T>(fd: RawFd, argument: &mut T) -> io::Result<()> {
    const { assert!(struct_bytes(REQUEST) == size_of::<T>()) };
    // SAFETY: the request takes the address of a struct of this size (just
    // checked); only plain integers are read from and written to it.
    match unsafe { libc::ioctl(fd, REQUEST, std::ptr::from_mut(argument)) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
