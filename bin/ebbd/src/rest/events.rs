//! `GET /v1/events`: what happens to VMs, as server-sent events.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use ebb_api::EventsQuery;
use futures_util::stream;

use super::extract::Asked;
use super::tcp::Client;
use crate::host::events::{Asker, Filter, Reader};
use crate::host::registry::Daemon;
use crate::model::api_error::{Answer, ApiError};

/// Interval of a sign of life on a stream without events.
const ALIVE_EVERY: Duration = Duration::from_secs(15);
/// By this a client that connects again says what it had last.
const LAST_EVENT_ID: &str = "last-event-id";

/// Tells what the daemon still has, and then what happens. The connection takes the next event once
/// it has room for it, so a client that does not read keeps nothing but its place.
pub async fn events(
    State(daemon): State<Arc<Daemon>>,
    Asked(query): Asked<EventsQuery>,
    afar: Option<Extension<Client>>,
    headers: HeaderMap,
) -> Answer<Response> {
    let (filter, since) = (Filter::new(query.vm.clone(), &query.types()?), query.since);
    let since = last_had(&headers)?.or(since);
    let asker = if afar.is_some() { Asker::Afar } else { Asker::Host };
    let reader = daemon.events().read(filter, since, query.follow.unwrap_or(true), asker)?;
    let events = stream::unfold(reader, next);
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE_EVERY)).into_response())
}

async fn next(mut reader: Reader) -> Option<(Result<sse::Event, axum::Error>, Reader)> {
    let event = reader.next().await?;
    let told = sse::Event::default().id(event.number.to_string()).json_data(&*event);
    Some((told, reader))
}

/// Number of the last event that the client had.
fn last_had(headers: &HeaderMap) -> Answer<Option<u64>> {
    let Some(last) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
    let number = last.to_str().ok().and_then(|text| text.trim().parse().ok());
    let refused = || ApiError::Malformed("Last-Event-ID is no number of an event".into());
    number.map(Some).ok_or_else(refused)
}
