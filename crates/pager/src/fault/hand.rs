//! What a thread that serves faults has for itself.

use ebb_store::PageBuffer;

use super::read_ahead::ReadAhead;
use super::refiller::PART_PAGES;

/// Made before the first fault: serving one allocates nothing.
pub(crate) struct Hand {
    /// Who goes on touching memory that reads as zero.
    pub(crate) zeros: ReadAhead,
    /// Who comes for what the store has in memory.
    pub(crate) in_memory: ReadAhead,
    /// Room for pages that come from a store or a disk; without it the thread must not
    /// wait for one, and reads nothing ahead.
    pub(crate) pages: Option<PageBuffer>,
}

impl Hand {
    /// For the thread that reads the faults.
    pub(crate) fn empty() -> Hand {
        Hand { zeros: ReadAhead::timid(), in_memory: ReadAhead::around(), pages: None }
    }

    /// For a thread that may wait.
    pub(crate) fn with_pages() -> Hand {
        Hand { pages: Some(PageBuffer::new(PART_PAGES)), ..Hand::empty() }
    }

    /// Gives memory back that the next fault takes again.
    pub(crate) fn rest(&mut self) {
        self.pages.iter_mut().for_each(PageBuffer::clear);
    }
}
