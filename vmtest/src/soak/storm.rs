//! Kills processes, has the swap disk fail, and fills the run directory.

use std::fs;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::chance::Chance;
use super::place::Place;
use super::shared::{Phase, Shared};
use super::tally::count;
use crate::faulty::Failing;
use crate::process;

/// How often a daemon is begun before the soak fails.
const TRIES: u32 = 40;
const BETWEEN_TRIES: Duration = Duration::from_millis(500);

#[derive(Clone, Copy)]
enum Kill {
    Daemon,
    Server,
    All,
    Stopped,
    DiskServer,
    Qemu,
}

/// How often what is killed.
const KILLS: [(u64, Kill); 6] = [
    (8, Kill::Daemon),
    (10, Kill::Server),
    (6, Kill::All),
    (4, Kill::Stopped),
    (4, Kill::DiskServer),
    (1, Kill::Qemu),
];

/// How often the swap disk fails in which way.
const FAILING: [(u64, &str, Failing); 4] = [
    (3, "reads fail", Failing::Reads),
    (3, "writes fail", Failing::Writes),
    (3, "full", Failing::Full),
    (2, "slow", Failing::Slow(Duration::from_millis(15))),
];

/// Values of a setting that the next daemon may have.
const SETTINGS: [(&str, &[&str]); 4] = [
    ("EBB_COMPRESSED", &["0", "24M", "64M"]),
    ("EBB_FORGET_BY", &["call", "ring"]),
    ("EBB_READ_FREED", &["true", "false"]),
    ("EBB_WHEN_SWAP_IS_FULL", &["wait", "give-way"]),
];

/// Kills until the soak is over.
pub fn kill(shared: &Shared<'_>, mut chance: Chance) {
    let places: Vec<&Place> = shared.places.iter().collect();
    while shared.pause(chance.pause(1500, 8000), Phase::Calm) {
        let Some(_disturbance) = shared.gate.disturb() else { continue };
        let place = chance.of(&places);
        let what = match chance.weighted(&KILLS) {
            Kill::Daemon => daemon(shared, &mut chance, false).then_some("daemon"),
            Kill::All => hold_all(shared).and_then(|_held| {
                daemon(shared, &mut chance, true).then_some("daemon and VMs' processes")
            }),
            Kill::Server => place.hold().and_then(|_held| {
                server(shared, place).map(process::kill).map(|()| "VM's process")
            }),
            Kill::Stopped => server(shared, place).and_then(|pid| {
                let time = chance.pause(200, 3000);
                stop(shared, pid, time).then_some("VM's process stopped")
            }),
            Kill::DiskServer => shared
                .places
                .iter()
                .any(|place| place.restart_server(|| thread::sleep(chance.pause(0, 1500))))
                .then_some("disk's process"),
            Kill::Qemu => place.doom().then_some("QEMU"),
        };
        what.into_iter().for_each(|what| shared.tally(|tally| count(&mut tally.kills, what)));
    }
}

fn hold_all(shared: &Shared<'_>) -> Option<Vec<impl Sized>> {
    shared.places.iter().map(Place::hold).collect()
}

fn server(shared: &Shared<'_>, place: &Place) -> Option<i32> {
    shared.host.server(place.running()?.name.as_str())
}

/// Stops a process for a time.
fn stop(shared: &Shared<'_>, pid: i32, time: Duration) -> bool {
    let Some(pid) = Pid::from_raw(pid) else { return false };
    let is_stopped = kill_process(pid, Signal::STOP).is_ok();
    shared.pause(time, Phase::Calm);
    // It may have been killed meanwhile.
    let _ = kill_process(pid, Signal::CONT);
    is_stopped
}

/// Kills the daemon, with the processes of all VMs or without, and starts another one.
fn daemon(shared: &Shared<'_>, chance: &mut Chance, with_servers: bool) -> bool {
    let Some(pid) = shared.host.daemon() else { return begin(shared) };
    process::kill(pid);
    if with_servers {
        shared.host.kill_servers();
    }
    shared.pause(chance.pause(0, 1500), Phase::Calm);
    if chance.once_in(2) {
        let (name, values) = chance.of(&SETTINGS);
        shared.host.set(name, chance.of(values));
    }
    begin(shared)
}

/// Starts a daemon, as any command does. Returns whether one runs.
pub fn begin(shared: &Shared<'_>) -> bool {
    let mut why = String::new();
    for _ in 0..TRIES {
        let ran = shared.host.ebb("list");
        if ran.code == Some(0) {
            return true;
        }
        why = ran.stderr;
        if !shared.pause(BETWEEN_TRIES, Phase::Over) {
            return false;
        }
    }
    shared.fail(format!("no daemon begins: {why}"));
    false
}

/// Has the swap disk fail for some time, again and again, until the soak is over.
pub fn fail_disk(shared: &Shared<'_>, mut chance: Chance) {
    let Some(disk) = &shared.swap else { return };
    while shared.pause(chance.pause(3000, 12_000), Phase::Calm) {
        let Some(_disturbance) = shared.gate.disturb() else { continue };
        let ways = FAILING.map(|(weight, what, failing)| (weight, (what, failing)));
        let (what, failing) = chance.weighted(&ways);
        disk.set(failing);
        shared.tally(|tally| count(&mut tally.disk_errors, what));
        shared.pause(chance.pause(300, 3500), Phase::Calm);
        disk.set(Failing::Nothing);
    }
}

/// Fills the file system of the run directory for some time, again and again, until the soak is
/// over.
pub fn fill_run_directory(shared: &Shared<'_>, mut chance: Chance) {
    while shared.pause(chance.pause(8000, 30_000), Phase::Calm) {
        let Some(_disturbance) = shared.gate.disturb() else { continue };
        let fill = shared.run.fill();
        shared.tally(|tally| count(&mut tally.disk_errors, "run directory full"));
        shared.pause(chance.pause(100, 2500), Phase::Calm);
        if let Err(error) = fs::remove_file(&fill) {
            shared.fail(format!("{}: {error}", fill.display()));
        }
    }
}
