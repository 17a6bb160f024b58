//! Whether requests of the VMM may write to memory that is about to be evicted.

use ebb_vm::pinning::pinning;

use crate::problem::{Answer, failed, not_allowed};
use crate::worker::State;

impl State {
    /// A page that a device of the VMM has pinned is written past every protection.
    pub(crate) fn nothing_pins(&self) -> Answer<()> {
        match pinning(&self.held.process).map_err(failed("QEMU's descriptors"))? {
            None => Ok(()),
            Some(why) => Err(not_allowed(format!(
                "{why}, so a read may still write to memory that is evicted: start QEMU with \
                 cache=writeback, or give the disk by `ebb run --disk`"
            ))),
        }
    }
}
