//! Access of devices to a VM's memory, by its pager.

use std::sync::{Arc, OnceLock, Weak};

use ebb_pager::Pager;
use ebb_units::FrameRange;
use ebb_vhost::{Access, Dma, DmaFault, Segment};
use vm_memory::GuestMemoryMmap;

use crate::pins::{nobody_there, pin, unpin};
use crate::places::Places;

/// Access of devices to a VM's memory: the pager makes the frames of a request resident, and keeps
/// them so until the request has ended. Without a pager the devices wait.
#[derive(Default)]
pub struct PagerDma {
    pager: OnceLock<Weak<Pager>>,
    places: Places,
}

impl PagerDma {
    /// Sets the VM's pager.
    pub fn serve_with(&self, pager: &Arc<Pager>) {
        // A VM has one pager all its life.
        let _ = self.pager.set(Arc::downgrade(pager));
    }

    /// Returns the VM's pager, if there is one.
    pub fn pager(&self) -> Option<Arc<Pager>> {
        self.pager.get()?.upgrade()
    }

    /// Removes frames from this process's page table where the devices have them mapped.
    pub fn forget(&self, frames: FrameRange) {
        self.places.forget(frames);
    }
}

impl Dma for PagerDma {
    fn pin(&self, segments: &[Segment], access: Access) -> Result<(), DmaFault> {
        let pager = self.pager().ok_or_else(|| nobody_there(segments))?;
        pin(&pager, segments, access)
    }

    fn unpin(&self, segments: &[Segment]) {
        if let Some(pager) = self.pager() {
            unpin(&pager, segments);
        }
    }

    fn place(
        &self,
        memory: &Arc<GuestMemoryMmap>,
        segments: &[Segment],
    ) -> Result<Option<Vec<Segment>>, DmaFault> {
        let pager = self.pager().ok_or_else(|| nobody_there(segments))?;
        self.places.place(memory, pager.ram(), segments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_units::Gpa;

    #[test]
    fn without_a_pager_a_device_waits() {
        let (dma, segment) = (PagerDma::default(), Segment { gpa: Gpa(0x1800), bytes: 8 });
        let waits = Err(DmaFault::NotNow(segment.gpa));
        assert_eq!(dma.pin(&[segment], Access::Keep), waits);
        assert!(dma.pager().is_none());
    }
}
