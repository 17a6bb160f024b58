//! The state that a thread that serves faults has for itself.

use ebb_store::PageBuffer;

use super::read_ahead::ReadAhead;
use super::refiller::PART_PAGES;

/// It is made before the first fault, because serving one allocates nothing.
pub(crate) struct Hand {
    /// Read-ahead for memory that reads as zero.
    pub(crate) zeros: ReadAhead,
    /// Read-ahead for content that the store has in memory.
    pub(crate) in_memory: ReadAhead,
    /// A buffer for pages from the store or a disk. Without it the thread must not wait for one,
    /// and reads nothing ahead.
    pub(crate) pages: Option<PageBuffer>,
}

impl Hand {
    /// Makes the hand of the fault thread.
    pub(crate) fn empty() -> Hand {
        Hand { zeros: ReadAhead::timid(), in_memory: ReadAhead::around(), pages: None }
    }

    /// Makes the hand of a thread that may wait.
    pub(crate) fn with_pages() -> Hand {
        Hand { pages: Some(PageBuffer::new(PART_PAGES)), ..Hand::empty() }
    }

    /// Gives the buffer's memory back; the next fault takes it again.
    pub(crate) fn free_idle(&mut self) {
        self.pages.iter_mut().for_each(PageBuffer::clear);
    }
}
