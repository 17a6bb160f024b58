//! The log of events and its readers, without a socket.

use std::time::Duration;

use ebb_api::{ErrorCode, Event, EventType, RefusalFigures, VmChange, VmName, WarningFigures};
use tokio::time::timeout;

use super::*;

const LONG: Duration = Duration::from_secs(20);

fn log(first: u64, kept_of_each: usize) -> Arc<EventLog> {
    Arc::new(EventLog::beginning_at(first, kept_of_each))
}

fn name(name: &str) -> VmName {
    name.parse().unwrap()
}

fn ended(log: &EventLog, vm: &str, why: &str) {
    log.publish(Some(&name(vm)), News::State(VmChange::Ended, Some(why.into())));
}

fn refused(log: &EventLog, vm: &str, error: &str) {
    let (method, path) = ("POST".into(), format!("/v1/vms/{vm}/reclaim"));
    let figures = RefusalFigures { method, path, code: ErrorCode::Taken, error: error.into() };
    log.publish(Some(&name(vm)), News::Refusal(figures));
}

fn all() -> Filter {
    Filter::new(None, &[])
}

fn reader(log: &Arc<EventLog>, filter: Filter, since: Option<u64>) -> Reader {
    log.read(filter, since, false, Asker::Host).expect("few streams")
}

/// What the reader finds until there is nothing more: numbers, or what is lost before them.
async fn found(reader: &mut Reader) -> Vec<String> {
    let mut all = Vec::new();
    while let Some(event) = reader.next().await {
        all.push(match &event.lost {
            Some(lost) => format!("lost {}..={}", event.number, lost.last),
            None => event.number.to_string(),
        });
    }
    all
}

#[tokio::test]
async fn all_that_is_kept_is_read_in_order() {
    let log = log(1, 100);
    ended(&log, "web", "one");
    refused(&log, "db", "two");
    ended(&log, "db", "three");
    assert_eq!(found(&mut reader(&log, all(), None)).await, ["1", "2", "3"]);
    assert_eq!(found(&mut reader(&log, all(), Some(1))).await, ["2", "3"]);
    assert_eq!(found(&mut reader(&log, all(), Some(3))).await, [""; 0]);
}

#[tokio::test]
async fn filters_leave_out_what_was_not_asked_for() {
    let log = log(1, 100);
    ended(&log, "web", "one");
    refused(&log, "db", "two");
    ended(&log, "db", "three");
    log.publish(None, News::State(VmChange::Ended, None));
    let filtered = async |vm: Option<&str>, types: &[EventType]| {
        found(&mut reader(&log, Filter::new(vm.map(name), types), None)).await
    };
    assert_eq!(filtered(Some("db"), &[]).await, ["2", "3"]);
    assert_eq!(filtered(None, &[EventType::State]).await, ["1", "3", "4"]);
    assert_eq!(filtered(Some("db"), &[EventType::State, EventType::Warning]).await, ["3"]);
    assert_eq!(filtered(Some("other"), &[]).await, [""; 0]);
}

#[tokio::test]
async fn many_of_one_type_push_out_no_other() {
    let log = log(1, 3);
    ended(&log, "web", "first");
    (0..10).for_each(|_| refused(&log, "web", "again"));
    let mut states = reader(&log, Filter::new(None, &[EventType::State]), Some(0));
    assert_eq!(found(&mut states).await, ["1"], "nothing of it is lost");
    assert_eq!(
        found(&mut reader(&log, all(), Some(1))).await,
        ["lost 1..=8", "9", "10", "11"],
        "the second refusal up to the eighth event were dropped"
    );
    assert_eq!(found(&mut reader(&log, all(), None)).await, ["1", "9", "10", "11"]);
    assert_eq!(found(&mut reader(&log, all(), Some(8))).await, ["9", "10", "11"]);
}

#[tokio::test]
async fn a_reader_that_is_slow_is_told_so_once_for_each_loss() {
    let log = log(1, 3);
    let mut slow = log.read(all(), None, true, Asker::Host).unwrap();
    ended(&log, "web", "1");
    assert_eq!(slow.next().await.unwrap().number, 1);
    (2..=9).for_each(|_| ended(&log, "web", "more"));
    let mut next = async || {
        let event = timeout(LONG, slow.next()).await.expect("an event").unwrap();
        (event.kind, event.number)
    };
    assert_eq!(next().await, (EventType::Lost, 1));
    assert_eq!(next().await, (EventType::State, 7));
    assert_eq!(next().await, (EventType::State, 8));
    ended(&log, "web", "10");
    assert_eq!(next().await, (EventType::State, 9), "what was dropped meanwhile, it has had");
    assert_eq!(next().await, (EventType::State, 10));
}

#[tokio::test]
async fn numbers_of_an_earlier_daemon_are_told_as_lost() {
    let log = log(1000, 10);
    ended(&log, "web", "1000");
    assert_eq!(found(&mut reader(&log, all(), Some(7))).await, ["lost 7..=999", "1000"]);
    assert_eq!(found(&mut reader(&log, all(), None)).await, ["1000"]);
    // The clock was set back: this number is yet to come.
    assert_eq!(found(&mut reader(&log, all(), Some(5000))).await, ["lost 0..=999", "1000"]);
    let next = EventLog::default().kept().next_number();
    assert!((1 << 50..1 << 53).contains(&next), "exact also as a float: {next}");
}

#[tokio::test]
async fn who_follows_waits_for_what_comes_and_for_the_end() {
    let log = log(1, 10);
    let mut reader = log.read(all(), None, true, Asker::Host).unwrap();
    let other = Arc::clone(&log);
    let publishing = tokio::spawn(async move { ended(&other, "web", "now") });
    assert_eq!(timeout(LONG, reader.next()).await.expect("an event").unwrap().number, 1);
    publishing.await.unwrap();
    ended(&log, "web", "last");
    log.close();
    assert_eq!(reader.next().await.unwrap().number, 2, "what came before the end is told");
    assert!(timeout(LONG, reader.next()).await.expect("the end").is_none());
}

#[tokio::test]
async fn so_many_streams_and_no_more() {
    let log = log(1, 10);
    let readers: Vec<Reader> =
        (0..STREAMS_MOST).map(|_| log.read(all(), None, true, Asker::Host).unwrap()).collect();
    let refused = log.read(all(), None, true, Asker::Host).err().expect("too many");
    assert_eq!(refused.code(), ErrorCode::TooMany);
    drop(readers);
    assert!(log.read(all(), None, true, Asker::Host).is_ok());
}

#[tokio::test]
async fn other_machines_leave_streams_to_this_one() {
    let log = log(1, 10);
    let readers: Vec<Reader> =
        (0..STREAMS_AFAR_MOST).map(|_| log.read(all(), None, true, Asker::Afar).unwrap()).collect();
    assert!(log.read(all(), None, true, Asker::Afar).is_err());
    assert_eq!(log.free_streams(), STREAMS_MOST - STREAMS_AFAR_MOST);
    assert!(log.read(all(), None, true, Asker::Host).is_ok());
    drop(readers);
    assert!(log.read(all(), None, true, Asker::Afar).is_ok());
}

#[test]
fn no_event_is_longer_than_events_are() {
    let long = "ä".repeat(1 << 20);
    let news = [
        News::State(VmChange::Ended, Some(long.clone())),
        News::Warning(WarningFigures { appeared: true, warning: long.clone() }),
        News::Refusal(RefusalFigures {
            method: long.clone(),
            path: long.clone(),
            code: ErrorCode::Failed,
            error: long,
        }),
    ];
    for news in news {
        let event: Event = news.event(7, None);
        let json = serde_json::to_string(&event).unwrap();
        assert!(event.text.len() <= ebb_api::EVENT_TEXT_BYTES_MAX && json.len() < 8192, "{json}");
    }
}

#[test]
fn an_event_says_when_in_the_form_of_rfc_3339() {
    let event = News::State(VmChange::Ended, Some("it was powered off".into())).event(7, None);
    let time: Timestamp = event.time.parse().expect("a time");
    assert!(event.time.len() == 24 && event.time.ends_with('Z'), "{}", event.time);
    assert!(time <= Timestamp::now());
    assert_eq!(event.text, "ended: it was powered off");
    let json = serde_json::to_value(&event).unwrap();
    assert_eq!((&json["type"], &json["state"]["change"]), (&"state".into(), &"ended".into()));
    assert!(json.get("refusal").is_none() && json["vm"].is_null(), "{json}");
    assert_eq!(serde_json::from_value::<Event>(json).unwrap(), event);
}

#[test]
fn a_state_is_told_once() {
    let mut states = States::default();
    let mut tell = |change, why: Option<&str>| {
        let news = states.change(change, why.map(str::to_owned));
        news.map(|news| news.event(1, None).text)
    };
    let [recovering, managed, not] =
        [VmChange::Recovering, VmChange::Managed, VmChange::NotRecovered];
    assert_eq!(tell(recovering, Some("it died")).as_deref(), Some("being recovered: it died"));
    assert_eq!(tell(recovering, None), None);
    assert_eq!(tell(not, Some("no room")).as_deref(), Some("not recovered: no room"));
    // It is tried again.
    assert_eq!((tell(recovering, None), tell(not, Some("no room"))), (None, None));
    assert_eq!(tell(not, Some("no disk")).as_deref(), Some("not recovered: no disk"));
    assert_eq!(tell(managed, None).as_deref(), Some("managed"));
    assert_eq!(tell(managed, None), None);
    assert!(tell(recovering, None).is_some());
}

#[test]
fn a_warning_appears_once_and_vanishes_once() {
    let mut warnings = Warnings::default();
    let mut update = |now: &[&str]| {
        let changed = warnings.update(now.iter().copied()).into_iter();
        changed.map(|it| (it.appeared, it.warning)).collect::<Vec<_>>()
    };
    let full = |left: &str| format!("the run directory has {left} left: make room");
    assert_eq!(update(&[&full("100 KiB")]), [(true, full("100 KiB"))]);
    assert_eq!(update(&[&full("1.5 MiB")]), [], "its figures have changed, and no more");
    let changed = update(&["the disk is slow", "the disk is slow"]);
    assert_eq!(changed, [(false, full("1.5 MiB")), (true, "the disk is slow".into())]);
    assert_eq!(update(&[]), [(false, "the disk is slow".into())]);
    assert_eq!(update(&[]), []);
    let many: Vec<String> = (0..1000u32).map(|at| format!("warning{at}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert_eq!(update(&many).len(), 32);
    assert_eq!(update(&many).len(), 0);
}
