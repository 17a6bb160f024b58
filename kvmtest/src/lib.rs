//! A guest of some instructions under KVM, and a VMM as small, for the fault
//! path: real memory slots and real vCPUs, where `/dev/kvm` boots no kernel.
//!
//! The [`Machine`] is the VM: the guest runs in ring 3 of long mode, on an
//! identity map of 4 KiB pages that the host has built in its memory, and
//! leaves by `out`. The [`Daemon`] holds it with the project's own pager, in
//! the same process. [`blocks`], [`counting`], [`reuse`] and [`sharing`] are what the
//! guest does that shows whether a byte was lost.
//!
//! Everything here panics when it goes wrong: it serves tests only. Whoever
//! waits, waits for an event; if it does not come, the panic says what every
//! thread waits for.
#![forbid(unsafe_code)]

pub mod blocks;
pub mod counting;
mod daemon;
mod machine;
mod paging;
mod program;
pub mod reuse;
pub mod sharing;
mod vcpu;
mod wait;

pub use daemon::Daemon;
pub use ebb_sys::kvm_vm::Registers;
pub use machine::{MAILBOX, Machine, available, punch};
pub use program::Program;
pub use vcpu::Running;
pub use wait::{DEADLINE, until};
