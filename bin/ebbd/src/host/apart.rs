//! Work that takes long, away from the threads that answer requests.

use std::io;

use ebb_api::VmName;

/// Runs work that takes long, and returns its result.
///
/// # Errors
/// The work panicked.
pub async fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}

/// Runs work for the VM `name` that takes long. If it panics, an error is logged.
pub(super) async fn apart_or_log(name: &VmName, work: impl FnOnce() + Send + 'static) {
    apart(work).await.unwrap_or_else(|error| tracing::error!("{name}: {error}"));
}
