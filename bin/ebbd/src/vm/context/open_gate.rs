//! Lets no fault wait for a limit while QEMU is asked: QEMU may wait for the vCPU whose fault
//! waits.

use std::sync::Arc;

use ebb_pager::Pager;

/// While this value lives, no fault of the VM waits for room. Dropping it restores the marks.
pub struct OpenGate {
    pager: Arc<Pager>,
    marks: (u64, u64),
    halts_above: Option<u64>,
}

impl OpenGate {
    /// Opens the gate for faults that wait a little for room.
    pub fn for_faults(pager: &Arc<Pager>) -> OpenGate {
        let marks = pager.room().marks();
        pager.room().set_marks(u64::MAX, u64::MAX);
        OpenGate { pager: Arc::clone(pager), marks, halts_above: None }
    }

    /// Opens the gate also for first touches that wait until the store has room.
    pub fn for_all(pager: &Arc<Pager>) -> OpenGate {
        let mut gate = OpenGate::for_faults(pager);
        gate.halts_above = Some(pager.room().halts_above());
        pager.room().halt_above(u64::MAX);
        gate
    }
}

impl Drop for OpenGate {
    fn drop(&mut self) {
        let (tell, wait) = self.marks;
        self.pager.room().set_marks(tell, wait);
        if let Some(above) = self.halts_above {
            self.pager.room().halt_above(above);
        }
    }
}
