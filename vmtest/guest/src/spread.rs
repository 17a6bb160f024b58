//! Which page has which rank: hot pages are scattered. Benchmarks of the host use it, too.

/// A prime: with fewer pages, no page comes twice.
const STEP: u64 = 1_000_003;

/// The page of a rank, of `pages` pages.
pub fn page(rank: u64, pages: u64) -> u64 {
    rank % pages * STEP % pages
}
