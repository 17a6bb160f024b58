//! Tests of who is told what of the host's memory, with stand-ins for VMs' processes.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::routing::put;
use axum::{Json, Router};
use ebb_api::{ReclaimWhen, VmStatus};
use tokio::net::UnixListener;

use super::*;
use crate::host::listing::{Listing, Stage};
use crate::host::pool::PoolRecord;
use crate::host::registry::SharedByVms;
use crate::host::swap_dir::SwapDir;
use crate::model::figures::VmFigures;
use crate::model::record::{Record, Settings};
use crate::model::site::{Site, api_socket};
use crate::system::calibration::Calibrated;

/// What each VM was told, in this order.
type Told = Arc<Mutex<Vec<(String, PressureNotice)>>>;

fn daemon(run: &Path) -> Daemon {
    let site = Site {
        run_dir: run.into(),
        log_dir: run.into(),
        swap_dir: run.into(),
        settings: Settings::default(),
        vm_user: "own".into(),
    };
    let pool = PoolRecord::open(run).unwrap();
    let shared = SharedByVms { pool, calibrated: Calibrated::open(run).unwrap(), table: None };
    Daemon::new(site, SwapDir::new(run, None).unwrap(), shared, true)
}

/// The status of a VM that asks to be told of a host with less than this available, and has heard
/// nothing yet.
fn status(below_percent: u32, free_bytes: u64) -> VmStatus {
    let text = include_str!("../../../../ebb/tests/cli/status.json");
    let mut status: VmStatus = serde_json::from_str(text).unwrap();
    (status.guest_free_bytes, status.auto.pressure) = (Some(free_bytes), None);
    (status.auto.below_percent, status.auto.below_bytes) = (Some(below_percent), None);
    status
}

fn publish(daemon: &Daemon, name: &str, status: VmStatus) {
    let text = include_str!("../../../../../fuzz/corpus/vm_json/whole");
    let record: Record = serde_json::from_str(text).unwrap();
    let listing = daemon.listing(&name.parse().unwrap(), || Listing::new(&record, Stage::Managed));
    listing.publish(VmFigures { number: 1, status, member: None });
}

/// Stands in for the process of a VM, which gives a byte each time it is to reclaim.
fn serve(daemon: &Daemon, name: &str, told: &Told) {
    let directory = daemon.site().directory(&name.parse().unwrap());
    fs::create_dir_all(&directory).unwrap();
    let listener = UnixListener::bind(api_socket(&directory)).unwrap();
    let (name, told) = (name.to_owned(), Arc::clone(told));
    let hear = move |Json(notice): Json<PressureNotice>| {
        let bytes = u64::from(notice.why.is_some());
        told.lock().unwrap().push((name, notice));
        async move { Json(bytes) }
    };
    let router = Router::new().route(HOST_PRESSURE, put(hear));
    tokio::spawn(async move { axum::serve(listener, router).await });
}

#[tokio::test]
async fn who_may_have_the_most_to_give_is_asked_first() {
    let (home, told) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    for (name, free_bytes) in [("small", 1), ("large", 3), ("middle", 2)] {
        serve(&daemon, name, &told);
        publish(&daemon, name, status(100, free_bytes));
    }
    let mut watcher = Watcher::new(daemon.clone(), None);
    watcher.look(false).await.unwrap();
    let heard = std::mem::take(&mut *told.lock().unwrap());
    let names: Vec<&str> = heard.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["large", "middle", "small"]);
    for (_, notice) in &heard {
        let why = notice.why.as_ref().unwrap();
        assert!(why.starts_with("host: available ") && why.contains(" below "), "{why}");
    }
    assert_eq!(watcher.shortage, Some(3));
    // No threshold holds any more.
    for name in ["small", "large", "middle"] {
        publish(&daemon, name, status(0, 1));
    }
    watcher.look(false).await.unwrap();
    assert_eq!(watcher.shortage, None);
    assert!(told.lock().unwrap().iter().all(|(_, notice)| notice.why.is_none()));
}

#[tokio::test]
async fn a_vm_hears_that_its_host_is_watched() {
    let (home, told) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    for name in ["asks", "by-interval", "off"] {
        serve(&daemon, name, &told);
    }
    let mut others = [status(100, 1), status(100, 1)];
    others[0].auto.when = ReclaimWhen::Interval;
    others[1].auto.on = false;
    for (name, status) in ["by-interval", "off"].into_iter().zip(others) {
        publish(&daemon, name, status);
    }
    let mut watcher = Watcher::new(daemon.clone(), None);
    watcher.look(false).await.unwrap();
    assert!(watcher.reader.is_none(), "nobody asks for it");
    publish(&daemon, "asks", status(0, 1));
    watcher.look(false).await.unwrap();
    let heard = std::mem::take(&mut *told.lock().unwrap());
    let [(name, notice)] = heard.as_slice() else { panic!("{heard:?}") };
    assert_eq!((name.as_str(), notice.why.as_deref()), ("asks", None));
    assert!(notice.seen_by.starts_with("available memory"), "{}", notice.seen_by);
    assert_eq!(watcher.shortage, None);
}

#[tokio::test]
async fn a_vm_whose_process_does_not_answer_delays_nobody_for_long() {
    let (home, told) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    // Its process listens, and accepts nothing.
    let directory = daemon.site().directory(&"silent".parse().unwrap());
    fs::create_dir_all(&directory).unwrap();
    let _silent = UnixListener::bind(api_socket(&directory)).unwrap();
    publish(&daemon, "silent", status(100, 2));
    serve(&daemon, "answers", &told);
    publish(&daemon, "answers", status(100, 1));
    let mut watcher = Watcher::new(daemon, None);
    watcher.look(false).await.unwrap();
    let heard = told.lock().unwrap();
    assert_eq!(heard.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["answers"]);
}
