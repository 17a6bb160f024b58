//! Pages in memory that direct I/O can read and write.

use std::sync::{Mutex, PoisonError};

use ebb_sys::scratch::Scratch;
use ebb_units::FRAME_BYTES;

use crate::Page;

const ALIGNMENT: usize = FRAME_BYTES as usize;

/// Adjacent pages, each aligned to its size. Pages that nobody has written take no memory. The
/// default has no pages.
#[derive(Default)]
pub struct PageBuffer {
    /// `None`: there are no pages.
    bytes: Option<Scratch>,
    count: usize,
}

impl PageBuffer {
    /// Makes `count` pages of zeros.
    pub fn new(count: usize) -> PageBuffer {
        let bytes = (count > 0).then(|| Scratch::new(count * ALIGNMENT));
        PageBuffer { bytes, count }
    }

    /// Returns the first `count` pages for writing. The buffer grows if it has fewer. Their
    /// content is undefined.
    pub fn at_least(&mut self, count: usize) -> &mut [Page] {
        if count > self.count {
            *self = PageBuffer::new(count);
        }
        self.pages_mut().get_mut(..count).unwrap_or_default()
    }

    /// Frees the memory of its pages. They are zeros again.
    pub fn clear(&mut self) {
        self.bytes.iter_mut().for_each(Scratch::clear);
    }

    /// Returns the pages.
    pub fn pages(&self) -> &[Page] {
        let (pages, _) = self.bytes.as_deref().unwrap_or_default().as_chunks();
        pages.get(..self.count).unwrap_or_default()
    }

    /// Returns the pages for writing.
    pub fn pages_mut(&mut self) -> &mut [Page] {
        let (pages, _) = self.bytes.as_deref_mut().unwrap_or_default().as_chunks_mut();
        pages.get_mut(..self.count).unwrap_or_default()
    }
}

/// `N` pages in place, for the stack.
#[repr(align(4096))]
pub(crate) struct Pages<const N: usize>(pub(crate) [Page; N]);

impl<const N: usize> Pages<N> {
    pub(crate) fn zeroed() -> Pages<N> {
        Pages([[0; ALIGNMENT]; N])
    }
}

const _: () = assert!(align_of::<Pages<1>>() == ALIGNMENT);

pub(crate) fn is_aligned(pages: &[Page]) -> bool {
    pages.as_ptr().addr().is_multiple_of(ALIGNMENT)
}

/// Buffers for reuse. The lock is held while a buffer is fetched or put back, not while it is used.
pub(crate) struct Pool {
    free: Mutex<Vec<PageBuffer>>,
    page_count: usize,
}

impl Pool {
    pub(crate) fn new(page_count: usize) -> Pool {
        Pool { free: Mutex::default(), page_count }
    }

    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut [Page]) -> T) -> T {
        let idle = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffer = idle.unwrap_or_else(|| PageBuffer::new(self.page_count));
        let result = work(buffer.pages_mut());
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned_and_all_there() {
        for count in [0, 1, 7] {
            let mut buffer = PageBuffer::new(count);
            assert_eq!(buffer.pages_mut().len(), count);
            assert!(is_aligned(buffer.pages()) || count == 0);
        }
        assert!(is_aligned(&Pages::<2>::zeroed().0));
    }

    #[test]
    fn a_cleared_buffer_is_zeros() {
        for count in [0, 3] {
            let mut buffer = PageBuffer::new(count);
            buffer.pages_mut().iter_mut().for_each(|page| page.fill(7));
            buffer.clear();
            assert!(buffer.pages().iter().all(|page| *page == [0; ALIGNMENT]));
            assert_eq!(buffer.pages().len(), count);
        }
    }
}
