//! `ebb events`: what it asks for, and what it prints.

use std::path::Path;

use serde_json::json;

use crate::harness::{self, Answer, Dir, Ran};

const STREAM: &str = ": alive\n\n\
    id: 7\ndata: {\"number\":7,\"time\":\"2026-11-28T14:05:12.345Z\",\"type\":\"decision\",\
    \"vm\":\"web\",\"text\":\"limit none -> 1 GiB (cold memory): done\",\"decision\":{}}\n\n\
    id: 8\ndata: {\"number\":8,\"time\":\"2026-11-28T14:05:13.000Z\",\"type\":\"stage\",\
    \"vm\":null,\"text\":\"the host is tight now\"}\n\n";

fn events(dir: &Dir, line: &str) -> Ran {
    harness::command(dir.path(), line).env("TZ", Path::new("UTC")).run()
}

#[test]
fn each_event_is_a_line() {
    let dir = Dir::new();
    let daemon = dir.daemon(Answer::text(200, STREAM));
    let ran = events(&dir, "events --vm web --type state,decision --since 6");
    let expected = "2026-11-28 14:05:12 web decision limit none -> 1 GiB (cold memory): done\n\
                    2026-11-28 14:05:13 - stage the host is tight now\n";
    assert_eq!((ran.code, ran.stderr.as_str(), ran.stdout.as_str()), (Some(0), "", expected));
    let asked = "GET /v1/events?vm=web&type=state,decision&since=6&follow=false HTTP/1.1";
    assert_eq!(daemon.request().line, asked);
}

#[test]
fn json_is_what_the_daemon_sent() {
    let dir = Dir::new();
    let daemon = dir.daemon(Answer::text(200, STREAM));
    let ran = events(&dir, "events --json");
    let lines = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<serde_json::Value> = lines.collect();
    assert_eq!((lines.len(), &lines[0]["decision"]), (2, &json!({})));
    assert_eq!(daemon.request().line, "GET /v1/events?follow=false HTTP/1.1");
}

#[test]
fn who_follows_is_told_that_the_daemon_has_ended() {
    let dir = Dir::new();
    let daemon = dir.daemon(Answer::text(200, STREAM));
    let ran = events(&dir, "events -f");
    assert_eq!((ran.code, ran.stdout.lines().count()), (Some(1), 2));
    assert_eq!(ran.stderr, "ebb: ebbd has ended, and tells no more\n");
    assert_eq!(daemon.request().line, "GET /v1/events?follow=true HTTP/1.1");
}

#[test]
fn a_refusal_is_shown_with_what_to_do() {
    let dir = Dir::new();
    let refusal = json!({ "error": "32 streams of events are open already", "code": "too_many",
        "hint": "close one of them" });
    let _daemon = dir.daemon(Answer::json(429, &refusal));
    let ran = events(&dir, "events");
    let expected = "ebb: 32 streams of events are open already; close one of them\n";
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), expected));
}

#[test]
fn what_is_no_type_is_wrong_usage() {
    let dir = Dir::new();
    let ran = events(&dir, "events --type states");
    assert_eq!(ran.code, Some(2));
    assert!(ran.is_one_line_with("is not one of state, refusal, decision"), "{}", ran.stderr);
}
