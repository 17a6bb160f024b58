//! Refuses what pages of others have a browser ask.
//!
//! A browser reaches the UNIX socket where somebody forwards it to a port, as for the dashboard. The
//! socket has no token, so a page from elsewhere must not get through: neither by a request across
//! sites, nor by a name of its own that it has resolve to this port (DNS rebinding).

use std::net::IpAddr;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};

use crate::model::api_error::ApiError;

/// What browsers say of where a request comes from (Fetch Metadata Request Headers, section 2.3).
const FROM: &str = "sec-fetch-site";
/// The names of this host by which clients ask.
const NAMES: [&str; 3] = ["ebbd", "ebb", "localhost"];

/// Puts the check before all routes.
pub fn only(router: Router) -> Router {
    router.layer(from_fn(admit))
}

async fn admit(request: Request, next: Next) -> Response {
    match check(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    }
}

fn check(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    if text(FROM) == Some("cross-site") {
        return Err(ApiError::Forbidden(
            "this socket answers no page of another site: open the dashboard itself".into(),
        ));
    }
    match text(header::HOST.as_str()) {
        Some(host) if !is_here(host) => Err(ApiError::Forbidden(format!(
            "this socket answers only to {}, or an IP address, as the host of the URL, not to {host:?}",
            NAMES.join(", ")
        ))),
        _ => Ok(()),
    }
}

/// Whether a name with or without a port is no name that somebody else may own.
fn is_here(host: &str) -> bool {
    let port = |rest: &str| rest.is_empty() || rest.starts_with(':');
    if let Some((address, rest)) = host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        return port(rest) && address.parse::<IpAddr>().is_ok();
    }
    let name = host.split(':').next().unwrap_or_default();
    NAMES.iter().any(|own| name.eq_ignore_ascii_case(own)) || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(pairs: &[(&'static str, &str)]) -> Option<u16> {
        let headers = pairs.iter().map(|(name, value)| {
            (header::HeaderName::from_static(name), value.parse().expect("a value"))
        });
        check(&headers.collect()).err().map(|error| error.into_response().status().as_u16())
    }

    #[test]
    fn only_names_of_this_host_are_answered() {
        for host in ["ebbd", "ebb", "localhost:7444", "LocalHost", "127.0.0.1:7444", "[::1]:80"] {
            assert_eq!(code(&[("host", host)]), None, "{host}");
        }
        for host in ["evil.example:7444", "127.0.0.1.evil.example", "localhost.evil", "", "[::1].a"]
        {
            assert_eq!(code(&[("host", host)]), Some(403), "{host}");
        }
        assert_eq!(code(&[]), None, "as HTTP/1.0 has it");
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let from = |site: &str| code(&[("host", "127.0.0.1:7444"), (FROM, site)]);
        assert_eq!(
            [from("same-origin"), from("none"), from("cross-site")],
            [None, None, Some(403)]
        );
    }
}
