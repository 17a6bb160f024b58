//! Advice to use small pages, for parts of RAM.

use std::io;
use std::ops::Range;

use ebb_units::{FrameRange, HUGE_BYTES, HugeFrame};

use super::Ram;

/// About how many parts with an advice of their own RAM has.
const ADVISED_PARTS: u64 = 128;
/// Largest part with an advice of its own; larger RAM has more parts. So 500 VMs, or 32 TiB of RAM,
/// stay below half of the 65,530 mappings that a kernel gives a process (vm.max_map_count), unless
/// every other part is advised.
const ADVISED_BYTES_MOST: u64 = 1 << 30;

impl Ram {
    /// The part of a file that is advised to use small pages when a huge frame is: the file's
    /// index, and bytes in the file. Each part with an advice of its own is a mapping, and a
    /// process may have few of them. `None` if the huge frame is not in one region.
    pub fn advised(&self, huge: HugeFrame) -> Option<(usize, Range<u64>)> {
        let place = self.range(FrameRange::huge(huge))?;
        let share = (self.first_bytes() / ADVISED_PARTS).next_power_of_two();
        let part = share.clamp(HUGE_BYTES, ADVISED_BYTES_MOST);
        let start = place.offset / part * part;
        let end = (start + part).max(place.offset + HUGE_BYTES);
        let bytes = self.files().get(place.file)?.mapping.bytes();
        Some((place.file, start..end.min(bytes)))
    }

    /// Makes this process use small pages for a huge frame from now on, and for the part of the
    /// file around it ([`Ram::advised`]).
    ///
    /// # Errors
    /// `InvalidInput` if the huge frame is not in one region; as madvise(2).
    pub fn use_small_pages(&self, huge: HugeFrame) -> io::Result<()> {
        let (file, part) = self.advised(huge).ok_or(io::ErrorKind::InvalidInput)?;
        let backing = self.files().get(file).ok_or(io::ErrorKind::InvalidInput)?;
        backing.mapping.use_small_pages(part.start, part.end - part.start)
    }
}
