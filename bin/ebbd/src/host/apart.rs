//! Work that takes long, away from the threads that answer requests.

use std::io;

/// Runs work that takes long, and returns its result.
///
/// # Errors
/// The work panicked.
pub async fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}

/// Runs work that takes long. If it panics, an error is logged.
pub(super) async fn apart_or_log(work: impl FnOnce() + Send + 'static) {
    apart(work).await.unwrap_or_else(|error| tracing::error!("{error}"));
}
