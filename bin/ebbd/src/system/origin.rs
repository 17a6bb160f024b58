//! What is known of a QEMU that Ebb started, kept for attaching it again after it was detached:
//! `origin.json`, which stays in the VM's directory as long as QEMU runs. It tells where its
//! console is and what QEMU may do. It does not tell what may be done with its memory.

use std::io;
use std::path::{Path, PathBuf};

use ebb_api::Confinement;
use serde::{Deserialize, Serialize};

use crate::model::record::Record;
use crate::support::state_file;

const FILE: &str = "origin.json";

#[derive(Serialize, Deserialize)]
struct Origin {
    pid: i32,
    start_ticks: u64,
    boot: String,
    logs: Option<PathBuf>,
    confinement: Option<Confinement>,
}

/// Writes the file beside the record of a VM that is about to be detached, if Ebb started it.
///
/// # Errors
/// Those of write(2).
pub fn keep(record: &Record, directory: &Path) -> io::Result<()> {
    if !record.has_console() {
        return Ok(());
    }
    let origin = Origin {
        pid: record.pid,
        start_ticks: record.start_ticks,
        boot: record.boot.clone(),
        logs: record.logs.clone(),
        confinement: record.confinement.clone(),
    };
    state_file::save(&directory.join(FILE), &origin)
}

/// Puts into the record what the file has about the same process. Without the file, the VM is
/// managed like any other.
pub fn restore(record: &mut Record, directory: &Path) {
    let origin = match state_file::load::<Origin>(&directory.join(FILE)) {
        Ok(Some(origin)) => origin,
        Ok(None) => return,
        Err(error) => {
            tracing::warn!("{FILE}: {error}");
            return;
        }
    };
    let whose = (origin.pid, origin.start_ticks, origin.boot.as_str());
    if whose == (record.pid, record.start_ticks, record.boot.as_str()) {
        (record.logs, record.confinement) = (origin.logs, origin.confinement);
        record.console = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record of a daemon that did not know of origins.
    const RECORD: &str = r#"{
        "name": "web", "pid": 7, "start_ticks": 9, "boot": "b", "userfaultfd": null,
        "started": true, "logs": "/var/log/ebb/web", "qmp": "/q", "accelerator": "tcg",
        "accelerator_reason": "", "backing": "thp", "backing_reason": "", "mode": "release",
        "mode_reason": "", "min_order": 9, "begin": false, "evicts": false,
        "auto": {"on": false, "interval_ms": 5000, "keep_bytes": 0}, "swap": "/s", "regions": [],
        "totals": {"absent_at_hold_bytes": 0, "reclaimed_bytes": 0, "returned_bytes": 0}
    }"#;

    #[test]
    fn the_same_qemu_has_its_console_again() {
        let directory = tempfile::tempdir().unwrap();
        let first: Record = serde_json::from_str(RECORD).unwrap();
        let confinement = Confinement {
            privileged: false,
            uid: 0x7000_0007,
            gid: 0x7000_0007,
            sandbox: true,
            cgroups: Vec::new(),
            lacks: Vec::new(),
        };
        let first = Record { confinement: Some(confinement), ..first };
        assert!(first.has_console());
        let anew = || Record { started: false, logs: None, confinement: None, ..first.clone() };
        let mut again = anew();
        restore(&mut again, directory.path());
        assert!(!again.has_console(), "nothing was kept");
        // A VM that somebody else started leaves nothing.
        keep(&again, directory.path()).unwrap();
        assert_eq!(directory.path().read_dir().unwrap().count(), 0);

        keep(&first, directory.path()).unwrap();
        restore(&mut again, directory.path());
        assert!(again.has_console() && !again.started);
        assert_eq!((&again.logs, &again.confinement), (&first.logs, &first.confinement));
        // Detached once more.
        keep(&again, directory.path()).unwrap();
        let mut other = Record { start_ticks: 10, ..anew() };
        restore(&mut other, directory.path());
        assert!(!other.has_console(), "it is another process");
    }
}
