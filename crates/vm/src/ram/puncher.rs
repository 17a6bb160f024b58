//! The right to punch RAM.

use std::io;
use std::sync::Arc;

use ebb_units::FrameRange;

use super::Ram;

/// The right to return RAM's memory to the host, which [`Ram`] alone does not give. The content of
/// a frame must be recorded before the frame is punched.
pub struct Puncher(Arc<Ram>);

impl Puncher {
    /// Makes the puncher of this RAM. Only the RAM's pager calls this.
    pub fn new(ram: Arc<Ram>) -> Puncher {
        Puncher(ram)
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
