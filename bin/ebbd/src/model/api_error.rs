//! API errors: how the daemon refuses.

use std::io;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use ebb_api::{ApiErrorBody, BadRequest, ErrorCode, VmName};
use serde::{Deserialize, Serialize};

use crate::support::privileges::want_of_descriptors;
use crate::support::state_file;

/// A refusal: its kind and one line of text.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum ApiError {
    /// The request makes no sense.
    #[error(transparent)]
    Bad(#[from] BadRequest),
    /// The request cannot be read: it is no JSON of that type, or has a wrong path or query.
    #[error("{0}")]
    Malformed(String),
    /// The request's body is too long.
    #[error("the request's body has more than {} MiB", .0 >> 20)]
    TooLarge(usize),
    /// There is no such path.
    #[error("there is no path {0}")]
    UnknownRoute(String),
    /// The path exists, and does not have this method.
    #[error("{1} has no method {0}")]
    WrongMethod(String, String),
    /// No such VM.
    #[error("there is no VM {0}: ebb list shows those that are managed")]
    Unknown(VmName),
    /// No such job.
    #[error("there is no job {0}: ebb jobs shows those that are known")]
    UnknownJob(u64),
    /// The VM has ended; the text says why.
    #[error("{0}")]
    Over(String),
    /// The name is in use, or the VM is already managed.
    #[error("{0}")]
    Taken(String),
    /// Only a client on the host itself may do this.
    #[error("{0}")]
    Forbidden(String),
    /// This VM or this host does not allow it.
    #[error("{0}")]
    NotAllowed(String),
    /// It needs a guest that is trusted.
    #[error("{0}")]
    NotTrusted(String),
    /// It is about something that was not set or turned on before.
    #[error("{0}")]
    NotSet(String),
    /// So many streams are open already.
    #[error("{0} streams of events are open already")]
    TooMany(usize),
    /// So many jobs are under way.
    #[error("{0} jobs are under way already")]
    TooManyJobs(usize),
    /// Not possible now; nothing was done.
    #[error("{0}")]
    Unavailable(String),
    /// It may have been done, or may be done yet.
    #[error("{0}")]
    OutcomeUnknown(String),
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

/// The refusal of what needs a trusted guest, with the reason why this one is not.
pub fn not_trusted(why: impl std::fmt::Display) -> ApiError {
    ApiError::NotTrusted(format!("the guest is not trusted: {why}"))
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

impl ApiError {
    /// Why, for programs.
    pub fn code(&self) -> ErrorCode {
        match self {
            ApiError::Bad(_) | ApiError::Malformed(_) => ErrorCode::BadRequest,
            ApiError::TooLarge(_) => ErrorCode::TooLarge,
            ApiError::UnknownRoute(_) => ErrorCode::UnknownRoute,
            ApiError::WrongMethod(..) => ErrorCode::WrongMethod,
            ApiError::Unknown(_) => ErrorCode::UnknownVm,
            ApiError::UnknownJob(_) => ErrorCode::UnknownJob,
            ApiError::Over(_) => ErrorCode::VmOver,
            ApiError::Taken(_) => ErrorCode::Taken,
            ApiError::Forbidden(_) => ErrorCode::Forbidden,
            ApiError::NotAllowed(_) => ErrorCode::NotAllowed,
            ApiError::NotTrusted(_) => ErrorCode::NotTrusted,
            ApiError::NotSet(_) => ErrorCode::NotSet,
            ApiError::TooMany(_) | ApiError::TooManyJobs(_) => ErrorCode::TooMany,
            ApiError::Unavailable(_) => ErrorCode::Unavailable,
            ApiError::OutcomeUnknown(_) => ErrorCode::OutcomeUnknown,
            ApiError::NoRoom(_) => ErrorCode::NoRoom,
            ApiError::Failed(_) => ErrorCode::Failed,
        }
    }

    /// What to do; none: the text says it, or nothing can be done.
    fn hint(&self) -> Option<&'static str> {
        Some(match self {
            ApiError::Malformed(_) | ApiError::UnknownRoute(_) | ApiError::WrongMethod(..) => {
                "GET /v1/openapi.json describes all requests of this release"
            }
            ApiError::Over(_) => "ebb list shows the VMs that are managed",
            ApiError::NotTrusted(_) => "ebb status shows once the guest is trusted",
            ApiError::TooMany(_) => "close one of them",
            ApiError::UnknownJob(_) => {
                "ebbd remembers the last jobs, and none of an ebbd before it"
            }
            ApiError::TooManyJobs(_) => "wait until one has ended, or cancel one: ebb jobs",
            // Most texts say that it is tried again, or that the client is to do so.
            ApiError::Unavailable(why) if !why.contains("again") => {
                "nothing was done: try again in a while"
            }
            ApiError::NoRoom(_) => "make room there, and try again",
            ApiError::Failed(_) => "ebbd's log may say more",
            _ => return None,
        })
    }
}

impl From<ApiError> for ApiErrorBody {
    fn from(refused: ApiError) -> ApiErrorBody {
        let (code, hint, why) = (refused.code(), refused.hint(), refused.to_string());
        let advice = want_of_descriptors(&why).map(|line| format!(": {line}"));
        let error = why + &advice.unwrap_or_default();
        ApiErrorBody { code: Some(code), error, hint: hint.map(str::to_owned) }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.code().status());
        refuse(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), self.into())
    }
}

/// The answer to a request that is refused. The body is among the answer's extensions, too: there
/// `ebbd` reads what it tells of refusals.
pub fn refuse(status: StatusCode, body: ApiErrorBody) -> Response {
    let mut response = (status, Json(&body)).into_response();
    response.extensions_mut().insert(body);
    response
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
