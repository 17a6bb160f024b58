//! How much memory the guest has got back.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use ebb_api::Mode;
use ebb_units::FRAME_BYTES;

use super::context::VmContext;
use crate::model::api_error::{Answer, failed};

/// Memory that the guest has got back since this process began. It never falls.
///
/// In release mode the kernel gives memory back, and nobody sees that. So this is the memory that
/// was away in known ways and is resident now. Memory that goes in another way, as into a balloon,
/// would make it fall. It stands still until as much has come back.
#[derive(Default)]
pub struct Returned {
    /// What the first look in release mode found; none: nobody has looked.
    first_bytes: Option<u64>,
    bytes: u64,
}

impl Returned {
    /// What there was at the last look.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Looks again.
    ///
    /// # Errors
    /// As fstat(2) of the VM's RAM.
    pub fn look(&mut self, cx: &VmContext) -> Answer<()> {
        let counters = cx.pager.counters();
        let bytes = |frames: &AtomicU64| frames.load(Relaxed) * FRAME_BYTES;
        match cx.record.mode {
            Mode::Strict => self.bytes = bytes(&counters.returned_frames),
            Mode::Release => {
                let (ram, totals) = (cx.pager.ram(), cx.record.totals);
                let resident_bytes = ram.resident_bytes().map_err(failed("the VM's RAM"))?;
                // Includes memory that is not plugged, as `absent_at_attach_bytes` does.
                let absent_bytes = ram.bytes().saturating_sub(resident_bytes);
                // Evicted content is read back, which is counted elsewhere.
                let evicted_bytes = bytes(&counters.saved_frames) + bytes(&counters.on_disk_frames);
                let gone_bytes = totals.absent_at_attach_bytes + totals.reclaimed_bytes;
                self.note((gone_bytes + evicted_bytes).saturating_sub(absent_bytes));
            }
        }
        Ok(())
    }

    fn note(&mut self, back_bytes: u64) {
        let first_bytes = *self.first_bytes.get_or_insert(back_bytes);
        self.bytes = self.bytes.max(back_bytes.saturating_sub(first_bytes));
    }
}

#[cfg(test)]
mod tests {
    use ebb_units::{FrameRange, Gfn};

    use super::*;
    use crate::vm::context::machine;

    #[test]
    fn what_goes_in_another_way_makes_it_stand_still() {
        let mut returned = Returned::default();
        let seen = [100, 150, 120, 140, 170].map(|back_bytes| {
            returned.note(back_bytes);
            returned.bytes()
        });
        assert_eq!(seen, [0, 50, 50, 50, 70]);
    }

    #[test]
    fn an_eviction_takes_nothing_from_it() {
        let Some((mut cx, machine)) = machine::context() else { return };
        let mut returned = Returned::default();
        cx.record.note(|record| record.totals.absent_at_attach_bytes = machine::FILE_BYTES);
        returned.look(&cx).unwrap();
        assert_eq!(returned.bytes(), 0, "all of its RAM is a hole");
        let frames = FrameRange::new(Gfn(0), 8);
        machine.touch(frames);
        returned.look(&cx).unwrap();
        assert_eq!(returned.bytes(), frames.bytes());
        machine.evict(&mut cx, frames);
        assert_eq!(cx.pager.ram().resident_bytes().unwrap(), 0);
        // Memory that was reclaimed and is back looks like this.
        cx.note_reclaimed(FRAME_BYTES);
        returned.look(&cx).unwrap();
        assert_eq!(returned.bytes(), frames.bytes() + FRAME_BYTES);
    }
}
