//! Keeping a VM's resident memory below a limit.

pub mod judge;
pub mod limiter;
pub mod marks;
pub mod windows;

use std::io;

use ebb_store::StoreError;

/// Whether an error says that the store has no room for what is to be saved.
pub fn is_no_room(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<StoreError>());
    match inner {
        Some(StoreError::Medium(error)) => {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        }
        Some(StoreError::NoRoom(_) | StoreError::Full) => true,
        _ => false,
    }
}
