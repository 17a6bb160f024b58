//! Tests of who is told what of the host's memory, with stand-ins for VMs' processes.

use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::routing::put;
use axum::{Json, Router};
use ebb_api::{ReclaimWhen, VmStatus};
use tokio::sync::Notify;

use super::*;
use crate::host::swap_dir::SwapDir;
use crate::host::testing;

/// The notices that VMs got, in this order.
type Notices = Arc<Mutex<Vec<(String, PressureNotice)>>>;

fn daemon(run: &Path) -> Daemon {
    testing::daemon(run, SwapDir::new(run, None).unwrap())
}

/// The status of a VM that asks to be told of a host with less than this available, and has heard
/// nothing yet.
fn status(below_percent: u32, free_bytes: u64) -> VmStatus {
    let mut status = testing::status();
    (status.guest_free_bytes, status.auto.pressure) = (Some(free_bytes), None);
    status.resident_bytes = status.memory_bytes;
    (status.auto.below_percent, status.auto.below_bytes) = (Some(below_percent), None);
    status
}

fn publish(daemon: &Daemon, name: &str, status: VmStatus) {
    testing::publish(daemon, name, status, None);
}

/// Stands in for the process of a VM, which gives a byte each time it is to reclaim.
fn serve(daemon: &Daemon, name: &str, notices: &Notices) {
    serve_at(daemon, name, notices, None);
}

/// The same, with an answer that waits until it is to come.
fn serve_at(daemon: &Daemon, name: &str, notices: &Notices, go: Option<Arc<Notify>>) {
    let (vm, notices) = (name.to_owned(), Arc::clone(notices));
    let hear = move |Json(notice): Json<PressureNotice>| {
        let bytes = u64::from(notice.why.is_some());
        notices.lock().unwrap().push((vm, notice));
        async move {
            if let Some(go) = go {
                go.notified().await;
            }
            Json(bytes)
        }
    };
    testing::serve(daemon, name, Router::new().route(HOST_PRESSURE, put(hear)));
}

/// Looks once. A watch that waits for a VM without end would wait for 30 s and more.
async fn look(watcher: &mut Watcher) {
    timeout(Duration::from_secs(20), watcher.look(false)).await.expect("it waits").unwrap();
}

/// Waits until all that was told is answered, and returns it.
async fn heard(watcher: &Watcher, notices: &Notices) -> Vec<(String, PressureNotice)> {
    let is_open = |vm: &Vm| vm.open.as_ref().is_some_and(|open| !open.answer.is_finished());
    while watcher.vms.values().any(is_open) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    std::mem::take(&mut *notices.lock().unwrap())
}

fn names(heard: &[(String, PressureNotice)]) -> Vec<&str> {
    heard.iter().map(|(name, _)| name.as_str()).collect()
}

fn given(watcher: &Watcher) -> Option<u64> {
    watcher.shortage.as_ref().map(|shortage| shortage.bytes)
}

#[tokio::test]
async fn who_may_have_the_most_to_give_is_asked_first() {
    let (home, notices) = (tempfile::tempdir().unwrap(), Notices::default());
    let daemon = daemon(home.path());
    for (name, free_bytes) in [("small", 1), ("large", 3), ("middle", 2)] {
        serve(&daemon, name, &notices);
        publish(&daemon, name, status(100, free_bytes));
    }
    // It has the most, and something is in the way.
    let mut stuck = status(100, 9);
    stuck.auto.stuck = Some("the guest is not trusted".into());
    serve(&daemon, "stuck", &notices);
    publish(&daemon, "stuck", stuck);
    let mut watcher = Watcher::new(daemon.clone(), None);
    look(&mut watcher).await;
    let asked = heard(&watcher, &notices).await;
    assert_eq!(names(&asked), ["large", "middle", "small", "stuck"]);
    for (_, notice) in &asked {
        let why = notice.why.as_ref().unwrap();
        assert!(why.starts_with("host: available ") && why.contains(" below "), "{why}");
    }
    watcher.collect().await;
    assert_eq!(given(&watcher), Some(4));
    // None of them is due, and none hears that there is no pressure.
    look(&mut watcher).await;
    let asked = heard(&watcher, &notices).await;
    assert!(asked.iter().all(|(_, notice)| notice.why.is_some()), "{asked:?}");
}

#[tokio::test]
async fn a_shortage_ends_some_time_after_the_pressure() {
    let (home, notices) = (tempfile::tempdir().unwrap(), Notices::default());
    let daemon = daemon(home.path());
    for name in ["one", "two"] {
        serve(&daemon, name, &notices);
        publish(&daemon, name, status(100, 1));
    }
    let mut watcher = Watcher::new(daemon.clone(), None);
    look(&mut watcher).await;
    assert_eq!(heard(&watcher, &notices).await.len(), 2);
    // No threshold holds any more.
    for name in ["one", "two"] {
        publish(&daemon, name, status(0, 1));
    }
    look(&mut watcher).await;
    assert_eq!(given(&watcher), Some(2));
    let at_end = heard(&watcher, &notices).await;
    assert_eq!(at_end.len(), 2);
    assert!(at_end.iter().all(|(_, notice)| notice.why.is_none()), "{at_end:?}");
    watcher.began = watcher.began.checked_sub(CALM_LEAST).unwrap();
    look(&mut watcher).await;
    assert_eq!(given(&watcher), None);
}

#[tokio::test]
async fn a_vm_that_publishes_nothing_is_remembered_and_not_told() {
    let (home, notices) = (tempfile::tempdir().unwrap(), Notices::default());
    let daemon = daemon(home.path());
    serve(&daemon, "slow", &notices);
    publish(&daemon, "slow", status(100, 1));
    let mut watcher = Watcher::new(daemon.clone(), None);
    look(&mut watcher).await;
    assert_eq!(heard(&watcher, &notices).await.len(), 1);
    publish(&daemon, "slow", VmStatus { age_ms: 6000, ..status(100, 1) });
    // Its pauses, and the time after which a shortage ends, have passed.
    watcher.began = watcher.began.checked_sub(CALM_LEAST).unwrap();
    look(&mut watcher).await;
    assert_eq!(names(&heard(&watcher, &notices).await), [""; 0]);
    assert_eq!((watcher.vms.len(), given(&watcher)), (1, Some(1)));
}

#[tokio::test]
async fn a_round_that_takes_long_is_counted_once_it_ends() {
    let (home, notices) = (tempfile::tempdir().unwrap(), Notices::default());
    let daemon = daemon(home.path());
    let go = Arc::new(Notify::new());
    serve_at(&daemon, "long", &notices, Some(Arc::clone(&go)));
    publish(&daemon, "long", status(100, 2));
    serve(&daemon, "other", &notices);
    publish(&daemon, "other", status(100, 1));
    let mut watcher = Watcher::new(daemon.clone(), None);
    for _ in 0..2 {
        look(&mut watcher).await;
    }
    let asked = std::mem::take(&mut *notices.lock().unwrap());
    assert_eq!(asked.iter().filter(|(name, _)| name == "long").count(), 1, "{asked:?}");
    assert_eq!(names(&asked)[..2], ["long", "other"]);
    assert!(watcher.vms[&"long".parse::<VmName>().unwrap()].is_late);
    let before = given(&watcher).unwrap();
    go.notify_one();
    heard(&watcher, &notices).await;
    watcher.collect().await;
    assert_eq!(given(&watcher), Some(before + 1));
    let order: Vec<String> = watcher.asking().iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(order, ["other", "long"]);
}

#[tokio::test]
async fn a_vm_hears_that_its_host_is_watched() {
    let (home, notices) = (tempfile::tempdir().unwrap(), Notices::default());
    let daemon = daemon(home.path());
    for name in ["asks", "by-interval", "off"] {
        serve(&daemon, name, &notices);
    }
    let mut others = [status(100, 1), status(100, 1)];
    others[0].auto.when = ReclaimWhen::Interval;
    others[1].auto.on = false;
    for (name, status) in ["by-interval", "off"].into_iter().zip(others) {
        publish(&daemon, name, status);
    }
    let mut watcher = Watcher::new(daemon.clone(), None);
    look(&mut watcher).await;
    assert!(watcher.reader.is_none(), "nobody asks for it");
    publish(&daemon, "asks", status(0, 1));
    look(&mut watcher).await;
    let heard = heard(&watcher, &notices).await;
    let [(name, notice)] = heard.as_slice() else { panic!("{heard:?}") };
    assert_eq!((name.as_str(), notice.why.as_deref()), ("asks", None));
    assert!(notice.seen_by.starts_with("available memory"), "{}", notice.seen_by);
    assert_eq!(given(&watcher), None);
}

#[tokio::test]
async fn a_vm_whose_process_does_not_answer_delays_nobody_for_long() {
    let (home, notices) = (tempfile::tempdir().unwrap(), Notices::default());
    let daemon = daemon(home.path());
    // Its process listens, and accepts nothing.
    let _silent = testing::listen(&daemon, "silent");
    publish(&daemon, "silent", status(100, 2));
    serve(&daemon, "answers", &notices);
    publish(&daemon, "answers", status(100, 1));
    let mut watcher = Watcher::new(daemon, None);
    look(&mut watcher).await;
    assert_eq!(names(&notices.lock().unwrap()), ["answers"]);
}
