//! A vCPU at work on a thread of its own.

use std::thread::{self, JoinHandle};

use ebb_sys::kvm_vm::{Exit, Registers, Segment, SpecialRegisters, Vcpu};

use crate::paging;
use crate::wait::until;

/// Where a program that is done writes to.
const DONE: u16 = 0x10;

/// Descriptor types and selectors; the low two bits ask for ring 3.
const CODE: (u8, u16) = (0xb, 0x1b);
const DATA: (u8, u16) = (0x3, 0x23);

/// Protected mode, paging, and what always goes with them.
const CR0: u64 = 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
/// Physical address extension: long mode needs it.
const CR4: u64 = 1 << 5;
/// Long mode enabled and active.
const EFER: u64 = 1 << 8 | 1 << 10;
/// Bit 1 is always set. I/O privilege level 3: ring 3 may use `out`.
const RFLAGS: u64 = 1 << 1 | 3 << 12;

/// A vCPU in its program.
#[must_use]
pub struct Running {
    name: String,
    thread: JoinHandle<Registers>,
}

impl Running {
    pub(crate) fn start(name: String, vcpu: Vcpu, registers: Registers) -> Running {
        let special = vcpu.special_registers().expect("KVM_GET_SREGS");
        vcpu.set_special_registers(ring3(special)).expect("KVM_SET_SREGS");
        vcpu.set_registers(Registers { rflags: RFLAGS, ..registers }).expect("KVM_SET_REGS");
        let thread = thread::Builder::new().name(name.clone()).spawn(move || run(&vcpu));
        Running { name, thread: thread.expect("a thread for the vCPU") }
    }

    /// Whether it has left its program.
    pub fn has_left(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until it leaves; what its registers say then.
    pub fn leave(self) -> Registers {
        until(format_args!("{} to leave", self.name), || self.has_left().then_some(()));
        self.thread.join().expect("the vCPU leaves by its port")
    }
}

fn run(vcpu: &Vcpu) -> Registers {
    loop {
        match vcpu.run().expect("KVM_RUN") {
            Exit::Io { port: DONE } => return vcpu.registers().expect("KVM_GET_REGS"),
            Exit::Interrupted => {}
            other => panic!("left by {other:?}: {:x?}", vcpu.registers()),
        }
    }
}

fn ring3(reset: SpecialRegisters) -> SpecialRegisters {
    let flat = |(kind, selector)| Segment {
        limit: u32::MAX,
        selector,
        kind,
        present: 1,
        dpl: 3,
        s: 1,
        g: 1,
        ..Segment::default()
    };
    let data = Segment { db: 1, ..flat(DATA) };
    SpecialRegisters {
        cs: Segment { l: 1, ..flat(CODE) },
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        cr0: CR0,
        cr3: paging::ROOT.0,
        cr4: CR4,
        efer: EFER,
        ..reset
    }
}
