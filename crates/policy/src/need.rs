//! What a guest needs of the memory that it has, by its own figures. They are as true as the guest
//! is honest: it can only harm itself.

/// Reserve to keep available beside what the guest uses: a sixteenth of what it has.
const RESERVE_PART: u64 = 16;
/// Bounds of the reserve, in bytes.
const RESERVE_BYTES: std::ops::RangeInclusive<u64> = (64 << 20)..=(1 << 30);

/// What a guest says of its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryFigures {
    /// What its allocator manages, in bytes.
    pub total_bytes: u64,
    /// Bytes that it could use without running out of memory: free memory, and caches that it can
    /// drop.
    pub available_bytes: u64,
}

impl MemoryFigures {
    /// What is to stay available in it.
    pub(crate) fn reserve_bytes(&self) -> u64 {
        (self.total_bytes / RESERVE_PART).clamp(*RESERVE_BYTES.start(), *RESERVE_BYTES.end())
    }

    /// Bytes that can be taken from it now.
    pub fn spare_bytes(&self) -> u64 {
        self.available_bytes.saturating_sub(self.reserve_bytes())
    }

    /// Whether it is about to run out of memory, so that it must get back what it can.
    pub fn is_pressed(&self) -> bool {
        self.available_bytes < self.reserve_bytes() / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn figures(total_mib: u64, available_mib: u64) -> MemoryFigures {
        MemoryFigures { total_bytes: total_mib * MIB, available_bytes: available_mib * MIB }
    }

    #[test]
    fn a_reserve_stays_in_the_guest() {
        assert_eq!(figures(1024, 900).spare_bytes(), 836 * MIB);
        assert_eq!(figures(4096, 300).spare_bytes(), 44 * MIB);
        assert_eq!(figures(64 << 10, 2048).spare_bytes(), 1024 * MIB);
        assert_eq!(figures(1024, 60).spare_bytes(), 0);
    }

    #[test]
    fn a_guest_with_less_than_half_of_its_reserve_is_pressed() {
        assert!(!figures(1024, 32).is_pressed() && figures(1024, 31).is_pressed());
        assert!(figures(0, 0).is_pressed());
        assert!(!figures(u64::MAX >> 20, u64::MAX >> 20).is_pressed());
    }
}
