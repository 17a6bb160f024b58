//! The kernel of a trusted guest, however it is known.

use std::sync::Arc;

use ebb_inspect::{FreeBlocks, Guest, GuestMemory, Registered, Run, Untrusted};
use ebb_pager::View;
use ebb_units::FrameRange;
use ebb_vm::Qmp;

use super::vcpus::{Vcpu, vcpus};

/// How often QEMU is asked for the vCPUs' page tables before a kernel counts as not running.
const ROOT_TRIES: u32 = 8;

/// A kernel whose page metadata is known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Kernel {
    /// A Linux that describes itself in its note.
    Inspected(Arc<Guest>),
    /// A kernel that has registered its metadata. Nothing else of it is known.
    Registered(Arc<Registered>),
}

impl Kernel {
    /// Names this boot of the kernel, for the VM's record.
    pub fn digest(&self) -> u64 {
        match self {
            Kernel::Inspected(guest) => guest.note().digest(),
            Kernel::Registered(registered) => registered.digest(),
        }
    }

    /// The frames that each look at the kernel reads.
    pub fn needed_frames(&self, mem: &dyn GuestMemory) -> Vec<FrameRange> {
        match self {
            Kernel::Inspected(guest) => guest.needed_frames(mem),
            Kernel::Registered(registered) => registered.needed_frames(),
        }
    }

    /// The frames that hold page metadata.
    pub fn metadata_frames(&self) -> Vec<FrameRange> {
        match self {
            Kernel::Inspected(guest) => {
                guest.memmap().runs().iter().map(Run::metadata_frames).collect()
            }
            Kernel::Registered(registered) => registered.metadata_frames().collect(),
        }
    }

    /// What V-Probe asks of the kernel.
    pub fn free_blocks(&self) -> &dyn FreeBlocks {
        match self {
            Kernel::Inspected(guest) => &**guest,
            Kernel::Registered(registered) => &**registered,
        }
    }

    /// Whether what makes the kernel known is still in place. This is cheap.
    pub fn is_in_place(&self, mem: &dyn GuestMemory) -> bool {
        match self {
            Kernel::Inspected(guest) => guest.recheck(mem),
            Kernel::Registered(registered) => registered.is_in_force(mem),
        }
    }

    /// Whether the kernel has said itself that it is to be believed no more. Reads a few words of
    /// memory.
    pub fn is_withdrawn(&self, mem: &dyn GuestMemory) -> bool {
        match self {
            Kernel::Inspected(_) => false,
            Kernel::Registered(registered) => !registered.is_in_force(mem),
        }
    }

    /// Whether the vCPUs run this kernel and nothing else.
    ///
    /// # Errors
    /// QEMU does not tell what its vCPUs run.
    pub fn is_running(&self, view: &View<'_>, qmp: Option<&mut Qmp>) -> Result<bool, String> {
        all_run(&|vcpu| self.runs_on(view, vcpu), &|| self.is_this_boot(view), qmp)
    }

    /// Learns where the metadata is now, if memory was plugged or unplugged. A kernel that has
    /// registered registers anew.
    ///
    /// # Errors
    /// The kernel's structures make no sense any more.
    pub fn refresh(&mut self, view: &View<'_>) -> Result<(), Untrusted> {
        match self {
            Kernel::Inspected(guest) if guest.memmap().changed(view) => {
                Arc::make_mut(guest).refresh(view).map(drop)
            }
            Kernel::Inspected(_) | Kernel::Registered(_) => Ok(()),
        }
    }

    /// Whether the kernel in memory is still this boot of it, as far as its image tells.
    fn is_this_boot(&self, view: &View<'_>) -> bool {
        match self {
            Kernel::Inspected(guest) => guest.image_agrees(view),
            Kernel::Registered(_) => true,
        }
    }

    fn runs_on(&self, view: &View<'_>, vcpu: &Vcpu) -> bool {
        match self {
            Kernel::Inspected(guest) => guest.runs_on(view, &[vcpu.root]),
            Kernel::Registered(registered) => {
                registered.may_be_mapped_by(view, vcpu.root, vcpu.levels)
            }
        }
    }
}

/// Whether the vCPUs run one kernel and nothing else: `runs_it` tells it of a vCPU, and
/// `is_this_boot`, which is asked afterwards, of the kernel. Between QEMU's answer and our look a
/// process may end and its page tables be freed, so a single "no" is not believed.
///
/// # Errors
/// QEMU does not tell what its vCPUs run.
pub fn all_run(
    runs_it: &dyn Fn(&Vcpu) -> bool,
    is_this_boot: &dyn Fn() -> bool,
    mut qmp: Option<&mut Qmp>,
) -> Result<bool, String> {
    for _ in 0..ROOT_TRIES {
        let vcpus = vcpus(qmp.as_deref_mut())?;
        // kexec leaves all vCPUs but one halted in the page tables of the old kernel.
        if vcpus.iter().any(runs_it) && vcpus.iter().all(|vcpu| vcpu.waits || runs_it(vcpu)) {
            return Ok(is_this_boot());
        }
    }
    Ok(false)
}
