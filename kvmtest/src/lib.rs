//! A guest of a few instructions under KVM, and an equally small VMM, to test the fault path with
//! real memory slots and real vCPUs. It also runs where `/dev/kvm` boots no kernel.
//!
//! The [`Machine`] is the VM. Its guest runs in ring 3 of long mode, on an identity map of 4 KiB
//! pages that the host has built in its memory, and leaves by `out`. The [`Daemon`] manages it with
//! the project's own pager, in the same process. [`blocks`], [`counting`], [`reuse`] and
//! [`sharing`] are guest workloads that show whether a byte was lost.
//!
//! Everything here panics on failure, because it serves only tests. Every wait is for an event; if
//! the event does not come, the panic says what each thread waits for.
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
pub use machine::{MAILBOX, Machine, available};
pub use program::Program;
pub use vcpu::Running;
pub use wait::{DEADLINE, until};
