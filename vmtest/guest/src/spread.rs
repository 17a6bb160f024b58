//! Which page comes at which rank: the hot ones lie scattered. Benchmarks have it too.

/// A prime: of fewer pages none comes twice.
const STEP: u64 = 1_000_003;

/// The page of a rank, of so many pages.
pub fn page(rank: u64, pages: u64) -> u64 {
    rank % pages * STEP % pages
}
