//! Who may ask for what over TCP. Stands before all routes.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Extension, MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use ebb_api::{ApiErrorBody, ErrorCode, Role, route};
use http_body_util::LengthLimitError;
use tokio::time::timeout;

use super::tokens::Tokens;
use crate::model::api_error::refuse;

/// Largest request. None that is allowed here has more than some hundred bytes.
const BODY_MOST_BYTES: usize = 64 << 10;
/// Longest wait for a request whose headers have come.
const BODY_LIMIT: Duration = Duration::from_secs(10);

/// What a token for control may change. A route that is not here is only for the host itself: by
/// [`route::RUN`] and [`route::ATTACH`] a client names files and processes of the host, and starts
/// programs there as root.
pub const CHANGES: [&str; 13] = [
    route::VM,
    route::RECLAIM,
    route::AUTO,
    route::LIMIT,
    route::SIZE,
    route::EVICT,
    route::HEAT,
    route::SHARE,
    route::POOL,
    route::PILOT,
    route::RULE,
    route::CALIBRATION,
    route::JOB,
];

/// Where a connection comes from.
#[derive(Clone, Copy)]
pub struct Client(pub IpAddr);

/// A refusal.
struct Refused(ErrorCode, String);

/// Puts the guard before all routes.
pub fn guard(router: Router, tokens: Tokens) -> Router {
    router.layer(from_fn_with_state(Arc::new(tokens), admit))
}

async fn admit(
    State(tokens): State<Arc<Tokens>>,
    Extension(Client(client)): Extension<Client>,
    mut request: Request,
    next: Next,
) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let (role, line) = match shown(&tokens, &request) {
        Ok(shown) => shown,
        Err(refused) => {
            tracing::warn!("{client}: {}", refused.1);
            return refused.into_response();
        }
    };
    request.extensions_mut().insert(role);
    let response = match whole(request).await {
        Ok(request) => next.run(request).await,
        Err(refused) => refused.into_response(),
    };
    if !is_look(&method) {
        let status = response.status().as_u16();
        tracing::info!("{client}: the token of line {line}: {method} {path}: {status}");
    }
    response
}

/// Role and line of the token that allows the request.
fn shown(tokens: &Tokens, request: &Request) -> Result<(Role, usize), Refused> {
    let Some(token) = bearer(request.headers()) else {
        return Err(Refused(
            ErrorCode::Unauthorized,
            "a token is needed: send the header `Authorization: Bearer TOKEN`, with a token of the \
             file that ebbd --tokens names"
                .into(),
        ));
    };
    let Some((role, line)) = tokens.find(token) else {
        return Err(Refused(
            ErrorCode::Unauthorized,
            "this token is not known: the file that ebbd --tokens names does not have it, or did \
             not have it when ebbd began"
                .into(),
        ));
    };
    let forbidden = |why: &str| Err(Refused(ErrorCode::Forbidden, why.into()));
    if is_look(request.method()) {
        return Ok((role, line));
    }
    match request.extensions().get::<MatchedPath>().map(MatchedPath::as_str) {
        _ if role == Role::Read => {
            forbidden("this token may only look: take one whose line begins with `control`")
        }
        // A route that is known, and not for other machines.
        Some(route) if !CHANGES.contains(&route) => forbidden(
            "this is possible only on the host itself, as it names files or processes there: use \
             ebb there",
        ),
        _ => Ok((role, line)),
    }
}

fn is_look(method: &Method) -> bool {
    [Method::GET, Method::HEAD].contains(method)
}

/// The token of a request. A request with two is not understood.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let mut all = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (all.next(), all.next()) else { return None };
    let (scheme, token) = value.as_bytes().split_at_checked(SCHEME.len())?;
    scheme.eq_ignore_ascii_case(SCHEME).then(|| token.trim_ascii())
}

/// Waits for all of a request, but not for long: nothing is begun with a part of one.
async fn whole(request: Request) -> Result<Request, Refused> {
    let (parts, body) = request.into_parts();
    let Ok(body) = timeout(BODY_LIMIT, to_bytes(body, BODY_MOST_BYTES)).await else {
        return Err(Refused(
            ErrorCode::TooSlow,
            format!("nothing was done: the request was not whole after {} s", BODY_LIMIT.as_secs()),
        ));
    };
    let body: Bytes = body.map_err(|error| {
        let is_long =
            std::error::Error::source(&error).is_some_and(|source| source.is::<LengthLimitError>());
        match is_long {
            true => Refused(
                ErrorCode::TooLarge,
                format!("nothing was done: a request has {BODY_MOST_BYTES} bytes at most"),
            ),
            false => Refused(ErrorCode::BadRequest, format!("nothing was done: {error}")),
        }
    })?;
    Ok(Request::from_parts(parts, Body::from(body)))
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let Refused(code, error) = self;
        let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::FORBIDDEN);
        let mut response = refuse(status, ApiErrorBody { code: Some(code), error, hint: None });
        if code == ErrorCode::Unauthorized {
            let scheme = HeaderValue::from_static("Bearer realm=\"ebbd\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(values: &[&'static str]) -> Option<&'static [u8]> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::AUTHORIZATION, HeaderValue::from_static(value));
        }
        bearer(Box::leak(Box::new(headers)))
    }

    #[test]
    fn a_token_stands_in_one_header() {
        for value in ["Bearer abc", "bearer abc", "BEARER  abc "] {
            assert_eq!(token(&[value]), Some(&b"abc"[..]), "{value}");
        }
        for values in [&[][..], &["Basic abc"], &["Bearer"], &["Bearerabc"], &["Bearer a"; 2]] {
            assert_eq!(token(values), None, "{values:?}");
        }
    }

    #[test]
    fn each_change_is_for_other_machines_or_not() {
        let text = ebb_api::document_text().expect("plain data becomes JSON");
        let document: serde_json::Value = serde_json::from_str(&text).expect("a document");
        let paths = document["paths"].as_object().expect("paths");
        let changes = paths.iter().filter(|(_, methods)| {
            let methods = methods.as_object().expect("methods");
            methods.keys().any(|method| !["get", "head", "parameters"].contains(&method.as_str()))
        });
        for (path, _) in changes {
            let is_local = [route::RUN, route::ATTACH].contains(&path.as_str());
            assert_ne!(is_local, CHANGES.contains(&path.as_str()), "{path}: decide, and list it");
        }
    }
}
