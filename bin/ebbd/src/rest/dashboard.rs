//! The dashboard: the files of a page that shows the host and its VMs in a browser. The files have
//! no data, so nobody needs a token for them. The page asks for data as any other client does.

use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;

use super::extract::wrong_method;
use crate::model::api_error::{Answer, ApiError};

/// Where the files are.
const PLACE: &str = "/dashboard/";
/// The file for those who name none.
const INDEX: &str = "index.html";

/// What a browser may do for the page: load its files, and ask this daemon. Text never becomes HTML
/// or a script, even by a mistake of the page's (`require-trusted-types-for`).
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    connect-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; \
    form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// A file of the page.
struct File {
    name: &'static str,
    kind: &'static str,
    text: &'static str,
}

const fn script(name: &'static str, text: &'static str) -> File {
    File { name, kind: "text/javascript; charset=utf-8", text }
}

static FILES: [File; 17] = [
    File {
        name: INDEX,
        kind: "text/html; charset=utf-8",
        text: include_str!("dashboard/index.html"),
    },
    File {
        name: "style.css",
        kind: "text/css; charset=utf-8",
        text: include_str!("dashboard/style.css"),
    },
    File { name: "ebb.svg", kind: "image/svg+xml", text: include_str!("dashboard/ebb.svg") },
    script("api.js", include_str!("dashboard/api.js")),
    script("chart.js", include_str!("dashboard/chart.js")),
    script("dialog.js", include_str!("dashboard/dialog.js")),
    script("dom.js", include_str!("dashboard/dom.js")),
    script("events.js", include_str!("dashboard/events.js")),
    script("format.js", include_str!("dashboard/format.js")),
    script("heat.js", include_str!("dashboard/heat.js")),
    script("history.js", include_str!("dashboard/history.js")),
    script("host.js", include_str!("dashboard/host.js")),
    script("main.js", include_str!("dashboard/main.js")),
    script("parts.js", include_str!("dashboard/parts.js")),
    script("table.js", include_str!("dashboard/table.js")),
    script("unmanaged.js", include_str!("dashboard/unmanaged.js")),
    script("vm.js", include_str!("dashboard/vm.js")),
];

/// The routes of the files. All else is as `router` has it, which may have a guard before it.
pub fn beside(router: Router) -> Router {
    // Of two routers, the one that is merged has its say about paths that neither has.
    Router::new()
        .route("/", get(to_page))
        .route("/dashboard", get(to_page))
        .route("/dashboard/", get(file))
        .route("/dashboard/{file}", get(file))
        .method_not_allowed_fallback(wrong_method)
        .merge(router)
}

/// Sends a browser to the page. The way is relative, as something that stands before the daemon may
/// serve it below another path.
async fn to_page() -> Redirect {
    Redirect::temporary("dashboard/")
}

async fn file(uri: Uri, headers: HeaderMap) -> Answer<Response> {
    let name = uri.path().strip_prefix(PLACE).unwrap_or_default();
    let name = if name.is_empty() { INDEX } else { name };
    let file = FILES.iter().find(|file| file.name == name);
    let file = file.ok_or_else(|| ApiError::UnknownRoute(uri.path().into()))?;
    let tag = format!("\"{}\"", blake3::hash(file.text.as_bytes()).to_hex());
    let is_known = headers.get(IF_NONE_MATCH).is_some_and(|had| had.as_bytes() == tag.as_bytes());
    let told = [
        (CONTENT_TYPE, file.kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        // It is kept, and each time the tag says whether it is still right.
        (CACHE_CONTROL, "no-cache"),
    ];
    let (status, body) = match is_known {
        true => (StatusCode::NOT_MODIFIED, ""),
        false => (StatusCode::OK, file.text),
    };
    Ok((status, told, [(ETAG, tag)], body).into_response())
}

#[cfg(test)]
mod tests;
