//! A vCPU that runs on a thread of its own.

use std::thread::{self, JoinHandle};

use ebb_sys::kvm_vm::{Exit, Registers, Segment, SpecialRegisters, Vcpu};

use crate::paging;
use crate::wait::until;

/// The port that a finished program writes to.
const DONE: u16 = 0x10;

/// Descriptor type and selector. The low two bits of the selector ask for ring 3.
const CODE: (u8, u16) = (0xb, 0x1b);
const DATA: (u8, u16) = (0x3, 0x23);

/// Protected mode, paging, and the bits that always go with them.
const CR0: u64 = 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
/// Physical address extension, which long mode needs.
const CR4: u64 = 1 << 5;
/// Long mode is enabled and active.
const EFER: u64 = 1 << 8 | 1 << 10;
/// Bit 1 is always set. I/O privilege level 3 lets ring 3 use `out`.
const RFLAGS: u64 = 1 << 1 | 3 << 12;

/// A vCPU that runs a program.
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

    /// Whether the vCPU has left its program.
    pub fn has_left(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until the vCPU leaves. Returns its registers at that time.
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
