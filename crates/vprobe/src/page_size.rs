//! The size of one frame's page metadata.

/// Bytes of one frame's page metadata: a multiple of 8 from 8 to 512. Linux's `struct page` has 64
/// in stock kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageSize(u16);

impl PageSize {
    /// Returns the size, if page metadata may have it.
    pub fn new(bytes: u16) -> Option<PageSize> {
        ((8..=512).contains(&bytes) && bytes.is_multiple_of(8)).then_some(PageSize(bytes))
    }

    /// The size in bytes.
    pub fn bytes(self) -> usize {
        self.0.into()
    }

    /// The size in words of 8 bytes.
    pub fn words(self) -> usize {
        self.bytes() / 8
    }
}
