//! Why an image cannot be used.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::probe::SmallSectors;

/// Why an image cannot be used.
#[derive(Debug, Error)]
#[error("{}: {why}", path.display())]
pub struct OpenError {
    /// The image's path.
    pub path: PathBuf,
    /// The reason.
    #[source]
    pub why: OpenErrorKind,
}

/// The reason why an image cannot be used.
#[derive(Debug, Error)]
pub enum OpenErrorKind {
    /// It cannot be opened or read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is a directory, a pipe or the like.
    #[error("is neither a file nor a block device")]
    Kind,
    /// It is 0 bytes long.
    #[error("is empty: give it its size first, as in `truncate --size 10G`")]
    Empty,
    /// Its size is no multiple of a block.
    #[error(
        "has {0} bytes, which is no multiple of 4096: extend it, as in `truncate --size %4096`"
    )]
    Size(u64),
    /// Another process has locked it.
    #[error("is in use by another process, maybe a QEMU or another ebbd")]
    InUse,
    /// It is made for smaller sectors.
    #[error("{0}")]
    SmallSectors(#[from] SmallSectors),
    /// It is not raw.
    #[error(
        "begins as a {0} image, and only raw images are served: convert it with \
         `qemu-img convert -O raw`, or write `,format=raw` behind it if these are a disk's first bytes"
    )]
    Format(&'static str),
    /// Its name now belongs to another image.
    #[error(
        "is not the image that the guest had before: put that one back, and then the guest goes on"
    )]
    Exchanged,
}
