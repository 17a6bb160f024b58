//! A daemon whose VMs' processes are stand-ins.

use std::fs;
use std::path::Path;

use axum::Router;
use ebb_api::{Event, VmStatus};
use tokio::net::UnixListener;

use super::events::{Asker, Filter};
use super::listing::Stage;
use super::pilot::PilotRecord;
use super::pool::PoolRecord;
use super::registry::{Daemon, SharedByVms};
use super::swap_dir::SwapDir;
use crate::model::figures::VmFigures;
use crate::model::piloted::Piloted;
use crate::model::record::{Record, Settings};
use crate::model::site::{Site, api_socket};
use crate::system::calibration::Calibrated;

/// A daemon with this run directory.
pub fn daemon(run: &Path, swap_dir: SwapDir) -> Daemon {
    let site = Site {
        run_dir: run.into(),
        log_dir: run.into(),
        swap_dir: swap_dir.path().into(),
        settings: Settings::default(),
        vm_user: "own".into(),
    };
    let shared = SharedByVms {
        pool: PoolRecord::open(run).unwrap(),
        pilot_record: PilotRecord::open(run).unwrap(),
        calibrated: Calibrated::open(run).unwrap(),
        table: None,
    };
    Daemon::new(site, swap_dir, shared, true)
}

/// The status of a VM of which nothing is evicted.
pub fn status() -> VmStatus {
    let text = include_str!("../../../ebb/tests/cli/status.json");
    serde_json::from_str(text).unwrap()
}

/// What a VM of 4 GiB tells the pilot. It has 3000 MiB, and works with 1000.
pub fn piloted() -> Piloted {
    const MIB: u64 = 1 << 20;
    Piloted {
        taken_bytes: 3000 * MIB,
        memory_bytes: 4096 * MIB,
        floor_bytes: 100 * MIB,
        working_bytes: Some(1000 * MIB),
        limit_bytes: None,
        missed_total_bytes: None,
        compressed: None,
        plugged: None,
        left_alone: None,
    }
}

/// Publishes figures of a VM as its process would, with no times.
pub fn publish(daemon: &Daemon, name: &str, status: VmStatus, piloted: Option<Piloted>) {
    publish_all(daemon, name, VmFigures { number: 1, status, member: None, piloted, times: None });
}

/// Publishes all figures of a VM as its process would.
pub fn publish_all(daemon: &Daemon, name: &str, figures: VmFigures) {
    let text = include_str!("../../../../fuzz/corpus/vm_json/whole");
    let record: Record = serde_json::from_str(text).unwrap();
    let listing = daemon.listing(&name.parse().unwrap(), &record, Stage::Managed);
    listing.publish(figures);
}

/// All events that are kept.
pub async fn events(daemon: &Daemon) -> Vec<Event> {
    let reader = daemon.events().read(Filter::new(None, &[]), None, false, Asker::Host);
    let (mut reader, mut all) = (reader.unwrap(), Vec::new());
    while let Some(event) = reader.next().await {
        all.push(Event::clone(&event));
    }
    all
}

/// The socket of a VM's process.
pub fn listen(daemon: &Daemon, name: &str) -> UnixListener {
    let directory = daemon.site().directory(&name.parse().unwrap());
    fs::create_dir_all(&directory).unwrap();
    UnixListener::bind(api_socket(&directory)).unwrap()
}

/// Serves these routes as a VM's process would.
pub fn serve(daemon: &Daemon, name: &str, router: Router) {
    let listener = listen(daemon, name);
    tokio::spawn(async move { axum::serve(listener, router).await });
}
