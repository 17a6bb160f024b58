//! The pilot with stand-ins for VMs' processes.

use std::path::Path;
use std::sync::Arc;

use axum::routing::{post, put};
use axum::{Json, Router};
use ebb_api::{PilotRequest, PilotStatus, ReclaimReport, RuleRequest};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::*;
use crate::host::swap_dir::SwapDir;
use crate::host::testing::{self, piloted};
use crate::model::figures::VmFigures;
use crate::model::piloted::{Piloted, PilotedCompressed, PilotedPlugged, PlugRequest};
use crate::model::vm_routes::{PILOT_COMPRESSED, PILOT_LIMIT, PILOT_PLUGGED, PILOT_RECLAIM};

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(20);

/// What VMs were told, in this order.
type Told = Arc<Mutex<Vec<String>>>;

fn daemon(run: &Path) -> Daemon {
    testing::daemon(run, SwapDir::new(run, None).unwrap())
}

/// A VM with this much free memory that is resident.
fn publish(daemon: &Daemon, name: &str, free_mib: u64, piloted: Piloted) {
    let mut status = testing::status();
    (status.memory_bytes, status.resident_bytes) = (4096 * MIB, 4096 * MIB);
    (status.guest_free_bytes, status.guest.trusted) = (Some(free_mib * MIB), true);
    testing::publish(daemon, name, status, Some(piloted));
}

/// Stands in for the process of a VM. Its answers wait until they are to come.
fn serve(daemon: &Daemon, name: &'static str, told: &Told, go: Option<Arc<Notify>>) {
    let (limits, reclaims) = (Arc::clone(told), Arc::clone(told));
    let (sizes, plugs) = (Arc::clone(told), Arc::clone(told));
    let plugged = move |Json(PlugRequest { from_bytes, to_bytes }): Json<PlugRequest>| {
        let (from, to) = (from_bytes / MIB, to_bytes / MIB);
        plugs.lock().unwrap().push(format!("{name}: plugged {from} -> {to}"));
        let (status, member, piloted) = (testing::status(), None, None);
        async move { Json(VmFigures { number: 0, status, member, piloted, times: None }) }
    };
    let compressed = move |Json(size): Json<Option<u64>>| {
        sizes.lock().unwrap().push(format!("{name}: compressed {:?}", size.map(|it| it / MIB)));
        let (status, member, piloted, times) = (testing::status(), None, None, None);
        async move { Json(VmFigures { number: 0, status, member, piloted, times }) }
    };
    let limit = move |Json(limit): Json<Option<u64>>| {
        limits.lock().unwrap().push(format!("{name}: limit {:?}", limit.map(|bytes| bytes / MIB)));
        async move {
            if let Some(go) = go {
                go.notified().await;
            }
            let (status, member, piloted, times) = (testing::status(), None, None, None);
            Json(VmFigures { number: 0, status, member, piloted, times })
        }
    };
    let reclaim = move |Json(request): Json<ebb_api::ReclaimRequest>| {
        let bytes = request.bytes.unwrap();
        reclaims.lock().unwrap().push(format!("{name}: reclaim {}", bytes / MIB));
        async move { Json(ReclaimReport { bytes, ..testing::status().auto.last.unwrap() }) }
    };
    let router = Router::new().route(PILOT_LIMIT, put(limit));
    let router = router.route(PILOT_COMPRESSED, put(compressed));
    let router = match name {
        "refuses" => router,
        _ => router.route(PILOT_PLUGGED, put(plugged)),
    };
    testing::serve(daemon, name, router.route(PILOT_RECLAIM, post(reclaim)));
}

fn turn(daemon: &Daemon, mode: PilotMode) -> PilotStatus {
    set(daemon, &PilotRequest { mode: Some(mode), ..PilotRequest::default() }).unwrap()
}

/// Makes the host look as if it had too little memory. The reserve is changed, not the host.
fn make_short(daemon: &Daemon) {
    let request = PilotRequest { reserve_percent: Some(90), ..PilotRequest::default() };
    set(daemon, &request).unwrap();
}

async fn look(keeper: &mut Keeper) {
    timeout(LONG, keeper.look(Scope::All)).await.expect("it waits").unwrap();
}

/// Looks until nothing is being done any more, and returns what VMs were told.
async fn told(keeper: &mut Keeper, told: &Told) -> Vec<String> {
    let daemon = keeper.daemon.clone();
    let waiting = async {
        while daemon.listings().iter().any(|(name, _)| keeper.acts.is_busy(name)) {
            keeper.acts.collect();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LONG, waiting).await.expect("an end");
    std::mem::take(&mut *told.lock().unwrap())
}

#[tokio::test]
async fn a_pilot_that_is_off_does_nothing() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    serve(&daemon, "web", &notes, None);
    publish(&daemon, "web", 1000, piloted());
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await, [""; 0]);
    assert_eq!((status(&daemon).mode, status(&daemon).stage), (PilotMode::Off, None));
    assert!(keeper.reader.is_none(), "nobody needs the host's figures");
}

#[tokio::test]
async fn what_is_decided_is_done_and_on_record() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    serve(&daemon, "web", &notes, None);
    publish(&daemon, "web", 1000, piloted());
    turn(&daemon, PilotMode::On);
    make_short(&daemon);
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await, ["web: reclaim 1000"]);
    let decided = &status(&daemon).decisions[..];
    let [first] = decided else { panic!("one at a time: {decided:?}") };
    assert_eq!(first.action, "reclaim 1000 MiB of free memory");
    assert_eq!(first.outcome.as_deref(), Some("reclaimed 1000 MiB"));
    look(&mut keeper).await;
    let limit = told(&mut keeper, &notes).await;
    assert!(matches!(&limit[..], [limit] if limit.starts_with("web: limit Some(")), "{limit:?}");
    assert_eq!(status(&daemon).decisions[0].outcome.as_deref(), Some("done"));
    let events = testing::events(&daemon).await;
    let [stage, reclaim, limit] = &events[..] else { panic!("{events:?}") };
    assert!(stage.stage.is_some() && stage.text.contains("was ample"), "{stage:?}");
    assert!(reclaim.text.starts_with("reclaim 1000 MiB of free memory ("), "{reclaim:?}");
    assert!(reclaim.text.ends_with("): reclaimed 1000 MiB"), "{reclaim:?}");
    let figures = limit.decision.as_ref().expect("a decision");
    assert_eq!((figures.action, figures.from_bytes), (PilotAction::Limit, None));
    assert!(figures.to_bytes.is_some() && figures.outcome == "done", "{limit:?}");
}

#[tokio::test]
async fn a_dry_run_decides_and_does_nothing() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    serve(&daemon, "web", &notes, None);
    publish(&daemon, "web", 1000, piloted());
    turn(&daemon, PilotMode::DryRun);
    make_short(&daemon);
    let mut keeper = Keeper::new(daemon.clone(), None);
    for _ in 0..3 {
        look(&mut keeper).await;
    }
    assert_eq!(told(&mut keeper, &notes).await, [""; 0]);
    let decisions = status(&daemon).decisions;
    assert_eq!(decisions.len(), 2, "each kind once: {decisions:?}");
    let outcomes = decisions.iter().map(|decision| decision.outcome.as_deref());
    assert!(outcomes.into_iter().all(|outcome| outcome == Some("not done: dry run")));
    let events = testing::events(&daemon).await.into_iter();
    assert_eq!(events.filter(|event| event.text.ends_with(": not done: dry run")).count(), 2);
}

#[tokio::test]
async fn a_vm_that_is_slow_delays_nobody() {
    let (home, notes, go) = (tempfile::tempdir().unwrap(), Told::default(), Arc::default());
    let daemon = daemon(home.path());
    serve(&daemon, "slow", &notes, Some(Arc::clone(&go)));
    serve(&daemon, "web", &notes, None);
    for name in ["slow", "web"] {
        publish(&daemon, name, 0, piloted());
    }
    turn(&daemon, PilotMode::On);
    make_short(&daemon);
    let mut keeper = Keeper::new(daemon.clone(), None);
    let waiting = async {
        while notes.lock().unwrap().iter().filter(|told| told.starts_with("web")).count() < 3 {
            look(&mut keeper).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LONG, waiting).await.expect("three limits");
    let slow = notes.lock().unwrap().iter().filter(|told| told.starts_with("slow")).count();
    assert_eq!(slow, 1, "nothing else is asked of it meanwhile");
    go.notify_waiters();
}

#[tokio::test]
async fn a_vm_that_misses_memory_is_relieved_once_its_last_act_has_ended() {
    for skipping in [Scope::Relief, Scope::All] {
        relieve_once_an_act_has_ended(skipping).await;
    }
}

/// `skipping`: the look that finds that something is being done for the VM.
async fn relieve_once_an_act_has_ended(skipping: Scope) {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let (daemon, go) = (daemon(home.path()), Arc::new(Notify::new()));
    serve(&daemon, "web", &notes, Some(Arc::clone(&go)));
    let limited = Piloted { limit_bytes: Some(2000 * MIB), ..piloted() };
    publish(&daemon, "web", 0, limited.clone());
    turn(&daemon, PilotMode::On);
    // The host has enough, so limits go up.
    let request = PilotRequest { reserve_percent: Some(1), ..PilotRequest::default() };
    set(&daemon, &request).unwrap();
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    let mut missing = testing::status();
    (missing.memory_bytes, missing.resident_bytes) = (4096 * MIB, 4096 * MIB);
    missing.limit.refaulted_total_bytes += 400 * MIB;
    testing::publish(&daemon, "web", missing, Some(limited));
    keeper.look(skipping).await.unwrap();
    let decided = status(&daemon).decisions;
    assert!(matches!(&decided[..], [one] if one.outcome.is_none()), "one at a time: {decided:?}");
    go.notify_one();
    let heard = daemon.pilot().missed.notified();
    timeout(LONG, heard).await.expect("nobody tells that it has ended");
    // It is on record before anybody looks again.
    assert_eq!(status(&daemon).decisions[0].outcome.as_deref(), Some("done"));
    keeper.look(Scope::Relief).await.unwrap();
    let why = &status(&daemon).decisions[0].why;
    assert!(why.contains("came back within seconds"), "{why}");
    go.notify_one();
    assert_eq!(told(&mut keeper, &notes).await.len(), 2);
}

#[tokio::test]
async fn an_act_that_ends_has_nobody_look_who_has_skipped_nobody() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    serve(&daemon, "web", &notes, None);
    publish(&daemon, "web", 1000, piloted());
    turn(&daemon, PilotMode::On);
    make_short(&daemon);
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await.len(), 1);
    let heard = timeout(Duration::ZERO, daemon.pilot().missed.notified()).await;
    assert!(heard.is_err(), "the next look is at its time");
}

#[tokio::test]
async fn a_vm_whose_act_has_failed_is_left_alone_for_a_while() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    // Its process knows none of the routes.
    testing::serve(&daemon, "old", Router::new());
    serve(&daemon, "web", &notes, None);
    for name in ["old", "web"] {
        publish(&daemon, name, 1000, piloted());
    }
    turn(&daemon, PilotMode::On);
    make_short(&daemon);
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await, ["web: reclaim 1000"]);
    look(&mut keeper).await;
    let limits = told(&mut keeper, &notes).await;
    assert!(limits.iter().all(|told| told.starts_with("web: limit")), "{limits:?}");
    let of_old = status(&daemon).decisions.into_iter().filter(|one| one.vm.as_str() == "old");
    let [failed] = &of_old.collect::<Vec<_>>()[..] else { panic!("asked again") };
    let outcome = failed.outcome.as_deref().unwrap();
    assert!(outcome.starts_with("failed: its process answers 404"), "{outcome}");
}

#[tokio::test]
async fn a_dry_run_lifts_the_limits_that_were_set() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    serve(&daemon, "web", &notes, None);
    publish(&daemon, "web", 0, Piloted { limit_bytes: Some(2000 * MIB), ..piloted() });
    turn(&daemon, PilotMode::DryRun);
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await, ["web: limit None"]);
}

#[tokio::test]
async fn limits_are_lifted_when_the_pilot_is_turned_off() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    serve(&daemon, "web", &notes, None);
    publish(&daemon, "web", 0, Piloted { limit_bytes: Some(2000 * MIB), ..piloted() });
    // Its compressed memory is as all VMs have it.
    let compressed = PilotedCompressed { most_bytes: 64 * MIB, is_piloted: false, own_bytes: 0 };
    serve(&daemon, "other", &notes, None);
    publish(&daemon, "other", 0, Piloted { compressed: Some(compressed), ..piloted() });
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await, ["web: limit None"]);
    let compressed = Some(PilotedCompressed { is_piloted: true, ..compressed });
    publish(&daemon, "other", 0, Piloted { compressed, ..piloted() });
    publish(&daemon, "web", 0, piloted());
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await, ["other: compressed None"]);
    assert_eq!(status(&daemon).decisions[0].why, "the pilot is off, or in a dry run");
}

/// Of 2 GiB of plugged memory, the pilot has had half unplugged.
fn unplugged() -> PilotedPlugged {
    let (bytes, asked_bytes, full_bytes) = (1024 * MIB, 1024 * MIB, 2048 * MIB);
    PilotedPlugged { bytes, asked_bytes, full_bytes, block_bytes: 2 * MIB, may_unplug: true }
}

#[tokio::test]
async fn what_was_unplugged_comes_back_first_when_the_pilot_is_turned_off() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    let both = Piloted { limit_bytes: Some(2000 * MIB), plugged: Some(unplugged()), ..piloted() };
    for name in ["web", "refuses"] {
        serve(&daemon, name, &notes, None);
        publish(&daemon, name, 0, both.clone());
    }
    assert_eq!(status(&daemon).vms[0].unplugged_bytes, 1024 * MIB);
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await, ["web: plugged 1024 -> 2048"]);
    publish(&daemon, "web", 0, Piloted { plugged: None, ..both });
    look(&mut keeper).await;
    let mut limits = told(&mut keeper, &notes).await;
    limits.sort();
    let expected = ["refuses: limit None", "web: limit None"];
    assert_eq!(limits, expected, "who refuses to plug keeps its limit no longer");
}

#[tokio::test]
async fn a_dry_run_gives_back_what_was_unplugged() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    serve(&daemon, "web", &notes, None);
    publish(&daemon, "web", 0, Piloted { plugged: Some(unplugged()), ..piloted() });
    turn(&daemon, PilotMode::DryRun);
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await, ["web: plugged 1024 -> 2048"]);
}

#[tokio::test]
async fn a_held_vm_gets_back_what_it_unplugged() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    serve(&daemon, "held", &notes, None);
    publish(&daemon, "held", 0, Piloted { plugged: Some(unplugged()), ..piloted() });
    let hold = RuleRequest { hold: Some(true), ..RuleRequest::default() };
    rule(&daemon, &"held".parse().unwrap(), &hold).unwrap();
    turn(&daemon, PilotMode::On);
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await, ["held: plugged 1024 -> 2048"]);
}

#[tokio::test]
async fn a_held_vm_and_one_with_a_limit_of_its_own_are_left_alone() {
    let (home, notes) = (tempfile::tempdir().unwrap(), Told::default());
    let daemon = daemon(home.path());
    for name in ["held", "own"] {
        serve(&daemon, name, &notes, None);
    }
    publish(&daemon, "held", 1000, piloted());
    publish(&daemon, "own", 0, Piloted { left_alone: Some("its own".into()), ..piloted() });
    let hold = RuleRequest { hold: Some(true), ..RuleRequest::default() };
    rule(&daemon, &"held".parse().unwrap(), &hold).unwrap();
    turn(&daemon, PilotMode::On);
    make_short(&daemon);
    let mut keeper = Keeper::new(daemon.clone(), None);
    look(&mut keeper).await;
    assert_eq!(told(&mut keeper, &notes).await, [""; 0]);
}

#[test]
fn settings_outlive_the_daemon() {
    let home = tempfile::tempdir().unwrap();
    {
        let daemon = daemon(home.path());
        publish(&daemon, "web", 0, piloted());
        turn(&daemon, PilotMode::DryRun);
        let request = RuleRequest {
            class: Some(ebb_api::VmClass::Batch),
            min_bytes: Some(1 << 30),
            ..RuleRequest::default()
        };
        rule(&daemon, &"web".parse().unwrap(), &request).unwrap();
    }
    let daemon = daemon(home.path());
    publish(&daemon, "web", 0, piloted());
    let status = status(&daemon);
    assert_eq!((status.mode, status.reserve_percent), (PilotMode::DryRun, Some(10)));
    let [web] = &status.vms[..] else { panic!("{status:?}") };
    assert_eq!((web.class, web.min_bytes), (ebb_api::VmClass::Batch, Some(1 << 30)));
}

#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let daemon = daemon(home.path());
    publish(&daemon, "web", 0, piloted());
    let web = "web".parse().unwrap();
    let before = status(&daemon);
    let bounds = |min, max| RuleRequest {
        min_bytes: Some(min),
        max_bytes: Some(max),
        ..RuleRequest::default()
    };
    let why = rule(&daemon, &web, &bounds(2 << 30, 1 << 30)).unwrap_err().to_string();
    assert!(why.contains("a minimum of 2 GiB is above the maximum of 1 GiB"), "{why}");
    let other = "other".parse().unwrap();
    let why = rule(&daemon, &other, &RuleRequest::default()).unwrap_err().to_string();
    assert!(why.contains("there is no VM other"), "{why}");
    let request = PilotRequest { reserve_bytes: Some(u64::MAX), ..PilotRequest::default() };
    let why = set(&daemon, &request).unwrap_err().to_string();
    assert!(why.contains("more than nine tenths"), "{why}");
    assert_eq!(status(&daemon), before);
    let why = rule(&daemon, &web, &bounds(0, 1)).unwrap_err().to_string();
    assert!(why.contains("below what keeps this guest alive: give 100 MiB or more"), "{why}");
    rule(&daemon, &web, &bounds(1 << 30, 2 << 30)).unwrap();
    rule(&daemon, &web, &bounds(0, 0)).unwrap();
    assert_eq!(status(&daemon), before, "0 takes a bound away");
}

#[test]
fn what_was_detached_is_left_alone_while_its_process_lives() {
    let home = tempfile::tempdir().unwrap();
    let daemon = daemon(home.path());
    let mut ended = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    daemon.pilot_record().leave(ended.id() as i32).unwrap();
    let own = std::process::id() as i32;
    let left =
        || daemon.pilot_record().settings().left.iter().map(|left| left.pid).collect::<Vec<_>>();
    assert_eq!(left(), [ended.id() as i32]);
    ended.kill().unwrap();
    ended.wait().unwrap();
    daemon.pilot_record().leave(own).unwrap();
    daemon.pilot_record().leave(own).unwrap();
    assert_eq!(left(), [own]);
    // The next daemon knows it, too.
    let again = PilotRecord::open(&daemon.site().run_dir).unwrap();
    assert_eq!(again.settings().left, daemon.pilot_record().settings().left);
}
