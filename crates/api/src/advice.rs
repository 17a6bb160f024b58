//! What `ebbd` and `ebb doctor` say in the same words: what is wrong, and what to do.

use std::path::Path;

/// How to end the daemon with this process number.
pub fn end(pid: impl std::fmt::Display) -> String {
    format!("end ebbd (`kill {pid}`)")
}

/// Of a run directory on a disk, where `ebb run` and `ebb attach` hold no VM; `daemon`: the process
/// that serves it already.
pub fn keys_on_disk(run_dir: &Path, daemon: Option<i32>) -> (String, String) {
    let why = format!(
        "the run directory {} is on a disk, and the key of the VM's swap file would be, too",
        run_dir.display()
    );
    let first = daemon.map(|pid| format!("{} and ", end(pid))).unwrap_or_default();
    let advice = format!(
        "name one on tmpfs (EBB_RUN_DIR, or --run-dir), or {first}allow it \
         (EBB_ALLOW_KEYS_ON_DISK=true, or ebbd --allow-keys-on-disk)"
    );
    (why, advice)
}
