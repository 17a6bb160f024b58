//! The right to punch RAM.

use std::io;
use std::sync::Arc;

use ebb_units::FrameRange;

use super::Ram;

/// RAM, and the right to return its memory to the host. There is one for each [`Ram`], because it
/// takes the `Ram` itself: others share the RAM, which alone gives no such right. The content of a
/// frame must be recorded before the frame is punched.
pub struct Puncher(Arc<Ram>);

impl Puncher {
    /// Makes the puncher of this RAM. It is for the RAM's pager.
    pub fn new(ram: Ram) -> Puncher {
        Puncher(Arc::new(ram))
    }

    /// The RAM, to be shared.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.0
    }

    /// Returns the range's memory to the host. The range reads as zero from then on.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not in one region; as fallocate(2).
    pub fn punch(&self, frames: FrameRange) -> io::Result<()> {
        let (backing, offset) = self.0.backing(frames)?;
        backing.file.punch(offset, frames.bytes())
    }
}
