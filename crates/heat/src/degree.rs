//! Page-degree: how hot a page is, as one number (vTMM, section 3.3.1).

use crate::Uses;

/// What a window with reads counts, and what a window with writes counts. Their ratio is that in
/// which reads and writes are slower on slow memory than on fast memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Weights {
    read: u32,
    write: u32,
}

/// A weight of zero, by which some uses would count for nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a weight of 0 for {0} would make them count for nothing: weights are 1 or more")]
pub struct ZeroWeight(&'static str);

impl Weights {
    /// Both count one, for memory that is as fast to write as to read.
    pub const EVEN: Weights = Weights { read: 1, write: 1 };

    /// Weights for reads and for writes.
    ///
    /// # Errors
    /// [`ZeroWeight`].
    pub fn new(read: u32, write: u32) -> Result<Weights, ZeroWeight> {
        match (read, write) {
            (0, _) => Err(ZeroWeight("reads")),
            (_, 0) => Err(ZeroWeight("writes")),
            _ => Ok(Weights { read, write }),
        }
    }

    /// The page-degree: the windows with reads and with writes, each weighted.
    pub fn degree(self, uses: Uses) -> u64 {
        u64::from(self.read) * u64::from(uses.reads)
            + u64::from(self.write) * u64::from(uses.writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_weigh_what_is_given() {
        // Of DRAM and PMem (vTMM, section 3.3.1).
        let weights = Weights::new(1, 3).unwrap();
        assert_eq!(weights.degree(Uses { reads: 2, writes: 5 }), 17);
        let most = Weights::new(u32::MAX, u32::MAX).unwrap();
        let uses = Uses { reads: u8::MAX, writes: u8::MAX };
        assert_eq!(most.degree(uses), 510 * u64::from(u32::MAX));
    }

    #[test]
    fn nothing_may_count_for_nothing() {
        assert_eq!(Weights::new(0, 3), Err(ZeroWeight("reads")));
        let error = Weights::new(1, 0).unwrap_err().to_string();
        assert!(error.contains("writes") && error.contains("1 or more"), "{error}");
    }
}
