//! What the daemon says when it refuses.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use ebb_api::{BadRequest, Problem, VmName};

/// A refusal: one line, and the kind of it.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The request makes no sense.
    #[error(transparent)]
    Bad(#[from] BadRequest),
    /// No such VM.
    #[error("there is no VM {0}: ebb list shows those that are held")]
    Unknown(VmName),
    /// No such VM any more: why it ended.
    #[error("{0}")]
    Over(String),
    /// The name is taken, or the VM is held already.
    #[error("{0}")]
    Taken(String),
    /// This VM or this host does not allow it.
    #[error("{0}")]
    NotAllowed(String),
    /// It is not possible now.
    #[error("{0}")]
    Unavailable(String),
    /// The daemon failed.
    #[error("{0}")]
    Failed(String),
}

/// The daemon's own results.
pub type Answer<T> = Result<T, Refused>;

/// An error of a lower layer that a user can do something about.
pub fn not_allowed(error: impl std::fmt::Display) -> Refused {
    Refused::NotAllowed(error.to_string())
}

/// Says what was being done when something failed.
pub fn failed<E: std::fmt::Display>(what: &str) -> impl FnOnce(E) -> Refused {
    move |error| Refused::Failed(format!("{what}: {error}"))
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let status = match self {
            Refused::Bad(_) => StatusCode::BAD_REQUEST,
            Refused::Unknown(_) | Refused::Over(_) => StatusCode::NOT_FOUND,
            Refused::Taken(_) => StatusCode::CONFLICT,
            Refused::NotAllowed(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Refused::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Refused::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, Json(Problem { error: self.to_string() })).into_response()
    }
}
