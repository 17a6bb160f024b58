//! What a handler needs of a request. What cannot be read is refused as everything else is: axum's
//! own refusals are plain text.

use std::error::Error;

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri};
use ebb_api::VmName;
use serde::de::DeserializeOwned;

use crate::model::api_error::ApiError;

/// Most bytes of a request's body: axum's own bound.
pub const BODY_MOST_BYTES: usize = 2 << 20;

/// The request's body, read from JSON.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, ApiError> {
        match Json::<T>::from_request(request, state).await {
            Ok(Json(value)) => Ok(Body(value)),
            Err(rejection) => Err(unread(&rejection)),
        }
    }
}

fn unread(rejection: &JsonRejection) -> ApiError {
    match rejection {
        _ if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            ApiError::TooLarge(BODY_MOST_BYTES)
        }
        JsonRejection::MissingJsonContentType(_) => ApiError::Malformed(
            "the request's body is not declared as JSON: send content-type: application/json"
                .into(),
        ),
        _ => ApiError::Malformed(format!("the request's body: {}", innermost(rejection))),
    }
}

/// The request's query.
pub struct Asked<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Asked<T>, ApiError> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(value)) => Ok(Asked(value)),
            Err(rejection) => {
                Err(ApiError::Malformed(format!("the query: {}", innermost(&rejection))))
            }
        }
    }
}

/// The VM that the path names.
pub struct Named(pub VmName);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Named, ApiError> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        let Path(name) = path.map_err(|rejection| ApiError::Malformed(rejection.body_text()))?;
        let named: Result<VmName, _> = name.parse();
        named.map(Named).map_err(|error| ApiError::Malformed(error.to_string()))
    }
}

/// The job that the path names.
pub struct Numbered(pub u64);

impl<S: Send + Sync> FromRequestParts<S> for Numbered {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Numbered, ApiError> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        let Path(id) = path.map_err(|rejection| ApiError::Malformed(rejection.body_text()))?;
        let refused = |_| ApiError::Malformed(format!("{id:?} is no number of a job"));
        id.parse().map(Numbered).map_err(refused)
    }
}

/// The error that the others are about. Those around it only say what axum did.
fn innermost(error: &dyn Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// Refuses a path that no route has.
pub async fn unknown_route(uri: Uri) -> ApiError {
    ApiError::UnknownRoute(uri.path().into())
}

/// Refuses a method that a route does not have.
pub async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::WrongMethod(method.to_string(), uri.path().into())
}
