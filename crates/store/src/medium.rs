//! What pages are written to: bytes at offsets, which may fail.

use std::io;

use ebb_units::FRAME_BYTES;

use crate::page_buffer::is_aligned;
use crate::{Page, Space, StoreError};

/// A file or device as a swap file needs it. A trait, so that tests can fail,
/// shorten and tear what is written.
pub trait Medium: Send + Sync {
    /// Reads at `offset`; how many bytes. 0: its end.
    ///
    /// # Errors
    /// As pread(2).
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize>;

    /// Writes at `offset`; how many bytes. They survive this process.
    ///
    /// # Errors
    /// As pwrite(2).
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize>;

    /// The range is not needed any more; it reads as anything from now on.
    ///
    /// # Errors
    /// As fallocate(2).
    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()>;

    /// What it takes, and what is left where it is; none: it has all that it will ever have.
    ///
    /// # Errors
    /// As fstat(2) and fstatfs(2).
    fn space(&self) -> io::Result<Option<Space>> {
        Ok(None)
    }

    /// Whether it takes page-aligned memory only.
    fn is_direct(&self) -> bool;
}

/// Whether these pages may go to and from the medium as they lie.
pub(crate) fn takes(medium: &impl Medium, pages: &[Page]) -> bool {
    !medium.is_direct() || is_aligned(pages)
}

/// How many of the pages were surely written, and why not all.
pub(crate) fn write(
    medium: &impl Medium,
    offset: u64,
    pages: &[Page],
) -> (usize, Option<StoreError>) {
    let bytes = pages.as_flattened();
    let (done, error) = whole_pages(bytes.len(), io::ErrorKind::WriteZero, |done| {
        medium.write_at(offset + done as u64, bytes.get(done..).unwrap_or_default())
    });
    (done, error.map(StoreError::Medium))
}

/// How many of the pages were surely read, and why not all.
pub(crate) fn read(
    medium: &impl Medium,
    offset: u64,
    pages: &mut [Page],
) -> (usize, Option<io::Error>) {
    let bytes = pages.as_flattened_mut();
    whole_pages(bytes.len(), io::ErrorKind::UnexpectedEof, |done| {
        medium.read_at(offset + done as u64, bytes.get_mut(done..).unwrap_or_default())
    })
}

/// Goes on after short transfers, from a page's start: direct I/O knows no
/// other. One that moves no whole page is an error, `short`, so this ends.
fn whole_pages(
    total: usize,
    short: io::ErrorKind,
    mut transfer: impl FnMut(usize) -> io::Result<usize>,
) -> (usize, Option<io::Error>) {
    const PAGE: usize = FRAME_BYTES as usize;
    let mut done = 0;
    while done < total {
        match transfer(done) {
            Ok(moved) if moved >= PAGE => done += (moved / PAGE * PAGE).min(total - done),
            Ok(_) => return (done / PAGE, Some(short.into())),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (done / PAGE, Some(error)),
        }
    }
    (total / PAGE, None)
}
