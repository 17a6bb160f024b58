//! Why a page is not stored, or not read.

use std::io;

use crate::NoRoom;

/// What a store cannot do.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Every slot holds a page.
    #[error("the store is full")]
    Full,
    /// The store may take no more.
    #[error("the store may take no more: {0:?}")]
    NoRoom(NoRoom),
    /// What was read is not what was saved there; the page is lost.
    #[error("slot {slot} of the store is damaged")]
    Damaged {
        /// Where.
        slot: u64,
    },
    /// Nothing was saved there, or it was released, or claimed twice.
    #[error("slot {slot} of the store is not in use")]
    NotInUse {
        /// Where.
        slot: u64,
    },
    /// The file or device cannot be used at all.
    #[error("{0}")]
    Unusable(String),
    /// What must be known of each slot has no room in the run directory.
    #[error("the run directory: {0}")]
    RunDirectory(#[source] io::Error),
    /// The file or device said no.
    #[error("the store: {0}")]
    Medium(#[from] io::Error),
}

impl StoreError {
    /// Whether it lacks nothing but room for more pages.
    pub fn is_no_room(&self) -> bool {
        matches!(self, StoreError::Full | StoreError::NoRoom(_))
    }
}

impl From<rustix::io::Errno> for StoreError {
    fn from(errno: rustix::io::Errno) -> StoreError {
        StoreError::Medium(errno.into())
    }
}

/// The store's own words stay inside: `io::Error::get_ref`.
impl From<StoreError> for io::Error {
    fn from(error: StoreError) -> io::Error {
        let kind = match &error {
            StoreError::Medium(error) | StoreError::RunDirectory(error) => error.kind(),
            StoreError::Full | StoreError::NoRoom(_) => io::ErrorKind::StorageFull,
            StoreError::Damaged { .. } => io::ErrorKind::InvalidData,
            StoreError::NotInUse { .. } => io::ErrorKind::InvalidInput,
            StoreError::Unusable(_) => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
