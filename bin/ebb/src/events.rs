//! `ebb events`: a line for each event, as it comes.

mod frames;

use std::io::{self, Write};
use std::ops::ControlFlow;

use anyhow::Context;
use ebb_api::{EventsQuery, route};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::Deserialize;

pub use self::frames::Frames;

/// What a line shows of an event. A type that this release does not know is shown all the same.
#[derive(Deserialize)]
struct Shown {
    time: String,
    #[serde(rename = "type")]
    kind: String,
    vm: Option<String>,
    text: String,
}

/// Returns the path that asks for these events. Nothing in it needs escaping.
pub fn path(query: &EventsQuery) -> String {
    let EventsQuery { vm, types, since, follow } = query;
    let parts = [
        vm.as_ref().map(|vm| format!("vm={vm}")),
        types.as_ref().map(|types| format!("type={types}")),
        since.map(|since| format!("since={since}")),
        follow.map(|follow| format!("follow={follow}")),
    ];
    let query = parts.into_iter().flatten().collect::<Vec<_>>().join("&");
    format!("{}?{query}", route::EVENTS)
}

/// Prints an event, whose JSON this is. Breaks off once nobody reads any more.
///
/// # Errors
/// It is no event, or cannot be written.
pub fn print(event: &str, json: bool) -> anyhow::Result<ControlFlow<()>> {
    let line = match json {
        true => event.to_owned(),
        false => line(event, &TimeZone::system())?,
    };
    let mut out = io::stdout().lock();
    match writeln!(out, "{line}").and_then(|()| out.flush()) {
        Ok(()) => Ok(ControlFlow::Continue(())),
        // The reader has all it wanted, as in `ebb events -f | head -1`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        Err(error) => Err(error.into()),
    }
}

/// Returns an event in one line: date and time by the host's clock, VM, type, and what happened.
fn line(event: &str, zone: &TimeZone) -> anyhow::Result<String> {
    let Shown { time, kind, vm, text } =
        serde_json::from_str(event).context("ebbd tells an event that is none")?;
    let at = time.parse::<Timestamp>().context("the time of an event")?;
    let at = at.to_zoned_datetime(zone.clone()).strftime("%F %T").to_string();
    let line = format!("{at} {} {kind} {text}", vm.as_deref().unwrap_or("-"));
    // Some of the text is a guest's or a user's own.
    Ok(line.replace(char::is_control, "?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_when_who_and_what() {
        let event = r#"{"number": 7, "time": "2026-11-28T14:05:12.345Z", "type": "decision",
            "vm": "web", "text": "limit 1.7 GiB -> 1.6 GiB (cold memory): done", "decision": {}}"#;
        let expected =
            "2026-11-28 14:05:12 web decision limit 1.7 GiB -> 1.6 GiB (cold memory): done";
        assert_eq!(line(event, &TimeZone::UTC).unwrap(), expected);
    }

    #[test]
    fn events_of_later_releases_are_shown_and_cannot_write_to_the_terminal() {
        let event = r#"{"number": 7, "time": "2026-11-28T00:00:00Z", "type": "comet", "vm": null,
            "text": "it comes\u001b[2J", "comet": {"mass": 1}}"#;
        let expected = "2026-11-28 00:00:00 - comet it comes?[2J";
        assert_eq!(line(event, &TimeZone::UTC).unwrap(), expected);
        assert!(line("{}", &TimeZone::UTC).is_err());
    }

    #[test]
    fn only_what_is_asked_for_is_in_the_path() {
        let all = EventsQuery { follow: Some(false), ..EventsQuery::default() };
        assert_eq!(path(&all), "/v1/events?follow=false");
        let some = EventsQuery {
            vm: Some("web".parse().unwrap()),
            types: Some("state,decision".into()),
            since: Some(7),
            follow: Some(true),
        };
        assert_eq!(path(&some), "/v1/events?vm=web&type=state,decision&since=7&follow=true");
    }
}
