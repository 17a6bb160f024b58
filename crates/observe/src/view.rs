//! A guest's RAM as [`ebb_inspect`] reads it. A frame is copied when it is first asked for, and
//! stays as it was then. So a view lasts for one look, and costs what that look reads.

use std::cell::{Cell, OnceCell};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ebb_inspect::{GuestMemory, PageWords};
use ebb_units::{FRAME_BYTES, Gpa};

use crate::layout::Segment;
use crate::ram::Ram;

const FRAME_WORDS: usize = FRAME_BYTES as usize / 8;
/// RAM in which the next populated part is looked for at once, in bytes.
const LOOKED_UP_BYTES: u64 = 16 << 20;
/// Words of a `struct page`.
const PAGE_WORDS: usize = 8;
/// Most frames that a look copies, 256 MiB: what is beyond counts as not in memory. Each free block
/// of 2 MiB or more costs one frame, of metadata.
const COPIED_MAX: u64 = 1 << 16;
/// Most reads across frames. A kernel's note is one of them.
const SPANS_MAX: usize = 256;
/// Most words of such a read: more than a note has.
const SPAN_WORDS_MAX: usize = 2 * FRAME_WORDS;

/// Entries of a table of frames.
const ENTRIES: u64 = 512;

type Frame = Box<[AtomicU64]>;
/// 512 frames, which are 2 MiB; `None`: it is not in memory.
type Leaf = Vec<OnceCell<Option<Frame>>>;
/// 512 leaves, which are 1 GiB.
type Branch = Vec<OnceCell<Leaf>>;

/// One look at a guest's RAM.
pub(crate) struct View<'r> {
    ram: &'r Ram,
    segments: &'r [Segment],
    branches: Vec<OnceCell<Branch>>,
    spans: OnceCell<Box<Span>>,
    /// How many more frames may be copied.
    left: Cell<u64>,
}

/// Words that were read across frames, and the next such.
struct Span {
    gpa: Gpa,
    words: Frame,
    next: OnceCell<Box<Span>>,
}

impl<'r> View<'r> {
    /// A view of RAM that is placed like this.
    pub(crate) fn new(ram: &'r Ram, segments: &'r [Segment]) -> View<'r> {
        let branches = empty(ram.bytes().div_ceil(FRAME_BYTES * ENTRIES * ENTRIES));
        View { ram, segments, branches, spans: OnceCell::new(), left: Cell::new(COPIED_MAX) }
    }

    /// The offset in RAM of an address, and the bytes behind it in its segment.
    fn offset(&self, gpa: Gpa) -> Option<(u64, u64)> {
        self.segments.iter().find_map(|segment| {
            let into = gpa.0.checked_sub(segment.start.0)?;
            let left = segment.bytes.checked_sub(into).filter(|left| *left > 0)?;
            Some((segment.offset + into, left))
        })
    }

    /// How much of a range is in memory, in bytes.
    pub(crate) fn present_in(&self, gpa: Gpa, bytes: u64) -> u64 {
        self.offset(gpa).map_or(0, |(at, left)| self.ram.present_bytes(at, bytes.min(left)))
    }

    /// The frame at an offset in RAM.
    fn frame(&self, offset: u64) -> Option<&[AtomicU64]> {
        let number = offset / FRAME_BYTES;
        let branch = self.branches.get((number / ENTRIES / ENTRIES) as usize)?;
        let branch = branch.get_or_init(|| empty(ENTRIES));
        let leaf = branch.get((number / ENTRIES % ENTRIES) as usize)?;
        let frame = leaf.get_or_init(|| empty(ENTRIES)).get((number % ENTRIES) as usize)?;
        frame.get_or_init(|| self.copy(number * FRAME_BYTES)).as_deref()
    }

    fn copy(&self, offset: u64) -> Option<Frame> {
        self.left.set(self.left.get().checked_sub(1)?);
        let mut bytes = [0_u8; FRAME_BYTES as usize];
        self.ram.read(offset, &mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        Some(words.iter().map(|word| AtomicU64::new(u64::from_le_bytes(*word))).collect())
    }

    /// Words that begin in one frame and end in another.
    fn span(&self, gpa: Gpa, offset: u64, count: usize) -> Option<&[AtomicU64]> {
        if count > SPAN_WORDS_MAX {
            return None;
        }
        let mut at = &self.spans;
        for _ in 0..SPANS_MAX {
            match at.get() {
                Some(span) if span.gpa == gpa && span.words.len() == count => {
                    return Some(&span.words);
                }
                Some(span) => at = &span.next,
                None => {
                    let words = self.gather(offset, count)?;
                    let span = Span { gpa, words, next: OnceCell::new() };
                    return Some(&at.get_or_init(|| Box::new(span)).words);
                }
            }
        }
        None
    }

    fn gather(&self, offset: u64, count: usize) -> Option<Frame> {
        let words = (0..count as u64).map(|index| {
            let at = offset + 8 * index;
            let word = self.frame(at)?.get((at % FRAME_BYTES / 8) as usize)?;
            Some(AtomicU64::new(word.load(Relaxed)))
        });
        words.collect()
    }
}

fn empty<T>(count: u64) -> Vec<OnceCell<T>> {
    (0..count).map(|_| OnceCell::new()).collect()
}

impl GuestMemory for View<'_> {
    fn word(&self, gpa: Gpa) -> Option<u64> {
        self.words(gpa, 1)?.first().map(|word| word.load(Relaxed))
    }

    fn page(&self, gpa: Gpa) -> Option<PageWords> {
        let whole = gpa.0.is_multiple_of(8 * PAGE_WORDS as u64);
        let words = self.words(gpa, PAGE_WORDS).filter(|_| whole)?;
        let words: &PageWords = words.try_into().ok()?;
        Some(words.each_ref().map(|word| AtomicU64::new(word.load(Relaxed))))
    }

    fn words(&self, gpa: Gpa, count: usize) -> Option<&[AtomicU64]> {
        let (offset, left) = self.offset(gpa)?;
        if !gpa.0.is_multiple_of(8) || count as u64 > left / 8 {
            return None;
        }
        let first = (offset % FRAME_BYTES / 8) as usize;
        match first + count <= FRAME_WORDS {
            true => self.frame(offset)?.get(first..first + count),
            false => self.span(gpa, offset, count),
        }
    }

    fn next_populated(&self, from: Gpa) -> Option<(Gpa, u64)> {
        self.segments.iter().find_map(|segment| {
            let mut into = from.0.saturating_sub(segment.start.0).next_multiple_of(FRAME_BYTES);
            while into < segment.bytes {
                let (bytes, mut first) = (LOOKED_UP_BYTES.min(segment.bytes - into), None);
                self.ram.present(segment.offset + into, bytes, |at, bytes| {
                    first.get_or_insert((at - segment.offset, bytes));
                });
                if let Some((at, bytes)) = first {
                    return Some((Gpa(segment.start.0 + at), bytes));
                }
                into += bytes;
            }
            None
        })
    }

    fn segments(&self) -> Vec<(Gpa, u64)> {
        self.segments.iter().map(|segment| (segment.start, segment.bytes)).collect()
    }
}
