//! Large folios: runs of pages that the kernel handles as one. It has to split a folio before a
//! part of it can be given back.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;

use ebb_units::{FRAME_BYTES, Hva};

use crate::pagemap::Pagemap;
use crate::process::Process;
use crate::uffd::HvaRange;

/// A file with one word of flags for each page frame of the host,
/// `Documentation/admin-guide/mm/pagemap.rst`.
const FLAGS: &str = "/proc/kpageflags";
/// `KPF_COMPOUND_HEAD` and `KPF_COMPOUND_TAIL`.
const COMPOUND: u64 = 1 << 15 | 1 << 16;
const WORD_BYTES: usize = size_of::<u64>();
/// The most pages of one call: `UIO_MAXIOV`.
const PIECES_MAX: usize = 1024;

/// Distinguishes pages in large folios from others.
pub struct Folios {
    flags: File,
    own: Pagemap,
}

impl Folios {
    /// Opens the files that it needs.
    ///
    /// # Errors
    /// As open(2) of `/proc/kpageflags`, which takes root, and as [`Folios::look`].
    pub fn open() -> io::Result<Folios> {
        let folios = Folios { flags: File::open(FLAGS)?, own: Pagemap::open(&Process::own()?)? };
        // Without the privilege the kernel shows no frame for this page, although it is in memory.
        let start = Hva((&raw const folios).addr() as u64 / FRAME_BYTES * FRAME_BYTES);
        folios.look(HvaRange { start, bytes: FRAME_BYTES }, |_, _| {})?;
        Ok(folios)
    }

    /// Visits the pages of a range of this process's memory that are mapped to memory, in order:
    /// (number of the page in the range, whether it is a part of a large folio).
    ///
    /// # Errors
    /// `PermissionDenied`: the kernel shows page frames only with `CAP_SYS_ADMIN`.
    pub fn look(&self, range: HvaRange, mut visit: impl FnMut(u64, bool)) -> io::Result<()> {
        let mut pages = Vec::new();
        self.own.frames(range, |page, frame| pages.push((page, frame)))?;
        for run in pages.chunk_by(|a, b| a.1 + 1 == b.1) {
            let mut bytes = vec![0; run.len() * WORD_BYTES];
            let first = run.first().map_or(0, |(_, frame)| *frame);
            self.flags.read_exact_at(&mut bytes, first * WORD_BYTES as u64)?;
            let (words, _) = bytes.as_chunks::<WORD_BYTES>();
            for ((page, _), word) in run.iter().zip(words) {
                visit(*page, u64::from_ne_bytes(*word) & COMPOUND != 0);
            }
        }
        Ok(())
    }
}

/// Asks the kernel to split the large folios that pages of a process lie in. The kernel does so
/// when a single page of a folio is called cold (`MADV_COLD`), unless another process maps the
/// folio. The content of the pages and where they are mapped do not change.
///
/// # Errors
/// As process_madvise(2). Success does not mean that they are split: only [`Folios::look`] tells.
pub fn split(process: &Process, pages: impl Iterator<Item = Hva>) -> io::Result<()> {
    let piece = |page: Hva| libc::iovec {
        iov_base: std::ptr::without_provenance_mut(page.0 as usize),
        iov_len: FRAME_BYTES as usize,
    };
    let pieces: Vec<libc::iovec> = pages.map(piece).collect();
    let pidfd = process.as_fd().as_raw_fd();
    for pieces in pieces.chunks(PIECES_MAX) {
        // SAFETY: the kernel reads `pieces`, which has this length; MADV_COLD changes no byte of
        // memory in any process.
        let done = unsafe {
            let (at, count) = (pieces.as_ptr(), pieces.len());
            libc::syscall(libc::SYS_process_madvise, pidfd, at, count, libc::MADV_COLD, 0)
        };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
