//! What pages are written to: bytes at offsets, with errors.

use std::io;

use ebb_units::FRAME_BYTES;

use crate::page_buffer::is_aligned;
use crate::{Page, Space, StoreError};

/// The numbers of a file's file system and inode, and when it was made, in nanoseconds since 1970
/// (0: unknown): a number of an inode is used again.
pub type Identity = [u64; 3];

/// A file or device as a swap file needs it. It is a trait so that tests can fail, shorten and
/// tear writes.
pub trait Medium: Send + Sync {
    /// Reads at `offset` and returns how many bytes. 0: the end.
    ///
    /// # Errors
    /// As pread(2).
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize>;

    /// Writes at `offset` and returns how many bytes. They survive this process.
    ///
    /// # Errors
    /// As pwrite(2).
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<usize>;

    /// Discards a range that is not needed any more. Its bytes are undefined from then on.
    ///
    /// # Errors
    /// As fallocate(2).
    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()>;

    /// Returns what it takes, and what its file system has. `None`: it has all the space that it
    /// will ever have.
    ///
    /// # Errors
    /// As fstat(2) and fstatfs(2).
    fn space(&self) -> io::Result<Option<Space>> {
        Ok(None)
    }

    /// Which file it is, whatever its name; `None`: it is no file.
    ///
    /// # Errors
    /// As fstat(2).
    fn identity(&self) -> io::Result<Option<Identity>> {
        Ok(None)
    }

    /// Whether the name that it was opened by leads to nothing now, or to something else.
    fn is_removed(&self) -> bool {
        false
    }

    /// Whether it needs page-aligned memory.
    fn is_direct(&self) -> bool;
}

/// Whether the medium can read or write these pages without a copy.
pub(crate) fn takes(medium: &impl Medium, pages: &[Page]) -> bool {
    !medium.is_direct() || is_aligned(pages)
}

/// Writes pages. Returns how many were surely written, and why not all.
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

/// Reads pages. Returns how many were surely read, and why not all.
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

/// Goes on after short transfers, from a page's start, as direct I/O needs. A transfer that moves
/// no whole page is an error, `short`, so that this ends.
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
