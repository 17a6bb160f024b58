//! API errors: how the daemon refuses.

use std::io;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use ebb_api::{ApiErrorBody, BadRequest, VmName};
use serde::{Deserialize, Serialize};

use crate::support::privileges::want_of_descriptors;
use crate::support::state_file;

/// A refusal: its kind and one line of text.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum ApiError {
    /// The request makes no sense.
    #[error(transparent)]
    Bad(#[from] BadRequest),
    /// No such VM.
    #[error("there is no VM {0}: ebb list shows those that are managed")]
    Unknown(VmName),
    /// The VM has ended; the text says why.
    #[error("{0}")]
    Over(String),
    /// The name is in use, or the VM is already managed.
    #[error("{0}")]
    Taken(String),
    /// This VM or this host does not allow it.
    #[error("{0}")]
    NotAllowed(String),
    /// Not possible now.
    #[error("{0}")]
    Unavailable(String),
    /// There is no room for a record that must be written first.
    #[error("{0}")]
    NoRoom(String),
    /// The daemon failed.
    #[error("{0}")]
    Failed(String),
}

/// Result of what the daemon is asked to do.
pub type Answer<T> = Result<T, ApiError>;

/// Maps an error of a lower layer about which the user can do something.
pub fn not_allowed(error: impl std::fmt::Display) -> ApiError {
    ApiError::NotAllowed(error.to_string())
}

/// Maps an error of the daemon, and says what was being done.
pub fn failed<E: std::fmt::Display>(what: &str) -> impl FnOnce(E) -> ApiError {
    move |error| ApiError::Failed(format!("{what}: {error}"))
}

/// Maps an error of [`state_file::save`], and says which record could not be written.
pub fn unsaved(what: &str) -> impl FnOnce(io::Error) -> ApiError {
    move |error| match state_file::is_no_room(&error) {
        true => ApiError::NoRoom(format!("nothing was changed: {what}: {error}")),
        false => failed(what)(error),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = match self {
            ApiError::Bad(_) => StatusCode::BAD_REQUEST,
            ApiError::Unknown(_) | ApiError::Over(_) => StatusCode::NOT_FOUND,
            ApiError::Taken(_) => StatusCode::CONFLICT,
            ApiError::NotAllowed(_) => StatusCode::UNPROCESSABLE_ENTITY,
            ApiError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            ApiError::NoRoom(_) => StatusCode::INSUFFICIENT_STORAGE,
            ApiError::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let why = self.to_string();
        let advice = want_of_descriptors(&why).map(|line| format!(": {line}"));
        (status, Json(ApiErrorBody { error: why + &advice.unwrap_or_default() })).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_without_room_is_refused_as_such() {
        let unsaved = |kind: io::ErrorKind| unsaved("the VM's record")(io::Error::from(kind));
        let refused = unsaved(io::ErrorKind::StorageFull);
        assert!(refused.to_string().starts_with("nothing was changed: the VM's record: "));
        assert_eq!(refused.into_response().status(), StatusCode::INSUFFICIENT_STORAGE);
        let failed = unsaved(io::ErrorKind::NotFound).into_response();
        assert_eq!(failed.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}
