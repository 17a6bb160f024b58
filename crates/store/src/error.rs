//! Why a page is not stored or not read.

use std::io;

use crate::NoRoom;

/// Why a store fails.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Every slot is in use.
    #[error("the store is full")]
    Full,
    /// A limit on the store's size is reached.
    #[error("the store may take no more: {0:?}")]
    NoRoom(NoRoom),
    /// What was read is not what was saved there. The page is lost.
    #[error("slot {slot} of the store is damaged")]
    Damaged {
        /// The slot's number.
        slot: u64,
    },
    /// Nothing was saved there, or the slot was released, or claimed twice.
    #[error("slot {slot} of the store is not in use")]
    NotInUse {
        /// The slot's number.
        slot: u64,
    },
    /// The file or device cannot be used at all.
    #[error("{0}")]
    Unusable(String),
    /// What is at the file's place is not the file, or nothing is there: what was saved is missing.
    #[error("{0}")]
    Gone(String),
    /// The run directory has no room for the seals.
    #[error("the run directory: {0}")]
    RunDirectory(#[source] io::Error),
    /// An operation on the file or device failed.
    #[error("the store: {0}")]
    Medium(#[from] io::Error),
}

impl StoreError {
    /// Whether only room for more pages is lacking.
    pub fn is_no_room(&self) -> bool {
        matches!(self, StoreError::Full | StoreError::NoRoom(_))
    }
}

impl From<rustix::io::Errno> for StoreError {
    fn from(errno: rustix::io::Errno) -> StoreError {
        StoreError::Medium(errno.into())
    }
}

/// The store's error stays inside: `io::Error::get_ref` returns it.
impl From<StoreError> for io::Error {
    fn from(error: StoreError) -> io::Error {
        let kind = match &error {
            StoreError::Medium(error) | StoreError::RunDirectory(error) => error.kind(),
            StoreError::Full | StoreError::NoRoom(_) => io::ErrorKind::StorageFull,
            StoreError::Damaged { .. } => io::ErrorKind::InvalidData,
            StoreError::NotInUse { .. } => io::ErrorKind::InvalidInput,
            StoreError::Gone(_) => io::ErrorKind::NotFound,
            StoreError::Unusable(_) => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
