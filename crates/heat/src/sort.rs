//! Bucket sort by page-degree (vTMM, section 3.3.2), in one pass over all pages.
//!
//! A degree follows from two counts that are each at most the number of windows. So there is a
//! bucket for each pair of counts and level, and the buckets are put in order once they are filled.
//! Of pages of the same degree, those of a higher level are hotter: the level knows of earlier
//! monitorings. Pages that were not used are the coldest and are in no bucket.

use ebb_units::Gfn;

use crate::{Levels, TOP_LEVEL, Uses, Weights};

/// Pages by which a bucket grows.
const CHUNK_PAGES: usize = 256;
const NO_CHUNK: u32 = u32::MAX;
const LEVELS: usize = TOP_LEVEL as usize + 1;

/// The pages of a VM from coldest to hottest.
pub struct Sorted {
    /// Frame numbers.
    chunks: Vec<[u32; CHUNK_PAGES]>,
    /// The chunk before each chunk, in the same bucket.
    before: Vec<u32>,
    /// Buckets of used pages, coldest first.
    buckets: Vec<Bucket>,
}

/// Pages of one degree and level.
#[derive(Clone, Copy)]
struct Bucket {
    degree: u64,
    level: u8,
    pages: u64,
    last_chunk: u32,
}

/// A bucket while it is filled.
#[derive(Clone, Copy)]
struct Open {
    chunk: u32,
    /// Pages in the last chunk.
    pages: u32,
    full_chunks: u32,
}

impl Sorted {
    /// Sorts the pages of `levels` by what was counted so far.
    ///
    /// Frame numbers have 32 bits here, enough for 16 TiB of guest-physical memory. Pages above
    /// that count as not used.
    pub fn new(levels: &Levels, weights: Weights) -> Sorted {
        let mut filling = Filling::new(levels);
        for (first, pages) in levels.ranges() {
            for (gfn, (uses, level)) in (first.0..).zip(pages) {
                filling.add(gfn, uses, level);
            }
        }
        let buckets = in_order(&filling.open, filling.width, weights);
        let Filling { chunks, before, .. } = filling;
        Sorted { chunks, before, buckets }
    }

    /// Bytes that the sorted pages take.
    pub fn bytes(&self) -> u64 {
        (size_of_val(&self.chunks[..])
            + size_of_val(&self.before[..])
            + size_of_val(&self.buckets[..])) as u64
    }

    /// Number of pages that were used.
    pub fn used_frames(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.pages).sum()
    }

    /// Each degree with its number of pages, coldest first. Pages that were not used are left out.
    pub fn degrees(&self) -> impl DoubleEndedIterator<Item = (u64, u64)> {
        let levels = self.buckets.chunk_by(|one, next| one.degree == next.degree);
        levels.map(|levels| (levels[0].degree, levels.iter().map(|bucket| bucket.pages).sum()))
    }

    /// The pages that were used, coldest first, with their degrees.
    pub fn coldest_first(&self) -> impl Iterator<Item = (Gfn, u64)> {
        self.buckets.iter().flat_map(|bucket| self.pages(bucket))
    }

    /// The pages that were used, hottest first, with their degrees.
    pub fn hottest_first(&self) -> impl Iterator<Item = (Gfn, u64)> {
        self.buckets.iter().rev().flat_map(|bucket| self.pages(bucket))
    }

    /// How many frames of fast memory the VM has a use for: the hottest `percent` of the pages of
    /// at least this degree (vTMM, section 3.5: 80 % and 3).
    pub fn wanted_frames(&self, percent: u32, least_degree: u64) -> u64 {
        let hot = self.degrees().filter(|(degree, _)| *degree >= least_degree);
        let pages: u64 = hot.map(|(_, pages)| pages).sum();
        (pages.saturating_mul(u64::from(percent.min(100)))).div_ceil(100)
    }

    fn pages(&self, bucket: &Bucket) -> impl Iterator<Item = (Gfn, u64)> {
        let Bucket { degree, pages, last_chunk, .. } = *bucket;
        // Only the last chunk can have room.
        let last_pages = match pages as usize % CHUNK_PAGES {
            0 => CHUNK_PAGES,
            pages => pages,
        };
        let chunk_at = |number: u32| Some(number).filter(|&number| number != NO_CHUNK);
        let first = chunk_at(last_chunk).map(|number| (number, last_pages));
        let numbers = std::iter::successors(first, move |&(number, _)| {
            Some((chunk_at(*self.before.get(number as usize)?)?, CHUNK_PAGES))
        });
        numbers
            .flat_map(|(number, pages)| {
                self.chunks.get(number as usize).map(|chunk| &chunk[..pages]).unwrap_or_default()
            })
            .map(move |&frame| (Gfn(frame.into()), degree))
    }
}

/// Buckets while they are filled.
struct Filling {
    chunks: Vec<[u32; CHUNK_PAGES]>,
    before: Vec<u32>,
    /// By reads, then by writes, then by level.
    open: Vec<Open>,
    width: usize,
}

impl Filling {
    fn new(levels: &Levels) -> Filling {
        let width = usize::from(levels.window()) + 1;
        let none = Open { chunk: NO_CHUNK, pages: CHUNK_PAGES as u32, full_chunks: 0 };
        let pages: u64 = levels.ram().iter().map(|range| range.count).sum();
        let pages = usize::try_from(pages).unwrap_or(0);
        // This reserves address space for all chunks. The host gives memory only for what is used.
        let buckets = width * width * LEVELS;
        let most = pages / CHUNK_PAGES + pages.min(buckets);
        Filling {
            chunks: Vec::with_capacity(most),
            before: Vec::with_capacity(most),
            open: vec![none; buckets],
            width,
        }
    }

    #[inline]
    fn add(&mut self, gfn: u64, uses: Uses, level: u8) {
        let pair = usize::from(uses.reads) * self.width + usize::from(uses.writes);
        let frame = u32::try_from(gfn).ok().filter(|_| pair != 0);
        let bucket = pair * LEVELS + usize::from(level);
        let (Some(frame), Some(open)) = (frame, self.open.get_mut(bucket)) else { return };
        if open.pages as usize == CHUNK_PAGES {
            self.before.push(open.chunk);
            open.full_chunks += u32::from(open.chunk != NO_CHUNK);
            (open.chunk, open.pages) = (self.chunks.len() as u32, 0);
            self.chunks.push([0; CHUNK_PAGES]);
        }
        let chunk = self.chunks.get_mut(open.chunk as usize);
        if let Some(place) = chunk.and_then(|chunk| chunk.get_mut(open.pages as usize)) {
            *place = frame;
            open.pages += 1;
        }
    }
}

/// The buckets that have pages, by degree and level. Different pairs of counts may have the same
/// degree.
fn in_order(open: &[Open], width: usize, weights: Weights) -> Vec<Bucket> {
    let filled = open.iter().enumerate().filter(|(_, open)| open.chunk != NO_CHUNK);
    let mut buckets: Vec<Bucket> = filled
        .map(|(bucket, open)| {
            let (pair, level) = (bucket / LEVELS, (bucket % LEVELS) as u8);
            let uses = Uses { reads: (pair / width) as u8, writes: (pair % width) as u8 };
            Bucket {
                degree: weights.degree(uses),
                level,
                pages: u64::from(open.full_chunks) * CHUNK_PAGES as u64 + u64::from(open.pages),
                last_chunk: open.chunk,
            }
        })
        .collect();
    buckets.sort_by_key(|bucket| (bucket.degree, bucket.level));
    buckets
}
